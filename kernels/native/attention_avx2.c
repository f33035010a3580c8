/* The computation in registers of AVX2. */

#define TARGET "avx2"
#define WIDTH 8
#define ATTEND attend_avx2
#include "for_x86.h"
