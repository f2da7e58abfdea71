/* What one call computes, as Python hands it over, and how it is divided among threads. */
#ifndef LSSAR_PROBLEM_H
#define LSSAR_PROBLEM_H

#include <stdint.h>

enum activation { SOFTPLUS = 0, EXP = 1 };

/* Mirrored field by field by `_Problem` in __init__.py. All tensors are contiguous float32 but for start and stop.
   Rows are the queries of all `group` query heads that share a key head, one after the other in memory. */
struct problem {
    int64_t batch, key_heads, group, queries, keys, head_size, value_size;
    const float *q;     /* (batch, key_heads, group * queries, head_size) */
    const float *k;     /* (batch, key_heads, keys, head_size) */
    const float *v;     /* (batch, key_heads, keys, value_size) */
    const float *d_out; /* like out; NULL in the forward */
    float *out;         /* (batch, key_heads, group * queries, value_size) */
    float *d_q, *d_k, *d_v;
    const float *gain;      /* (key_heads * group), factors of the scores; NULL: 1 */
    const float *threshold; /* (key_heads * group), o of the re-weighting, in means; NULL: 1 */
    float *d_gain, *d_threshold; /* (batch, key_heads, group * queries): each row's part; NULL where not wanted */
    const int64_t *start, *stop; /* keys that a query sees: element [b][i] at b * batch_stride + i * query_stride */
    int64_t start_batch_stride, start_query_stride, stop_batch_stride, stop_query_stride;
    int64_t activation; /* enum activation */
    int64_t cosine, log_n, reweighted;
    int64_t normalize; /* q and k are to be divided by their norms here; gradients are of q and k as given */
    double scale; /* scores are q.k * scale, * log n where log_n, * gain */
    double p;
    int64_t threads;
    void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags); /* GOMP_parallel, or NULL */
};

enum {
    /* Rows of a register tile. Six rows by four AVX-512 vectors (or two AVX2 vectors) fill the register file. */
    TILE_ROWS = 6,
    /* Keys of a block: a multiple of TILE_ROWS and of every instruction set's panel, so that blocks have no remainder;
       a strip's block, with the keys and values it meets, stays in the second-level cache. */
    BLOCK_KEYS = 192,
    /* Row stride inside a block. An odd number of cache lines: the rows of a column fall into different cache sets. */
    BLOCK_STRIDE = BLOCK_KEYS + 16,
    MAX_STRIP_ROWS = 96,
    /* Up to so many rows in a head (decoding) the forward takes dot products with the keys as they are: packing them
       would cost more than it saves. */
    FEW_ROWS = 6,
    /* Head sizes are padded to this, a multiple of every vector length. */
    PAD = 16,
    ERROR_MEMORY = -1,
};

static inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The keys [*first, *last) that a row of the group sees; empty rows give 0, 0. */
static inline void visible_keys(const struct problem *P, int64_t b, int64_t row, int64_t *first, int64_t *last)
{
    int64_t i = row % P->queries;
    int64_t from = max64(P->start[b * P->start_batch_stride + i * P->start_query_stride], 0);
    int64_t to = min64(P->stop[b * P->stop_batch_stride + i * P->stop_query_stride], P->keys);
    *first = from < to ? from : 0;
    *last = from < to ? to : 0;
}

/* A run of strips of one key head. A head is split into parts only when there are too few heads for the threads. */
struct task {
    int64_t batch, key_head;
    int64_t first_row, last_row;
    int64_t part; /* which part of its head */
    double cost;  /* visible keys over all rows */
};

struct plan {
    const struct problem *problem;
    int64_t strip_rows;   /* rows of a strip, a multiple of TILE_ROWS */
    int64_t strip_blocks; /* most blocks that any strip has */
    int64_t parts;        /* tasks a head */
    int64_t task_count;
    struct task *tasks;   /* most expensive first */
    int64_t next;         /* atomic: first task that nobody has taken */
    int64_t finished;     /* atomic: tasks done */
    int64_t *unfinished;  /* atomic, one a head: parts still being worked on (backward, parts > 1) */
    float *partial;       /* [head][part]: private gradients of k and v (backward, parts > 1) */
};

/* One instruction set's version of the kernel: what each thread does, taking tasks until none is left. A thread that
   gets no memory leaves its share to the others. */
struct kernel {
    const char *name;
    void (*work)(struct plan *plan);
};

extern const struct kernel kernel_baseline;
#if defined(__x86_64__)
extern const struct kernel kernel_avx2, kernel_avx512;
#endif

/* Floats of one set of private gradients of k and v; keys past the end take what whole tiles write there (zeros). */
static inline int64_t gradient_rows(const struct problem *P) { return round_up(P->keys, BLOCK_KEYS) + 2 * BLOCK_KEYS; }
static inline int64_t gradient_floats(const struct problem *P)
{
    return gradient_rows(P) * (round_up(P->head_size, PAD) + round_up(P->value_size, PAD));
}

/* Whether the head has too few rows for packed keys. */
static inline int few_rows(const struct problem *P) { return !P->d_out && P->group * P->queries <= FEW_ROWS; }

int run_plan(const struct problem *problem, const struct kernel *kernel);

#endif
