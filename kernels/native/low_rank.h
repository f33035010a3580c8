/* Shared by the instruction sets: a matrix of an adapter, and rows that are multiplied with it. */

#ifndef SHOAL_LOW_RANK_H
#define SHOAL_LOW_RANK_H

#include <stddef.h>
#include <stdint.h>

/* What the numbers of a matrix are. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* `matrix` is [num_outputs, num_inputs]; `order` says which of its rows makes each output, NULL for
   its own. The products of `rows` [num_rows, num_inputs] with it are written to `result`, whose rows
   are `result_stride` apart; or, if it `adds`, are added to it, times `scale`. */
typedef struct {
    const void *matrix;
    const int64_t *order;
    const float *rows;
    float *result;
    size_t num_rows, num_inputs, num_outputs, result_stride;
    float scale;
    int32_t dtype, adds;
} Factor;

/* So many outputs are computed at a time: their rows of the matrix stay in a cache. */
enum { OUTPUTS_AT_ONCE = 32 };

/* Computes those outputs that begin with the `first`, of all rows. */
typedef void Multiply(const Factor *factor, size_t first);

Multiply multiply_portable, multiply_avx2;

#endif
