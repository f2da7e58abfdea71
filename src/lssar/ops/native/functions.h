/* Elementary functions on vectors: about 1 ulp, because the re-weighting raises what they give to the power p.
   Polynomials are minimax fits (Remez) of the relative error; the bound is given with each. */
#ifndef LSSAR_FUNCTIONS_H
#define LSSAR_FUNCTIONS_H

#include "simd.h"

#define LOG2_E 1.44269504f
#define LN2_HIGH 0.693359375f /* 9 bits: its products with small integers are exact */
#define LN2_LOW -2.12194440e-4f

/* x = n ln 2 + r with |r| <= ln 2 / 2. */
INLINE vf reduce(vf x, vf *n, vf *n_bits)
{
    *n_bits = x * LOG2_E + SHIFTER;
    *n = *n_bits - SHIFTER;
    return *n * -LN2_LOW + (*n * -LN2_HIGH + x);
}

/* e^x for least < x <= 0, and 0 below, without the processor's slow path for underflow. Polynomial: 2^-28. */
INLINE vf exp_above(vf x, float least)
{
    vf n, n_bits;
    vf r = reduce(larger(all(-105.0f), x), &n, &n_bits);
    vf q = all(1.381417271e-03f);
    q = q * r + 8.368921466e-03f;
    q = q * r + 4.166840762e-02f;
    q = q * r + 1.666651964e-01f;
    q = q * r + 4.999999404e-01f;
    return times_power_of_2(unless_le(r * r * q + r + 1.0f, x, all(least)), n, n_bits);
}

/* e^x for x <= 0: all of it, denormals included; or as long as it is a normal number, because denormal operands would
   slow the products. */
INLINE vf exp_negative(vf x) { return exp_above(x, -104.0f); }
INLINE vf exp_flushed(vf x) { return exp_above(x, -87.3f); }

/* log(1 + e^s) = max(s, 0) + log1p(t), t = e^-|s| in (0, 1]: nothing is lost for s far below 0. Polynomial: 2^-27. */
INLINE vf softplus(vf s)
{
    vf t = exp_negative(-magnitude(s));
    vf q = all(-3.318475094e-03f);
    q = q * t + 2.020459808e-02f;
    q = q * t + -5.766447261e-02f;
    q = q * t + 1.068055853e-01f;
    q = q * t + -1.535539776e-01f;
    q = q * t + 1.969540119e-01f;
    q = q * t + -2.495858818e-01f;
    q = q * t + 3.333051205e-01f;
    q = q * t + -4.999993145e-01f;
    return larger(all(0.0f), s) + (t * t * q + t);
}

/* sigmoid(s) = 1 - e^-a from a = softplus(s) >= 0; relative accuracy down to a = 0, where it is 0. Polynomial: 2^-26. */
INLINE vf sigmoid_of_softplus(vf a)
{
    vf n, n_bits;
    vf r = reduce(-smaller(all(80.0f), a), &n, &n_bits);
    vf q = all(1.394678606e-03f);
    q = q * r + 8.366777562e-03f;
    q = q * r + 4.166627675e-02f;
    q = q * r + 1.666654199e-01f;
    q = q * r + 0.5f;
    vf two_n = (vf)(((vi)n_bits - (vi)all(SHIFTER) + 127) << 23);
    return (1.0f - two_n) - two_n * (r * r * q + r);
}

/* z^e for integer e >= 0 by squaring. */
INLINE vf power_integer(vf z, int e)
{
    vf y = all(1.0f);
    for (;;) {
        if (e & 1)
            y *= z;
        e >>= 1;
        if (!e)
            return y;
        z *= z;
    }
}

/* z^e = e^(e ln z) for z in [0, 1 + a few ulp], e >= 0; 0 where z is 0. Polynomial of the logarithm: 2^-27. */
INLINE vf power_real(vf z, float e)
{
    vi bits = (vi)z - 0x3f3504f3; /* sqrt(1/2), so that the mantissa lies around 1 */
    vi exponent = bits >> 23;
    vf f = (vf)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    vf k = (vf)(exponent + 0x4b400000) - SHIFTER; /* int to float */
    vf q = all(-7.635877281e-02f);
    q = q * f + 1.276617944e-01f;
    q = q * f + -1.316181719e-01f;
    q = q * f + 1.420125663e-01f;
    q = q * f + -1.662315130e-01f;
    q = q * f + 2.000124007e-01f;
    q = q * f + -2.500082552e-01f;
    q = q * f + 3.333333135e-01f;
    vf tail = f * f * (f * q - 0.5f) + k * LN2_LOW;
    vf log_z = k * LN2_HIGH + (f + tail);
    vf y = exp_negative(smaller(all(0.0f), log_z * e));
    return unless_le(y, z, all(0.0f));
}

/* How z^(p-1) is computed: the paper's p = 15 in five multiplications, integers by squaring, the rest by logarithms. */
enum power { POWER_15, POWER_INTEGER, POWER_REAL };
struct power_of {
    enum power kind;
    int integer; /* p - 1 */
    float real;  /* p - 1 */
};

INLINE vf power_less_1(vf z, enum power kind, struct power_of p)
{
    if (kind == POWER_15) {
        vf z2 = z * z, z4 = z2 * z2;
        return z4 * z2 * (z4 * z4);
    }
    if (kind == POWER_REAL)
        return power_real(z, p.real);
    return p.integer ? power_integer(z, p.integer) : unless_le(all(1.0f), z, all(0.0f)); /* 0^0 is 0 here */
}

#endif
