/* The backward pass of a strip, from its inputs alone: five products and three sweeps over the blocks. */
#ifndef LSSAR_GRADIENT_H
#define LSSAR_GRADIENT_H

#include "strip.h"

/* What turns the gradient of the weights of a row into that of its scores. */
struct row_gradient {
    struct gradient_sums sums;
    float origin, w_dot_g; /* sweeps.h */
    float mean;   /* over the row, of the gradient of z but for the row's factor: what reaches the threshold */
    float scale;  /* of the weights: 1 / norm */
    float slope;  /* of the gradient of the scores */
    float factor; /* of the gradient of q.k */
};

/* Gradient of the largest weight of each row, before exp overwrites the scores. */
static void find_origins(const struct strip *S, struct row_gradient *G)
{
    const struct problem *P = S->problem;
    for (int r = 0; r < S->rows; r++) {
        struct range seen = in_block(S->first[r], S->last[r], S->peak_block[r]);
        const float *x = block_row(S, S->space->a, S->peak_block[r], r);
        float factor = P->activation == EXP ? factor_of(S, r) : 1, max = P->activation == EXP ? S->max[r].s : S->max[r].a;
        int peak = seen.from / LANES * LANES;
        while (peak < seen.to - LANES && max_of(load(x + peak) * factor) != max)
            peak += LANES;
        while (peak < seen.from || (peak < seen.to - 1 && x[peak] * factor != max))
            peak++;
        int64_t key = S->origin + S->peak_block[r] * BLOCK_KEYS + peak;
        const float *v = S->space->v_head + key * P->value_size, *d_out = S->space->d_out + r * P->value_size;
        float g = 0;
        for (int64_t d = 0; d < P->value_size && seen.from < seen.to; d++)
            g += d_out[d] * v[d];
        G[r].origin = g;
    }
}

/* Gradients of the weights in block b, and their row sums. */
static void weight_gradients(struct strip *S, int64_t b, struct row_gradient *G)
{
    const struct problem *P = S->problem;
    struct workspace *W = S->space;
    if (!P->reweighted && P->activation == EXP)
        exponentiate_block(S, b);
    multiply_block(S, b, W->d_out, W->v_panels, P->value_size, W->g);
    for (int r = 0; r < S->rows; r++) {
        struct range whole = vectors_of(in_block(S->first[r], S->last[r], b));
        const float *a = block_row(S, W->a, b, r), *g = block_row(S, W->g, b, r);
        if (!P->reweighted)
            G[r].sums.w_g += dot(a, g, whole.from, whole.to, G[r].origin);
        else if (!S->flat[r])
            sum_gradients(a, g, whole.from, whole.to, &S->weighting[r], G[r].origin, &G[r].sums, S->p);
    }
}

static void finish_rows(const struct strip *S, struct row_gradient *G)
{
    const struct problem *P = S->problem;
    for (int r = 0; r < S->rows; r++) {
        int n = S->last[r] - S->first[r];
        double norm = P->reweighted ? G[r].sums.w + S->norm[r] : S->total[r]; /* S->norm: n of a flat row */
        double scale = reciprocal(norm);
        double w_dot_g = G[r].sums.w_g * scale;
        G[r].w_dot_g = (float)w_dot_g;
        G[r].scale = (float)scale;
        G[r].mean = n > FIRST_ROWS ? (float)((G[r].sums.y_g - w_dot_g * G[r].sums.y) / n) : 0;
        G[r].slope = (float)scale;
        if (P->reweighted)
            G[r].slope *= (float)P->p * S->weighting[r].inverse;
        G[r].factor = G[r].slope * S->factor[r];
    }
}

/* Block b: activations become weights, gradients of weights those of scores. */
static void score_gradients(const struct strip *S, int64_t b, const struct row_gradient *G)
{
    const struct problem *P = S->problem;
    for (int r = 0; r < S->rows; r++) {
        struct range seen = in_block(S->first[r], S->last[r], b), whole = vectors_of(seen);
        float *a = block_row(S, S->space->a, b, r), *g = block_row(S, S->space->g, b, r);
        if (!P->reweighted) {
            differentiate_plain((enum activation)P->activation, a, g, whole.from, whole.to, G[r].origin,
                                G[r].w_dot_g);
        } else if (!S->flat[r]) {
            differentiate_reweighted((enum activation)P->activation, a, g, whole.from, whole.to, &S->weighting[r],
                                     G[r].origin, G[r].w_dot_g, S->threshold[r] * G[r].mean, S->p);
        } else {
            fill(a, seen.from, seen.to, 1);
            whole.from = whole.to = 0;
        }
        clear_outside(S, b, g, whole);
    }
    for (int r = S->rows; r < S->tiles * TILE_ROWS; r++)
        clear_outside(S, b, block_row(S, S->space->g, b, r), (struct range){0, 0});
}

/* The rows of the strip that see any of the keys [key, key + TILE_ROWS), as a range. */
static struct range rows_that_see(const struct strip *S, int key)
{
    struct range rows = {S->rows, 0};
    if (S->common_first <= key && key + TILE_ROWS <= S->common_last)
        return (struct range){0, S->rows};
    for (int r = 0; r < S->rows; r++)
        if (S->first[r] < key + TILE_ROWS && S->last[r] > key) {
            rows.from = r < rows.from ? r : rows.from;
            rows.to = r + 1;
        }
    return rows;
}

/* Block b's part of the gradients of q, k and v. */
static void multiply_gradients(const struct strip *S, int64_t b)
{
    struct workspace *W = S->space;
    for (int t = 0; t < S->tiles; t++) {
        struct range keys = in_block(S->tile_first[t], S->tile_last[t], b);
        if (keys.from < keys.to)
            multiply_rows(W->k_stride, keys.to - keys.from, block_row(S, W->g, b, t * TILE_ROWS) + keys.from,
                          W->k_rows + (S->origin + b * BLOCK_KEYS + keys.from) * W->k_stride, W->k_stride,
                          W->sum + t * TILE_ROWS * W->k_stride, W->k_stride);
    }
    for (int j = 0; j < BLOCK_KEYS; j += TILE_ROWS) {
        struct range rows = rows_that_see(S, (int)b * BLOCK_KEYS + j);
        if (rows.from >= rows.to)
            continue;
        int64_t key = S->origin + b * BLOCK_KEYS + j;
        multiply_keys(W->v_stride, rows.to - rows.from, block_row(S, W->a, b, rows.from) + j,
                      W->d_out_padded + rows.from * W->v_stride, W->v_stride, W->d_v + key * W->v_stride, W->v_stride);
        multiply_keys(W->k_stride, rows.to - rows.from, block_row(S, W->g, b, rows.from) + j,
                      W->q_padded + rows.from * W->k_stride, W->k_stride, W->d_k + key * W->k_stride, W->k_stride);
    }
}

/* Gradients of q, and each row's part of those of gain and threshold, once W->sum holds ds k but for the factor. */
static void write_row_gradients(const struct strip *S, const struct row_gradient *G, int64_t row, float *d_q)
{
    const struct problem *P = S->problem;
    const struct workspace *W = S->space;
    int64_t size = P->head_size;
    for (int r = 0; r < S->rows; r++, d_q += size) {
        const float *sum = W->sum + r * W->k_stride, *unit = W->q + r * size;
        float factor = S->sign[r] * G[r].factor;
        if (P->d_gain)
            P->d_gain[row + r] = S->sign[r] * G[r].slope * S->before_gain[r] * dot_rows(unit, sum, size);
        if (P->d_threshold)
            P->d_threshold[row + r] = -G[r].mean * (float)S->total[r] * G[r].slope;
        for (int64_t d = 0; d < size; d++)
            d_q[d] = sum[d] * factor;
        if (P->normalize)
            through_norm(d_q, unit, S->inverse_norm[r], size);
    }
}

/* Gradient of q for the strip that starts at `row` of the key head; adds to the task's gradients of k and v. */
static void backward_strip(struct strip *S, int64_t batch, const float *q, const float *d_out, float *d_q, int64_t row,
                           int count)
{
    const struct problem *P = S->problem;
    struct workspace *W = S->space;
    q += row * P->head_size;
    d_out += row * P->value_size;
    d_q += row * P->head_size;
    int64_t all_rows = P->group * P->queries, place = (batch * P->key_heads + S->key_head) * all_rows + row;
    if (!open_strip(S, batch, row, count)) {
        memset(d_q, 0, sizeof(float) * (size_t)(count * P->head_size));
        if (P->d_gain)
            memset(P->d_gain + place, 0, sizeof(float) * (size_t)count);
        if (P->d_threshold)
            memset(P->d_threshold + place, 0, sizeof(float) * (size_t)count);
        return;
    }
    size_t padded_rows = (size_t)(S->tiles * TILE_ROWS);
    memset(W->sum, 0, sizeof(float) * padded_rows * (size_t)W->k_stride);
    memset(W->d_out, 0, sizeof(float) * padded_rows * (size_t)P->value_size);
    load_queries(S, q);
    memcpy(W->d_out, d_out, sizeof(float) * (size_t)(count * P->value_size));

    struct row_gradient G[MAX_STRIP_ROWS];
    memset(G, 0, sizeof G);
    score(S);
    find_origins(S, G);
    if (P->reweighted)
        set_thresholds(S);
    for (int64_t b = 0; b < S->blocks; b++)
        weight_gradients(S, b, G);
    finish_rows(S, G);

    float scale[MAX_STRIP_ROWS], factor[MAX_STRIP_ROWS];
    for (int r = 0; r < count; r++) {
        scale[r] = G[r].scale;
        factor[r] = G[r].factor;
    }
    copy_padded(d_out, count, P->value_size, scale, W->d_out_padded, W->v_stride);
    copy_padded(W->q, count, P->head_size, factor, W->q_padded, W->k_stride);
    for (int64_t b = 0; b < S->blocks; b++) {
        score_gradients(S, b, G);
        multiply_gradients(S, b);
    }
    write_row_gradients(S, G, place, d_q);
}

#endif
