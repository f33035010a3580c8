/* What an adapter adds to the outputs of a linear: two products, with few numbers between them. The
   bits of a row are the same on every processor, and whatever rows there are beside it. */

#include "threads.h"

#define WIDTH 4
#define MULTIPLY multiply_portable
#include "low_rank_body.h"

/* 0: portable, 1: AVX2. NULL where the processor lacks it. */
static Multiply *find_multiply(int32_t instruction_set) {
    if (instruction_set == 0) return multiply_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has_both = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (instruction_set == 1 && has_both) return multiply_avx2;
#endif
    return NULL;
}

typedef struct {
    const Factor *factor;
    Multiply *multiply;
} Work;

static void multiply_some(void *context, size_t index) {
    const Work *work = context;
    work->multiply(work->factor, index * OUTPUTS_AT_ONCE);
}

/* Products that are worth a second thread's while. */
enum { MANY_PRODUCTS = 1 << 17 };

static void multiply_all(const Factor *factor, Multiply *multiply, size_t num_threads) {
    Work work = {factor, multiply};
    const size_t num_products = factor->num_rows * factor->num_inputs * factor->num_outputs;
    const size_t num_tasks = (factor->num_outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE;
    run_tasks(num_tasks, num_products < MANY_PRODUCTS ? 1 : num_threads, multiply_some, &work);
}

/* ---- What Python calls ------------------------------------------------------------------------ */

/* To be raised whenever a function below or its structure changes: Python compares it. */
int32_t shoal_low_rank_version(void) { return 1; }

int32_t shoal_low_rank_has(int32_t instruction_set) {
    return find_multiply(instruction_set) != NULL;
}

/* For every row [num_rows, num_inputs], adds the products with `down` [rank, num_inputs] and then
   with `up` [num_outputs, rank], times `scale`, to the result's rows, which are `result_stride`
   apart. `order` says which row of `up` makes each output, NULL for its own. `between` has room for
   [num_rows, rank]. The processor must have the instruction set. */
void shoal_low_rank_add(
    const float *rows, const void *down, const void *up, const int64_t *order, float *between,
    float *result, int64_t num_rows, int64_t num_inputs, int64_t rank, int64_t num_outputs,
    int64_t result_stride, float scale, int32_t down_dtype, int32_t up_dtype,
    int32_t instruction_set, int32_t num_threads
) {
    const Factor first = {
        .matrix = down,
        .rows = rows,
        .result = between,
        .num_rows = (size_t)num_rows,
        .num_inputs = (size_t)num_inputs,
        .num_outputs = (size_t)rank,
        .result_stride = (size_t)rank,
        .dtype = down_dtype,
    };
    const Factor second = {
        .matrix = up,
        .order = order,
        .rows = between,
        .result = result,
        .num_rows = (size_t)num_rows,
        .num_inputs = (size_t)rank,
        .num_outputs = (size_t)num_outputs,
        .result_stride = (size_t)result_stride,
        .scale = scale,
        .dtype = up_dtype,
        .adds = 1,
    };
    Multiply *multiply = find_multiply(instruction_set);
    multiply_all(&first, multiply, (size_t)num_threads);
    multiply_all(&second, multiply, (size_t)num_threads);
}
