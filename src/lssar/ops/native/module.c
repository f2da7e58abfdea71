/* The extension module. Python loads it with ctypes, which releases the interpreter lock during a call; as a module it
   is empty, and there only so that packaging tools build, find and name it as they do any other. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "problem.h"

#define EXPORT __attribute__((visibility("default")))

/* The best kernel that this processor runs; `name` asks for a lesser one. NULL if there is no such kernel here. */
static const struct kernel *choose_kernel(const char *name)
{
    const struct kernel *kernels[3];
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        kernels[count++] = &kernel_avx512;
    if (fma)
        kernels[count++] = &kernel_avx2;
#endif
    kernels[count++] = &kernel_baseline;
    for (int i = 0; i < count; i++)
        if (!name || !*name || !strcmp(name, kernels[i]->name))
            return kernels[i];
    return NULL;
}

EXPORT const char *lssar_isa(const char *name)
{
    const struct kernel *kernel = choose_kernel(name);
    return kernel ? kernel->name : NULL;
}

EXPORT int64_t lssar_problem_size(void) { return sizeof(struct problem); }

/* Forward, or backward where the problem has d_out. Returns 0 or an error. */
EXPORT int lssar_run(const struct problem *problem, const char *isa)
{
    const struct kernel *kernel = choose_kernel(isa);
    return kernel ? run_plan(problem, kernel) : 1;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, NULL, NULL, NULL, NULL, NULL};

EXPORT PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&definition); }
