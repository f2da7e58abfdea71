/* A strip: a block of rows against every key that any of them sees, and its forward pass.

   Rows are whole, so that sums over a row need no correction later. The strip lies in memory as blocks of BLOCK_KEYS
   keys, (block, row, key), so that all the work on one block stays in cache. */
#ifndef LSSAR_STRIP_H
#define LSSAR_STRIP_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "norms.h"
#include "problem.h"
#include "products.h"
#include "sweeps.h"

enum { FIRST_ROWS = 3, FLAT_ULPS = 32 }; /* numerics.py */

/* A product q.k whose activation is exactly 0, whatever the factor of the scores; that is at least LEAST_FACTOR. */
#define HIDDEN -3e38f
#define LEAST_FACTOR 1e-36f

/* What a thread works in: one allocation, laid out by `lay_out` in work.h. */
struct workspace {
    /* of the key head */
    float *k_panels, *v_panels;
    const float *k_head, *v_head;
    const float *k_rows, *v_rows; /* padded to k_stride and v_stride: the tensors themselves where no padding is needed */
    int64_t k_stride, v_stride;
    float *k_padded, *v_padded;
    float *k_inverse_norms; /* NULL where k is not to be normalised */
    float *d_k, *d_v; /* (keys and spare rows, stride): what this task adds to the gradients */
    float *gradients; /* room for d_k and d_v of a head that is one task */
    /* of the strip */
    float *a, *g;       /* (blocks, strip_rows, BLOCK_STRIDE): activations or weights, and gradients of the same */
    float *q;           /* (strip_rows, head_size), normalised where asked, times the sign of the gain */
    float *q_padded;    /* (strip_rows, k_stride), times the factor of the gradient */
    float *d_out;       /* (strip_rows, value_size) */
    float *d_out_padded; /* (strip_rows, v_stride), times the factor of the weights */
    float *sum;         /* (strip_rows, the larger stride): output, or gradient of q */
    float *w;           /* (TILE_ROWS, BLOCK_STRIDE): weights of one row of tiles */
};

struct strip {
    const struct problem *problem;
    struct workspace *space;
    int64_t key_head;
    struct power_of p;
    float least_z; /* the least z whose power p is a normal number */
    int rows, tiles;        /* rows are padded to whole tiles with rows that see nothing */
    int64_t stride;         /* floats from block to block */
    int64_t origin, blocks; /* first key, a multiple of PANEL; all positions below count from there */
    int width;              /* keys, rounded up to whole blocks but for the last one: to whole vectors and tiles */
    int common_first, common_last; /* keys that all rows see */
    int first[MAX_STRIP_ROWS], last[MAX_STRIP_ROWS]; /* keys that a row sees, [first, last); 0, 0 if none */
    int tile_first[MAX_STRIP_ROWS / TILE_ROWS], tile_last[MAX_STRIP_ROWS / TILE_ROWS]; /* their union in a tile's rows */
    float inverse_norm[MAX_STRIP_ROWS]; /* of q, where it is to be normalised */
    float factor[MAX_STRIP_ROWS];  /* what q.k is multiplied by, >= 0; log n makes it 0 where n is 1 */
    float before_gain[MAX_STRIP_ROWS]; /* the factor without the head's gain */
    float sign[MAX_STRIP_ROWS];      /* of the gain: q is multiplied by it */
    float threshold[MAX_STRIP_ROWS]; /* in means of the row */
    double total[MAX_STRIP_ROWS];  /* sum of activations */
    struct maxima max[MAX_STRIP_ROWS];
    int64_t peak_block[MAX_STRIP_ROWS]; /* where the largest score is */
    struct reweighting weighting[MAX_STRIP_ROWS];
    int flat[MAX_STRIP_ROWS];      /* all activations equal but for rounding: uniform weights */
    double norm[MAX_STRIP_ROWS];   /* sum of unscaled weights */
};

/* 1 / x; 0 for 0, since a row without weight has no output; NaN for what has left float32's range. */
static double reciprocal(double x) { return x == 0 ? 0 : isfinite((float)x) ? 1 / x : NAN; }

/* The part of [first, last) inside block b, counted from the block's start. */
struct range {
    int from, to;
};
static struct range in_block(int first, int last, int64_t b)
{
    int start = (int)b * BLOCK_KEYS;
    struct range r = {first - start < 0 ? 0 : first - start, last - start > BLOCK_KEYS ? BLOCK_KEYS : last - start};
    if (r.from >= r.to)
        r.from = r.to = 0;
    return r;
}
/* Widened to whole vectors. */
static struct range vectors_of(struct range r)
{
    struct range whole = {r.from / LANES * LANES, (r.to + LANES - 1) / LANES * LANES};
    return whole;
}

static void fill(float *x, int from, int to, float value)
{
    for (int j = from; j < to; j++)
        x[j] = value;
}

/* Zeros in the rest of a row of block b. */
static void clear_outside(const struct strip *S, int64_t b, float *x, struct range r)
{
    int width = S->width - (int)b * BLOCK_KEYS;
    fill(x, 0, r.from, 0);
    fill(x, r.to, width < BLOCK_KEYS ? width : BLOCK_KEYS, 0);
}

static float *block_row(const struct strip *S, float *strip, int64_t b, int row)
{
    return strip + b * S->stride + row * BLOCK_STRIDE;
}

/* What the rows [row, row + count) of a key head see. Returns 0 if that is nothing at all. */
static int open_strip(struct strip *S, int64_t batch, int64_t row, int count)
{
    const struct problem *P = S->problem;
    int64_t first[MAX_STRIP_ROWS], last[MAX_STRIP_ROWS], low = INT64_MAX, high = 0;
    S->rows = count;
    S->tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int r = 0; r < count; r++) {
        visible_keys(P, batch, row + r, &first[r], &last[r]);
        if (first[r] < last[r]) {
            low = min64(low, first[r]);
            high = max64(high, last[r]);
        }
    }
    if (high == 0)
        return 0;
    S->origin = low / PANEL * PANEL;
    S->blocks = (high - S->origin + BLOCK_KEYS - 1) / BLOCK_KEYS;
    int rest = (int)round_up(high - S->origin - (S->blocks - 1) * BLOCK_KEYS, 3 * PAD); /* a multiple of TILE_ROWS too */
    S->width = (int)(S->blocks - 1) * BLOCK_KEYS + rest;
    S->common_first = 0;
    S->common_last = INT32_MAX;
    for (int r = 0; r < S->tiles * TILE_ROWS; r++) {
        int sees = r < count && first[r] < last[r];
        S->first[r] = sees ? (int)(first[r] - S->origin) : 0;
        S->last[r] = sees ? (int)(last[r] - S->origin) : 0;
        if (r < count) {
            S->common_first = S->first[r] > S->common_first ? S->first[r] : S->common_first;
            S->common_last = S->last[r] < S->common_last ? S->last[r] : S->common_last;
        }
        int n = S->last[r] - S->first[r];
        int64_t head = S->key_head * P->group + (r < count ? (row + r) / P->queries : 0);
        float gain = P->gain ? P->gain[head] : 1;
        S->before_gain[r] = P->log_n ? logf((float)(n > 1 ? n : 1)) * (float)P->scale : (float)P->scale;
        S->factor[r] = S->before_gain[r] * fabsf(gain);
        S->sign[r] = gain < 0 ? -1 : 1;
        S->threshold[r] = P->threshold ? P->threshold[head] : 1;
    }
    for (int t = 0; t < S->tiles; t++) {
        S->tile_first[t] = INT32_MAX;
        S->tile_last[t] = 0;
        for (int r = t * TILE_ROWS; r < (t + 1) * TILE_ROWS; r++)
            if (S->first[r] < S->last[r]) {
                S->tile_first[t] = S->first[r] < S->tile_first[t] ? S->first[r] : S->tile_first[t];
                S->tile_last[t] = S->last[r] > S->tile_last[t] ? S->last[r] : S->tile_last[t];
            }
    }
    return 1;
}

/* Block b of `to` = rows (strip_rows x depth) times the panels, where any row of a tile sees any key of a panel. */
static void multiply_block(const struct strip *S, int64_t b, const float *rows, const float *panels, int64_t depth,
                           float *to)
{
    int64_t first_panel = S->origin / PANEL + b * (BLOCK_KEYS / PANEL);
    for (int panel = 0; panel < BLOCK_KEYS / PANEL; panel++) {
        int from = (int)b * BLOCK_KEYS + panel * PANEL;
        for (int t = 0; t < S->tiles; t++)
            if (S->tile_first[t] < from + PANEL && S->tile_last[t] > from)
                multiply_panel(depth, rows + t * TILE_ROWS * depth, panels + (first_panel + panel) * PANEL * depth,
                               block_row(S, to, b, t * TILE_ROWS) + panel * PANEL);
    }
}

/* Block b of scores for a head of few rows, straight from the keys: each is read once. */
static void multiply_few_rows(const struct strip *S, int64_t b)
{
    const struct problem *P = S->problem;
    int64_t size = P->head_size, first = S->origin + b * BLOCK_KEYS;
    int count = (int)min64(BLOCK_KEYS, P->keys - first);
    for (int j = 0; j < count; j++) {
        const float *k = S->space->k_head + (first + j) * size;
        float inverse = P->normalize ? quick_inverse_norm(k, size) : 1;
        for (int r = 0; r < S->rows; r++)
            block_row(S, S->space->a, b, r)[j] = dot_rows(S->space->q + r * size, k, size) * inverse;
    }
}

/* At least LEAST_FACTOR; NaN stays. */
static float factor_of(const struct strip *S, int r) { return S->factor[r] < LEAST_FACTOR ? LEAST_FACTOR : S->factor[r]; }

/* Scores of all blocks; activations (softplus) or the row maxima (exp). Hidden entries become 0 (softplus). */
static void score(struct strip *S)
{
    const struct problem *P = S->problem;
    struct workspace *W = S->space;
    for (int r = 0; r < S->tiles * TILE_ROWS; r++) {
        S->total[r] = 0;
        S->max[r].s = -FLT_MAX;
        S->peak_block[r] = 0;
        S->max[r].a = 0;
    }
    for (int64_t b = 0; b < S->blocks; b++) {
        if (few_rows(P))
            multiply_few_rows(S, b);
        else
            multiply_block(S, b, W->q, W->k_panels, P->head_size, W->a);
        for (int r = 0; r < S->tiles * TILE_ROWS; r++) {
            struct range seen = in_block(S->first[r], S->last[r], b), whole = vectors_of(seen);
            float *x = block_row(S, W->a, b, r);
            float before = S->max[r].s;
            fill(x, whole.from, seen.from, HIDDEN);
            fill(x, seen.to, whole.to, HIDDEN);
            if (P->activation == EXP) {
                S->max[r].s = largest_score(x, whole.from, whole.to, factor_of(S, r), before);
            } else {
                S->total[r] += activate_softplus(x, whole.from, whole.to, factor_of(S, r), &S->max[r]);
                clear_outside(S, b, x, whole);
            }
            if (S->max[r].s > before)
                S->peak_block[r] = b;
        }
    }
}

/* Scores become exp(s - max) in block b; adds to the totals. */
static void exponentiate_block(struct strip *S, int64_t b)
{
    for (int r = 0; r < S->tiles * TILE_ROWS; r++) {
        struct range whole = vectors_of(in_block(S->first[r], S->last[r], b));
        float *x = block_row(S, S->space->a, b, r);
        S->total[r] += activate_exp(x, x, whole.from, whole.to, factor_of(S, r), S->max[r].s);
        clear_outside(S, b, x, whole);
    }
}

/* Threshold, spread and flatness of each row, as `_reweight` in rows.py. */
static void set_thresholds(struct strip *S)
{
    const struct problem *P = S->problem;
    if (P->activation == EXP)
        for (int64_t b = 0; b < S->blocks; b++)
            exponentiate_block(S, b);
    for (int r = 0; r < S->rows; r++) {
        int n = S->last[r] - S->first[r];
        float total = (float)S->total[r], a_max = P->activation == EXP ? (n ? 1.0f : 0.0f) : S->max[r].a;
        float tau = n <= FIRST_ROWS ? 0 : S->threshold[r] * (total / (float)n);
        float spread = a_max - tau;
        float bound = P->cosine ? S->factor[r] : fabsf(S->max[r].s);
        float tolerance = FLAT_ULPS * FLT_EPSILON * (1 + bound); /* times the slope, which is at most 1 */
        S->flat[r] = n > FIRST_ROWS && S->threshold[r] == 1 && total > 0 && fabsf(spread) <= tolerance;
        if (S->flat[r] && P->activation == SOFTPLUS)
            S->flat[r] = fabsf(spread) <= tolerance * -expm1f(-a_max);
        float inverse = S->flat[r] || spread <= 0 ? 0 : 1 / spread;
        if (!isfinite(total + tau)) /* a comparison would take it for "below the threshold" */
            inverse = NAN;
        /* Below `least` z^p is no normal number any more: 0 instead, since denormal operands slow the products. */
        float least = inverse > 0 ? spread * S->least_z : 0;
        S->weighting[r] = (struct reweighting){tau, inverse, isfinite(total + tau) ? least : NAN};
        S->norm[r] = S->flat[r] ? n : 0;
    }
}

/* Unscaled weights of a row in block b, in `w` or where they are already; adds to the norm. */
static void weigh_row(struct strip *S, int64_t b, int r, float *w)
{
    const struct problem *P = S->problem;
    struct range seen = in_block(S->first[r], S->last[r], b), whole = vectors_of(seen);
    const float *a = block_row(S, S->space->a, b, r);
    if (P->reweighted && S->flat[r]) {
        fill(w, seen.from, seen.to, 1);
        whole = seen;
    } else if (P->reweighted) {
        S->norm[r] += reweight(a, w, whole.from, whole.to, &S->weighting[r], S->p);
    } else {
        S->norm[r] += activate_exp(a, w, whole.from, whole.to, factor_of(S, r), S->max[r].s);
    }
    clear_outside(S, b, w, whole);
}

/* The strip's rows of q, padded to whole tiles with zeros. */
static void load_queries(struct strip *S, const float *q)
{
    const struct problem *P = S->problem;
    struct workspace *W = S->space;
    int64_t count = S->rows, padding = S->tiles * TILE_ROWS - count;
    float scale[MAX_STRIP_ROWS];
    if (P->normalize)
        inverse_norms(q, count, P->head_size, S->inverse_norm);
    for (int r = 0; r < count; r++)
        scale[r] = P->normalize ? S->sign[r] * S->inverse_norm[r] : S->sign[r];
    copy_padded(q, count, P->head_size, scale, W->q, P->head_size);
    memset(W->q + count * P->head_size, 0, sizeof(float) * (size_t)(padding * P->head_size));
}

/* Output rows of the strip that starts at `row` of the key head. */
static void forward_strip(struct strip *S, int64_t batch, const float *q, float *out, int64_t row, int count)
{
    const struct problem *P = S->problem;
    struct workspace *W = S->space;
    int64_t columns = W->v_stride;
    out += row * P->value_size;
    if (!open_strip(S, batch, row, count)) {
        memset(out, 0, sizeof(float) * (size_t)(count * P->value_size));
        return;
    }
    memset(W->sum, 0, sizeof(float) * (size_t)(S->tiles * TILE_ROWS * columns));
    load_queries(S, q + row * P->head_size);
    score(S);
    int in_place = !P->reweighted && P->activation == SOFTPLUS; /* the weights are the activations */
    for (int r = 0; r < S->tiles * TILE_ROWS; r++) {
        S->flat[r] = 0;
        S->norm[r] = in_place ? S->total[r] : 0;
        S->weighting[r] = (struct reweighting){0, 0, 0};
    }
    if (P->reweighted)
        set_thresholds(S);
    for (int64_t b = 0; b < S->blocks; b++)
        for (int t = 0; t < S->tiles; t++) {
            struct range keys = in_block(S->tile_first[t], S->tile_last[t], b);
            if (keys.from == keys.to)
                continue;
            const float *w = in_place ? block_row(S, W->a, b, t * TILE_ROWS) : W->w;
            for (int i = 0; i < TILE_ROWS && !in_place; i++)
                weigh_row(S, b, t * TILE_ROWS + i, W->w + i * BLOCK_STRIDE);
            multiply_rows(columns, keys.to - keys.from, w + keys.from,
                          W->v_rows + (S->origin + b * BLOCK_KEYS + keys.from) * columns, columns,
                          W->sum + t * TILE_ROWS * columns, columns);
        }
    for (int r = 0; r < count; r++) {
        float scale = (float)reciprocal(S->norm[r]);
        for (int64_t d = 0; d < P->value_size; d++)
            out[r * P->value_size + d] = W->sum[r * columns + d] * scale;
    }
}

#endif
