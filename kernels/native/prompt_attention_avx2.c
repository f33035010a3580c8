/* The computation in registers of AVX2. */

#define TARGET "avx2,fma"
#define WIDTH 8
#define ATTEND_TILE attend_tile_avx2
#define BODY "prompt_attention_body.h"
#include "for_x86.h"
