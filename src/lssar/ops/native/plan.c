/* Divides a call into tasks and runs them on threads. */
#include "problem.h"

#include <pthread.h>
#include <stdlib.h>

enum {
    MIN_STRIP_ROWS = 4 * TILE_ROWS,
    STRIP_FLOATS = 1 << 22,       /* a strip should stay in the cache that the cores share */
    FLOPS_A_THREAD = 2 * 1000000, /* below this a thread costs more than it saves */
};

static double row_cost(const struct problem *P, int64_t b, int64_t row)
{
    int64_t first, last;
    visible_keys(P, b, row, &first, &last);
    return (double)(last - first) + 16;
}

static int by_cost(const void *x, const void *y)
{
    const struct task *a = x, *b = y;
    if (a->cost != b->cost)
        return a->cost < b->cost ? 1 : -1;
    int64_t order = a->batch != b->batch ? a->batch - b->batch : a->key_head != b->key_head ? a->key_head - b->key_head
                                                                                            : a->part - b->part;
    return order < 0 ? -1 : order > 0;
}

/* Most keys that the rows of any aligned strip of `rows` rows reach over. */
static int64_t widest_strip(const struct problem *P, int64_t rows)
{
    int64_t widest = 0, all = P->group * P->queries;
    for (int64_t b = 0; b < P->batch; b++)
        for (int64_t row = 0; row < all; row += rows) {
            int64_t low = P->keys, high = 0;
            for (int64_t r = row; r < min64(row + rows, all); r++) {
                int64_t first, last;
                visible_keys(P, b, r, &first, &last);
                if (first < last) {
                    low = min64(low, first);
                    high = max64(high, last);
                }
            }
            widest = max64(widest, high - low);
        }
    return widest;
}

/* One batch row's tasks: runs of whole strips of about equal cost. */
static double plan_batch(struct plan *plan, int64_t b, struct task *tasks)
{
    const struct problem *P = plan->problem;
    int64_t rows = P->group * P->queries, row = 0;
    double total = 0, done = 0;
    for (int64_t r = 0; r < rows; r++)
        total += row_cost(P, b, r);
    for (int64_t part = 0; part < plan->parts; part++) {
        struct task *task = &tasks[part];
        double before = done, goal = total * (double)(part + 1) / (double)plan->parts;
        task->batch = b;
        task->part = part;
        task->first_row = row;
        while (row < rows && (part == plan->parts - 1 || done < goal)) {
            int64_t end = min64(row + plan->strip_rows, rows);
            for (; row < end; row++)
                done += row_cost(P, b, row);
        }
        task->last_row = row;
        task->cost = done - before;
    }
    return total;
}

static int make_plan(struct plan *plan, int64_t *threads)
{
    const struct problem *P = plan->problem;
    int64_t heads = P->batch * P->key_heads, rows = P->group * P->queries;
    int64_t strip = min64(MAX_STRIP_ROWS, round_up(rows, TILE_ROWS)), widest = widest_strip(P, strip);
    if (strip * widest > STRIP_FLOATS) {
        strip = max64(MIN_STRIP_ROWS, STRIP_FLOATS / widest / TILE_ROWS * TILE_ROWS);
        widest = widest_strip(P, strip);
    }
    plan->strip_rows = strip;
    /* One block more because a strip starts at a panel, not at its first key. */
    plan->strip_blocks = (widest + BLOCK_KEYS - 1) / BLOCK_KEYS + 1;
    *threads = max64(1, *threads);
    plan->parts = 1;
    if (heads % *threads && heads < 4 * *threads)
        plan->parts = max64(1, min64((4 * *threads + heads - 1) / heads, (rows + 2 * strip - 1) / (2 * strip)));
    plan->task_count = heads * plan->parts;
    plan->tasks = malloc(sizeof(struct task) * (size_t)plan->task_count);
    if (!plan->tasks)
        return ERROR_MEMORY;
    double cost = 0;
    for (int64_t b = 0; b < P->batch; b++) {
        struct task *first = &plan->tasks[b * P->key_heads * plan->parts];
        cost += plan_batch(plan, b, first) * (double)P->key_heads;
        for (int64_t i = 0; i < P->key_heads * plan->parts; i++) {
            first[i] = first[i % plan->parts];
            first[i].key_head = i / plan->parts;
        }
    }
    qsort(plan->tasks, (size_t)plan->task_count, sizeof(struct task), by_cost);
    double useful = cost * (double)(P->head_size + P->value_size) / FLOPS_A_THREAD + 1;
    *threads = min64(*threads, plan->task_count);
    if (useful < (double)*threads)
        *threads = (int64_t)useful;
    if (P->d_out && plan->parts > 1) {
        plan->unfinished = malloc(sizeof(int64_t) * (size_t)heads);
        plan->partial = malloc(sizeof(float) * (size_t)(plan->task_count * gradient_floats(P)));
        if (!plan->unfinished || !plan->partial)
            return ERROR_MEMORY;
        for (int64_t i = 0; i < heads; i++)
            plan->unfinished[i] = plan->parts;
    }
    return 0;
}

struct worker {
    struct plan *plan;
    const struct kernel *kernel;
};

static void work(void *argument)
{
    struct worker *worker = argument;
    worker->kernel->work(worker->plan);
}

static void *work_on_thread(void *argument)
{
    work(argument);
    return NULL;
}

static void run_on_threads(struct worker *worker, int64_t threads)
{
    pthread_t *others = malloc(sizeof(pthread_t) * (size_t)threads);
    int64_t started = 0;
    while (others && started < threads - 1 && !pthread_create(&others[started], NULL, work_on_thread, worker))
        started++;
    work(worker);
    for (int64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    free(others);
}

int run_plan(const struct problem *problem, const struct kernel *kernel)
{
    struct plan plan = {.problem = problem};
    int64_t threads = problem->threads;
    int error = make_plan(&plan, &threads);
    if (!error) {
        struct worker worker = {&plan, kernel};
        if (threads == 1)
            work(&worker);
        else if (problem->parallel) /* PyTorch's own threads, which would otherwise spin on the cores for a while */
            problem->parallel(work, &worker, (unsigned)threads, 0);
        else
            run_on_threads(&worker, threads);
        if (plan.finished < plan.task_count)
            error = ERROR_MEMORY;
    }
    free(plan.tasks);
    free(plan.unfinished);
    free(plan.partial);
    return error;
}
