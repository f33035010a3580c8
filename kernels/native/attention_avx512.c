/* The computation in registers of AVX-512. */

#define TARGET "avx512f"
#define WIDTH 16
#define ATTEND attend_avx512
#include "for_x86.h"
