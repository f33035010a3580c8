/* The computation in registers of AVX2. */

#define TARGET "avx2,fma"
#define WIDTH 8
#define GATE gate_avx2
#define GATE_BACK gate_back_avx2
#define BODY "gate_body.h"
#include "for_x86.h"
