/* One vector type for every instruction set. Arithmetic is written with operators (GCC and Clang vector extensions; the
   compiler contracts them to fused multiply-adds); only what has no operator is spelled out per instruction set.
   The file that includes this has set the compiler's target and defined LSSAR_AVX512, LSSAR_AVX2, or neither. */
#ifndef LSSAR_SIMD_H
#define LSSAR_SIMD_H

#include <stdint.h>
#if defined(LSSAR_AVX512) || defined(LSSAR_AVX2)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* A register tile has TILE_ROWS x TILE_VECTORS accumulators; a panel is one tile wide. */
#if defined(LSSAR_AVX512)
#define LANES 16
#define TILE_VECTORS 4
#elif defined(LSSAR_AVX2)
#define LANES 8
#define TILE_VECTORS 2
#elif defined(__aarch64__)
#define LANES 4
#define TILE_VECTORS 4
#else
#define LANES 4
#define TILE_VECTORS 2
#endif
#define PANEL (LANES * TILE_VECTORS)

typedef float vf __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), may_alias));
typedef float vf_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vf load(const float *x) { return *(const vf_unaligned *)x; }
INLINE void store(float *x, vf a) { *(vf_unaligned *)x = a; }

/* larger, smaller: as the x86 instructions, the second argument where either is NaN.
   unless_le: x where not a <= b (NaN included), else 0. */
#if defined(LSSAR_AVX512)
INLINE vf all(float x) { return _mm512_set1_ps(x); }
INLINE vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf unless_le(vf x, vf a, vf b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ), x); }
INLINE float sum_of(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float max_of(vf a) { return _mm512_reduce_max_ps(a); }
#elif defined(LSSAR_AVX2)
INLINE vf all(float x) { return _mm256_set1_ps(x); }
INLINE vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf smaller(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf unless_le(vf x, vf a, vf b) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ), x); }
#else
INLINE vf all(float x) { return (vf){x, x, x, x}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf unless_le(vf x, vf a, vf b) { return (vf)(~(a <= b) & (vi)x); }
#endif

#if !defined(LSSAR_AVX512)
INLINE float sum_of(vf a)
{
    float lane[LANES];
    store(lane, a);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++)
            lane[i] += lane[i + step];
    return lane[0];
}
INLINE float max_of(vf a)
{
    float lane[LANES];
    store(lane, a);
    for (int i = 1; i < LANES; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}
#endif

INLINE vf magnitude(vf a) { return (vf)((vi)a & 0x7fffffff); }

/* x * 2^n for integral n >= -252, right down to the denormals. `n_bits` is n + SHIFTER, as rounding leaves it. */
#define SHIFTER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits */
INLINE vf times_power_of_2(vf x, vf n, vf n_bits)
{
#if defined(LSSAR_AVX512)
    (void)n_bits;
    return _mm512_scalef_ps(x, n);
#else
    (void)n;
    vi exponent = (vi)n_bits - (vi)all(SHIFTER);
    vi half = exponent >> 1;
    return x * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
#endif
}

#endif
