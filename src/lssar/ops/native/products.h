/* Matrix products: one register tile for all seven, and the panels that it reads. */
#ifndef LSSAR_PRODUCTS_H
#define LSSAR_PRODUCTS_H

#include "problem.h"
#include "simd.h"

/* C[i][c] (+)= sum_k A(i, k) B[k][c], for TILE_ROWS rows and `vectors` vectors of columns, with A(i, k) at
   A[i * a_row + k * a_depth]. Inlined with constants, so that the accumulators stay in registers. What is there already
   is added last: a long sum is then a sum of short ones, with less rounding. */
INLINE void tile(int vectors, int64_t depth, const float *A, int64_t a_row, int64_t a_depth, const float *B,
                 int64_t b_depth, float *C, int64_t c_row, int accumulate)
{
    vf sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sum[i][j] = all(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vf b[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            b[j] = load(B + k * b_depth + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++) {
            vf a = all(A[i * a_row + k * a_depth]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sum[i][j] += a * b[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            float *c = C + i * c_row + j * LANES;
            if (accumulate)
                sum[i][j] += load(c);
            store(c, sum[i][j]);
        }
}

/* Entries of a block: C (TILE_ROWS x PANEL) = A (TILE_ROWS x depth) against one packed panel. */
static void multiply_panel(int64_t depth, const float *A, const float *panel, float *C)
{
    tile(TILE_VECTORS, depth, A, depth, 1, panel, PANEL, C, BLOCK_STRIDE, 0);
}

/* All columns, in as few passes as the register tile allows and as even as they can be: 5 vectors are 3 + 2. */
#if TILE_VECTORS == 4
#define WIDER_TILES(...) case 3: tile(3, __VA_ARGS__); break; case 4: tile(4, __VA_ARGS__); break;
#else
#define WIDER_TILES(...)
#endif
#define TILES_OF_COLUMNS(a_row, a_depth)                                                  \
    int64_t left = columns / LANES;                                                       \
    for (int64_t passes = (left + TILE_VECTORS - 1) / TILE_VECTORS; passes > 0; passes--) { \
        int64_t vectors = (left + passes - 1) / passes;                                   \
        switch (vectors) {                                                                \
        case 1: tile(1, depth, A, a_row, a_depth, B, b_row, C, c_row, 1); break;          \
        case 2: tile(2, depth, A, a_row, a_depth, B, b_row, C, c_row, 1); break;          \
        WIDER_TILES(depth, A, a_row, a_depth, B, b_row, C, c_row, 1)                      \
        }                                                                                 \
        left -= vectors;                                                                  \
        B += vectors * LANES;                                                             \
        C += vectors * LANES;                                                             \
    }

/* Rows of a block: C (TILE_ROWS x columns) += A (TILE_ROWS x depth keys) B (keys x columns). */
static void multiply_rows(int64_t columns, int64_t depth, const float *A, const float *B, int64_t b_row, float *C,
                          int64_t c_row)
{
    TILES_OF_COLUMNS(BLOCK_STRIDE, 1)
}

/* Columns of a block: C (TILE_ROWS keys x columns) += A^T B, A (depth rows x TILE_ROWS keys), B (rows x columns). */
static void multiply_keys(int64_t columns, int64_t depth, const float *A, const float *B, int64_t b_row, float *C,
                          int64_t c_row)
{
    TILES_OF_COLUMNS(1, BLOCK_STRIDE)
}

/* Rows (count x size) as panels of PANEL rows, transposed: panel[d][row]. Missing rows are zeros. `scale`, one factor a
   row, may be NULL. */
static void pack_panels(const float *rows, int64_t count, int64_t size, const float *scale, float *panels)
{
    for (int64_t first = 0; first < count; first += PANEL, panels += PANEL * size) {
        int64_t here = min64(PANEL, count - first);
        for (int64_t r = 0; r < here; r++) {
            float factor = scale ? scale[first + r] : 1.0f;
            for (int64_t d = 0; d < size; d++)
                panels[d * PANEL + r] = rows[(first + r) * size + d] * factor;
        }
        for (int64_t d = 0; d < size; d++)
            for (int64_t r = here; r < PANEL; r++)
                panels[d * PANEL + r] = 0;
    }
}

/* Rows scaled and padded with zeros to `padded` columns; scale may be NULL. */
static void copy_padded(const float *rows, int64_t count, int64_t size, const float *scale, float *to, int64_t padded)
{
    for (int64_t r = 0; r < count; r++, rows += size, to += padded) {
        float factor = scale ? scale[r] : 1.0f;
        for (int64_t d = 0; d < size; d++)
            to[d] = rows[d] * factor;
        for (int64_t d = size; d < padded; d++)
            to[d] = 0;
    }
}

#endif
