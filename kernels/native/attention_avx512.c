/* The computation in registers of AVX-512. */

#include "attention.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif

#define WIDTH 16
#include "attention_body.h"

void attend_avx512(
    const Batch *batch, const Segment *segment, size_t index, size_t scratch_keys, float *scratch
) {
    attend_group(batch, segment, index, scratch_keys, scratch);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
