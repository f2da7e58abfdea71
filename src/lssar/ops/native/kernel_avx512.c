/* The kernel for AVX-512. */
#if defined(__x86_64__)

#define LSSAR_AVX512
#if defined(__clang__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")
#endif

#include "work.h"

const struct kernel kernel_avx512 = {"avx512", work};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_processor; /* C wants a declaration in every file */
#endif
