/* Shared by the instruction sets: the layout of weights and activations, and what a kernel is.

   A linear layer here is exact up to its last three operations. Weights are int8. A row of
   activations becomes whole numbers q = round(x / step), |q| <= 127 (one digit) or <= 32639 (two
   digits, q = 256 * high + low). The sum over q * weight is an integer that is rounded to float
   once; then it is multiplied by the row's step and by the output's scale, and the bias is added.
   Integer sums do not depend on their order, so neither does any result: it is the same on every
   instruction set, in every batch and on any number of threads.

   Weights are packed so that one row of activations reads them front to back. A byte holds a
   weight plus 128, because processors multiply unsigned by signed bytes; 128 times the sum of the
   row's numbers comes off again.

     panel of 32 outputs   [ group of 4 columns ][ group of 4 columns ] ...
     group                 [ output 0: 4 columns ][ output 1: 4 columns ] ... [ output 31 ]

   Rows are packed the same way, up to `rows_per_tile` at a time: for each group of 4 columns the
   rows' numbers, in the form that the kernel multiplies. Outputs and columns are padded with
   zeros. */

#ifndef SHOAL_INT8_H
#define SHOAL_INT8_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, GROUP = 4, MAX_TILE_ROWS = 12 };

enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef struct {
    const uint8_t *packed;
    const float *scales;
    const float *bias; /* or NULL */
    size_t num_groups;
    size_t num_panels;
    size_t in_features;
    size_t out_features;
} Layer;

typedef struct Product Product;

/* One way to multiply, for one instruction set and number of digits. */
typedef struct {
    size_t max_tile_rows;
    size_t bytes_per_group; /* of one row */
    void (*encode_row)(const Product *product, size_t row);
    void (*multiply)(const Product *product, size_t tile, size_t panel);
} Kernel;

/* One call: what all threads read while they work on it. */
struct Product {
    const Layer *layer;
    const Kernel *kernel;
    const void *hidden; /* rows of in_features numbers of `dtype` */
    void *result;       /* rows of out_features numbers of `dtype` */
    int dtype;
    size_t num_digits;
    size_t num_rows;
    size_t rows_per_tile; /* the last tile may have fewer */
    uint8_t *encoded;     /* tiles of rows, see above */
    float *steps;         /* one per row */
    int32_t *number_sums; /* of each row's numbers */
    int32_t *square_sums; /* of the squares of each row's numbers, of one digit; or NULL */
};

/* The two kernels of an instruction set, for one and two digits, or NULL where the processor
   lacks it. */
const Kernel *kernels_portable(void);
const Kernel *kernels_avx2(void);
const Kernel *kernels_avx_vnni(void);
const Kernel *kernels_avx512_vnni(void);
const Kernel *kernels_neon(void);
const Kernel *kernels_neon_dot(void);

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static inline size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

#endif
