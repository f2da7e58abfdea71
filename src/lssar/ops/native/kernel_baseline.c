/* The kernel for the instruction set that the compiler assumes anyway (SSE2 on x86-64, NEON on ARM64). */
#include "work.h"

const struct kernel kernel_baseline = {"baseline", work};
