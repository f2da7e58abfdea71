/* Sweeps over the entries [from, to) of one row of a block; both ends are multiples of LANES.
   Hidden entries there hold an activation of 0, which every sweep turns into a weight and a gradient of 0. */
#ifndef LSSAR_SWEEPS_H
#define LSSAR_SWEEPS_H

#include "functions.h"

struct maxima {
    float s, a; /* largest score, largest activation */
};

/* Products q.k, times `factor`, become activations. Returns their sum. The factor comes last, as in the reference: on q
   it would add a rounding error to each term of the product. */
static float activate_softplus(float *x, int from, int to, float factor, struct maxima *max)
{
    vf total = all(0.0f), s_max = all(max->s), a_max = all(max->a);
    for (int j = from; j < to; j += LANES) {
        vf s = load(x + j) * factor, a = softplus(s);
        store(x + j, a);
        total += a;
        s_max = larger(s_max, s);
        a_max = larger(a_max, a);
    }
    max->s = max_of(s_max);
    max->a = max_of(a_max);
    return sum_of(total);
}

static float largest_score(const float *x, int from, int to, float factor, float so_far)
{
    vf max = all(so_far);
    for (int j = from; j < to; j += LANES)
        max = larger(max, load(x + j) * factor);
    return max_of(max);
}

static float activate_exp(const float *x, float *a_out, int from, int to, float factor, float s_max)
{
    vf total = all(0.0f);
    for (int j = from; j < to; j += LANES) {
        vf a = exp_flushed(load(x + j) * factor - s_max);
        store(a_out + j, a);
        total += a;
    }
    return sum_of(total);
}

/* Threshold and power of a re-weighted row: z = (a - tau) * inverse, 0 unless a - tau > least; the weight is z^p. */
struct reweighting {
    float tau, inverse, least;
};

INLINE vf above_threshold(vf a, const struct reweighting *row)
{
    vf over = a - row->tau;
    return unless_le(over * row->inverse, over, all(row->least));
}

/* Calls an inlined sweep with the kind of power as a constant. */
#define WITH_POWER(sweep, p, ...)                                     \
    switch ((p).kind) {                                               \
    case POWER_15: return sweep(__VA_ARGS__, POWER_15, p);            \
    case POWER_INTEGER: return sweep(__VA_ARGS__, POWER_INTEGER, p);  \
    default: return sweep(__VA_ARGS__, POWER_REAL, p);                \
    }

INLINE float reweight_by(const float *a, float *w_out, int from, int to, const struct reweighting *row, enum power kind,
                         struct power_of p)
{
    vf total = all(0.0f);
    for (int j = from; j < to; j += LANES) {
        vf z = above_threshold(load(a + j), row);
        vf w = z * power_less_1(z, kind, p);
        store(w_out + j, w);
        total += w;
    }
    return sum_of(total);
}

static float reweight(const float *a, float *w_out, int from, int to, const struct reweighting *row, struct power_of p)
{
    WITH_POWER(reweight_by, p, a, w_out, from, to, row)
}

/* The row sums that the gradient needs, with y = z^(p-1) and g the gradient of the weight less `origin`: that of the
   row's largest weight. A row's gradient does not change when a constant is subtracted from g, and a row that is nearly
   all one key would otherwise be the difference of two large numbers. */
struct gradient_sums {
    double w, w_g, y, y_g;
};

INLINE void sum_gradients_by(const float *a, const float *g, int from, int to, const struct reweighting *row,
                             float origin, struct gradient_sums *sums, enum power kind, struct power_of p)
{
    vf w_total = all(0.0f), wg_total = all(0.0f), y_total = all(0.0f), yg_total = all(0.0f);
    for (int j = from; j < to; j += LANES) {
        vf z = above_threshold(load(a + j), row);
        vf y = power_less_1(z, kind, p);
        vf yg = y * (load(g + j) - origin);
        y_total += y;
        yg_total += yg;
        w_total += z * y;
        wg_total += z * yg;
    }
    sums->w += sum_of(w_total);
    sums->w_g += sum_of(wg_total);
    sums->y += sum_of(y_total);
    sums->y_g += sum_of(yg_total);
}

static void sum_gradients(const float *a, const float *g, int from, int to, const struct reweighting *row,
                          float origin, struct gradient_sums *sums, struct power_of p)
{
    WITH_POWER(sum_gradients_by, p, a, g, from, to, row, origin, sums)
}

static float dot(const float *a, const float *g, int from, int to, float origin)
{
    vf total = all(0.0f);
    for (int j = from; j < to; j += LANES)
        total += load(a + j) * (load(g + j) - origin);
    return sum_of(total);
}

INLINE vf slope(vf a, enum activation activation) { return activation == EXP ? a : sigmoid_of_softplus(a); }

/* a becomes the weight w, and g = dw the gradient of the score, but for the row's factor:
   (y (g - origin - w.g) - mean) a'. */
INLINE void differentiate_reweighted_by(enum activation activation, float *a_w, float *g_ds, int from, int to,
                                        const struct reweighting *row, float origin, float w_dot_g, float mean,
                                        enum power kind, struct power_of p)
{
    for (int j = from; j < to; j += LANES) {
        vf a = load(a_w + j);
        vf z = above_threshold(a, row);
        vf y = power_less_1(z, kind, p);
        store(a_w + j, z * y);
        store(g_ds + j, (y * (load(g_ds + j) - origin - w_dot_g) - mean) * slope(a, activation));
    }
}

static void differentiate_reweighted(enum activation activation, float *a_w, float *g_ds, int from, int to,
                                     const struct reweighting *row, float origin, float w_dot_g, float mean,
                                     struct power_of p)
{
    if (activation == EXP)
        WITH_POWER(differentiate_reweighted_by, p, EXP, a_w, g_ds, from, to, row, origin, w_dot_g, mean)
    WITH_POWER(differentiate_reweighted_by, p, SOFTPLUS, a_w, g_ds, from, to, row, origin, w_dot_g, mean)
}

/* Without re-weighting the weight is a itself, and the gradient of the score (g - origin - w.g) a'. */
static void differentiate_plain(enum activation activation, const float *a, float *g_ds, int from, int to, float origin,
                                float w_dot_g)
{
    if (activation == EXP)
        for (int j = from; j < to; j += LANES)
            store(g_ds + j, (load(g_ds + j) - origin - w_dot_g) * slope(load(a + j), EXP));
    else
        for (int j = from; j < to; j += LANES)
            store(g_ds + j, (load(g_ds + j) - origin - w_dot_g) * slope(load(a + j), SOFTPLUS));
}

#endif
