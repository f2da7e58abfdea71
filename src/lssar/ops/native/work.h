/* The part of a call that one thread does. Each kernel_*.c compiles this for its instruction set. */
#ifndef LSSAR_WORK_H
#define LSSAR_WORK_H

#include <stdlib.h>

#include "gradient.h"

/* Gives every buffer its place after `base` (NULL to measure only). Returns the floats needed. */
static int64_t lay_out(const struct plan *plan, struct workspace *W, float *base)
{
    const struct problem *P = plan->problem;
    int backward = P->d_out != NULL;
    int64_t d = P->head_size, dv = P->value_size, used = 0;
    int64_t panel_keys = round_up(P->keys, PANEL), rows = plan->strip_rows;
    int64_t strip = plan->strip_blocks * rows * BLOCK_STRIDE;
    W->k_stride = round_up(d, PAD);
    W->v_stride = round_up(dv, PAD);
#define PLACE(pointer, floats) (pointer = base + used, used += round_up(floats, 16))
    PLACE(W->k_panels, few_rows(P) ? 0 : panel_keys * d);
    PLACE(W->v_panels, backward ? panel_keys * dv : 0);
    PLACE(W->k_padded, backward && (d % PAD || P->normalize) ? P->keys * W->k_stride : 0);
    PLACE(W->k_inverse_norms, P->normalize && !few_rows(P) ? P->keys : 0);
    PLACE(W->v_padded, !backward && dv % PAD ? P->keys * W->v_stride : 0);
    PLACE(W->gradients, backward && plan->parts == 1 ? gradient_floats(P) : 0);
    PLACE(W->a, strip);
    PLACE(W->g, backward ? strip : 0);
    PLACE(W->q, rows * d);
    PLACE(W->q_padded, backward ? rows * W->k_stride : 0);
    PLACE(W->d_out, backward ? rows * dv : 0);
    PLACE(W->d_out_padded, backward ? rows * W->v_stride : 0);
    PLACE(W->sum, rows * (backward ? W->k_stride : W->v_stride));
    PLACE(W->w, backward ? 0 : TILE_ROWS * BLOCK_STRIDE);
#undef PLACE
    return used;
}

/* The rows themselves, or a copy with padding or scale, if they need any. */
static const float *padded_rows(const float *rows, int64_t count, int64_t size, const float *scale, float *room,
                                int64_t stride)
{
    if (size == stride && !scale)
        return rows;
    copy_padded(rows, count, size, scale, room, stride);
    return room;
}

static void open_head(const struct problem *P, struct workspace *W, int64_t head)
{
    const float *k = P->k + head * P->keys * P->head_size, *v = P->v + head * P->keys * P->value_size;
    const float *scale = P->normalize ? W->k_inverse_norms : NULL;
    W->k_head = k;
    W->v_head = v;
    if (!few_rows(P)) {
        if (P->normalize)
            inverse_norms(k, P->keys, P->head_size, W->k_inverse_norms);
        pack_panels(k, P->keys, P->head_size, scale, W->k_panels);
    }
    if (P->d_out) {
        pack_panels(v, P->keys, P->value_size, NULL, W->v_panels);
        W->k_rows = padded_rows(k, P->keys, P->head_size, scale, W->k_padded, W->k_stride);
    } else {
        W->v_rows = padded_rows(v, P->keys, P->value_size, NULL, W->v_padded, W->v_stride);
    }
}

/* rows x size of `to` = the sum of `parts` private gradients, always in the same order. */
static void add_parts(float *to, const float *from, int64_t rows, int64_t size, int64_t stride, int64_t parts,
                      int64_t apart)
{
    for (int64_t r = 0; r < rows; r++, to += size, from += stride) {
        memcpy(to, from, sizeof(float) * (size_t)size);
        for (int64_t part = 1; part < parts; part++)
            for (int64_t d = 0; d < size; d++)
                to[d] += from[part * apart + d];
    }
}

/* Whoever finishes the last part of a head adds the parts up. */
static void close_head(struct plan *plan, const struct workspace *W, int64_t head)
{
    const struct problem *P = plan->problem;
    const float *from = W->gradients;
    int64_t apart = gradient_floats(P), values = gradient_rows(P) * W->k_stride;
    if (plan->parts > 1) {
        if (__atomic_sub_fetch(&plan->unfinished[head], 1, __ATOMIC_ACQ_REL))
            return;
        from = plan->partial + head * plan->parts * apart;
    }
    float *d_k = P->d_k + head * P->keys * P->head_size;
    add_parts(d_k, from, P->keys, P->head_size, W->k_stride, plan->parts, apart);
    for (int64_t j = 0; j < P->keys && P->normalize; j++)
        through_norm(d_k + j * P->head_size, W->k_rows + j * W->k_stride, W->k_inverse_norms[j], P->head_size);
    add_parts(P->d_v + head * P->keys * P->value_size, from + values, P->keys, P->value_size, W->v_stride, plan->parts,
              apart);
}

static void run_task(struct plan *plan, struct strip *S, const struct task *task)
{
    const struct problem *P = plan->problem;
    struct workspace *W = S->space;
    int64_t head = task->batch * P->key_heads + task->key_head, rows = P->group * P->queries;
    const float *q = P->q + head * rows * P->head_size;
    S->key_head = task->key_head;
    if (P->d_out) {
        W->d_k = plan->parts == 1 ? W->gradients : plan->partial + (head * plan->parts + task->part) * gradient_floats(P);
        W->d_v = W->d_k + gradient_rows(P) * W->k_stride;
        memset(W->d_k, 0, sizeof(float) * (size_t)gradient_floats(P));
    }
    for (int64_t row = task->first_row; row < task->last_row; row += plan->strip_rows) {
        int count = (int)min64(plan->strip_rows, task->last_row - row);
        if (P->d_out)
            backward_strip(S, task->batch, q, P->d_out + head * rows * P->value_size, P->d_q + head * rows * P->head_size,
                           row, count);
        else
            forward_strip(S, task->batch, q, P->out + head * rows * P->value_size, row, count);
    }
    if (P->d_out)
        close_head(plan, W, head);
}

static void work(struct plan *plan)
{
    const struct problem *P = plan->problem;
    struct workspace W;
    struct strip S = {.problem = P, .space = &W, .stride = plan->strip_rows * BLOCK_STRIDE};
    void *memory = NULL;
    if (posix_memalign(&memory, 64, sizeof(float) * (size_t)lay_out(plan, &W, NULL)))
        return;
    lay_out(plan, &W, memory);
    if (P->reweighted) {
        int whole = P->p == floor(P->p) && P->p <= 64;
        S.p.kind = P->p == 15 ? POWER_15 : whole ? POWER_INTEGER : POWER_REAL;
        S.p.integer = whole ? (int)P->p - 1 : 0;
        S.p.real = (float)(P->p - 1);
        S.least_z = exp2f(-126 / (float)P->p);
    }
    int64_t open = -1;
    for (;;) {
        int64_t i = __atomic_fetch_add(&plan->next, 1, __ATOMIC_RELAXED);
        if (i >= plan->task_count)
            break;
        int64_t head = plan->tasks[i].batch * P->key_heads + plan->tasks[i].key_head;
        if (head != open)
            open_head(P, &W, head);
        open = head;
        run_task(plan, &S, &plan->tasks[i]);
        __atomic_add_fetch(&plan->finished, 1, __ATOMIC_RELAXED);
    }
    free(memory);
}

#endif
