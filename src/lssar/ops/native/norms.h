/* Rows divided by their norms, and the gradient through that. */
#ifndef LSSAR_NORMS_H
#define LSSAR_NORMS_H

#include <float.h>
#include <math.h>

#include "simd.h"

static float dot_rows(const float *x, const float *y, int64_t size)
{
    vf total = all(0.0f);
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES)
        total += load(x + d) * load(y + d);
    float sum = sum_of(total);
    for (; d < size; d++)
        sum += x[d] * y[d];
    return sum;
}

/* 1 / |x|; 0 for the zero vector, which stays zero; NaN where float32 cannot hold it (or x is NaN). In double, where the
   squares of all float32 numbers are in range. */
static float inverse_norm(const float *x, int64_t size)
{
    double part[8] = {0}, square = 0;
    int64_t d = 0;
    for (; d + 8 <= size; d += 8)
        for (int i = 0; i < 8; i++)
            part[i] += (double)x[d + i] * x[d + i];
    for (; d < size; d++)
        square += (double)x[d] * x[d];
    for (int i = 0; i < 8; i++)
        square += part[i];
    double inverse = 1 / sqrt(square);
    return square == 0 ? 0 : inverse >= FLT_MIN && inverse <= FLT_MAX ? (float)inverse : NAN;
}

/* The same with squares in float32 where these are far from the ends of its range. A decoding step takes the norm of
   every key again, which double precision would slow down. */
static float quick_inverse_norm(const float *x, int64_t size)
{
    float square = dot_rows(x, x, size);
    return square > 1e-30f && square < 1e30f ? 1 / sqrtf(square) : inverse_norm(x, size);
}

static void inverse_norms(const float *rows, int64_t count, int64_t size, float *inverse)
{
    for (int64_t r = 0; r < count; r++)
        inverse[r] = inverse_norm(rows + r * size, size);
}

/* Gradient of x from that of unit = x / |x|, in place: the part along x is lost, the rest is divided by the norm. */
static void through_norm(float *gradient, const float *unit, float inverse, int64_t size)
{
    float along = dot_rows(gradient, unit, size);
    for (int64_t d = 0; d < size; d++)
        gradient[d] = (gradient[d] - along * unit[d]) * inverse;
}

#endif
