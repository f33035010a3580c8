/* The computation in registers of AVX2. */

#define TARGET "avx2,fma"
#define WIDTH 8
#define MULTIPLY multiply_avx2
#define BODY "low_rank_body.h"
#include "for_x86.h"
