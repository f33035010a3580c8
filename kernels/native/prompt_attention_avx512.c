/* The computation in registers of AVX-512. */

#define TARGET "avx512f,fma"
#define WIDTH 16
#define ATTEND_TILE attend_tile_avx512
#define BODY "prompt_attention_body.h"
#include "for_x86.h"
