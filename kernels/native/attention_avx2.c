/* The computation in registers of AVX2. */

#include "attention.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define WIDTH 8
#include "attention_body.h"

void attend_avx2(
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
