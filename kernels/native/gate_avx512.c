/* The computation in registers of AVX-512. */

#define TARGET "avx512f,fma"
#define WIDTH 16
#define GATE gate_avx512
#define GATE_BACK gate_back_avx512
#define BODY "gate_body.h"
#include "for_x86.h"
