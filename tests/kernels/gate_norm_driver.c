/* Gates and norms of many lengths, on every instruction set, with arrays that are no larger than
   they have to be. Results must be the same bits everywhere; prints a digest of all of them. */

#include "digest.h"

#include <math.h>
#include <string.h>

int32_t shoal_gate_has(int32_t instruction_set);
void shoal_gate_silu(
    const float *, const float *, float *, int64_t, int64_t, int32_t, int32_t
);
void shoal_norm_rms(const float *, const float *, float *, int64_t, int64_t, float);

static unsigned state = 1;

static float *allocate(size_t count) {
    float *numbers = malloc(count * sizeof(float));
    if (numbers == NULL) exit(2);
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = ldexpf((float)(state >> 8) / (1u << 23) - 1.0f, (int)(state >> 4 & 15) - 7);
    }
    return numbers;
}

static int check_gate(size_t num_rows, size_t num_columns, int is_back) {
    const size_t size = num_rows * num_columns, result_size = is_back ? 2 * size : size;
    const int64_t rows = (int64_t)num_rows, columns = (int64_t)num_columns;
    float *gate_up = allocate(2 * size), *grads = is_back ? allocate(size) : NULL;
    float *expected = allocate(result_size), *result = allocate(result_size);
    gate_up[0] = 3e38f;
    shoal_gate_silu(gate_up, grads, expected, rows, columns, 0, 1);
    digest_bytes(expected, result_size * sizeof(float));
    int is_wrong = 0;
    for (int set = 0; set < 3; set++)
        for (int threads = 1; shoal_gate_has(set) && threads <= 3; threads += 2) {
            shoal_gate_silu(gate_up, grads, result, rows, columns, set, threads);
            is_wrong |= memcmp(result, expected, result_size * sizeof(float));
        }
    free(gate_up), free(grads), free(expected), free(result);
    if (is_wrong) printf("wrong: %zu gates in %zu rows\n", num_columns, num_rows);
    return is_wrong != 0;
}

static void compute_norm(size_t num_rows, size_t num_columns) {
    const size_t size = num_rows * num_columns;
    float *hidden = allocate(size), *weight = allocate(num_columns), *result = allocate(size);
    shoal_norm_rms(hidden, weight, result, (int64_t)num_rows, (int64_t)num_columns, 1e-5f);
    digest_bytes(result, size * sizeof(float));
    free(hidden), free(weight), free(result);
}

int main(void) {
    int num_wrong = 0;
    for (size_t num_columns = 1; num_columns < 70; num_columns++)
        for (size_t num_rows = 1; num_rows < 4; num_rows++) {
            num_wrong += check_gate(num_rows, num_columns, 0);
            num_wrong += check_gate(num_rows, num_columns, 1);
            compute_norm(num_rows, num_columns);
        }
    num_wrong += check_gate(5, 16391, 0) + check_gate(5, 16391, 1); /* more than one task */
    print_digest();
    return num_wrong != 0;
}
