/* The kernel for AVX2 with fused multiply-add. */
#if defined(__x86_64__)

#define LSSAR_AVX2
#if defined(__clang__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "work.h"

const struct kernel kernel_avx2 = {"avx2", work};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_processor; /* C wants a declaration in every file */
#endif
