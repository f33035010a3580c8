/* Adapters of many shapes, on every instruction set, with arrays that are no larger than they have
   to be. Results must be the same bits everywhere; prints a digest of all of them. */

#include "digest.h"

#include <math.h>
#include <string.h>

int32_t shoal_low_rank_has(int32_t instruction_set);
void shoal_low_rank_add(
    const float *, const void *, const void *, const int64_t *, float *, float *, int64_t, int64_t,
    int64_t, int64_t, int64_t, float, int32_t, int32_t, int32_t, int32_t
);

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

/* Numbers of two bytes, in either form finite; of four where `dtype` is zero. */
static void *allocate_matrix(size_t count, int32_t dtype) {
    if (dtype == 0) return allocate(count);
    uint16_t *numbers = malloc(count * sizeof(uint16_t));
    if (numbers == NULL) exit(2);
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = (uint16_t)(state >> 16 & 0xbbff);
    }
    return numbers;
}

static int check(int64_t rows, int64_t inputs, int64_t rank, int64_t outputs, int is_ordered) {
    static int32_t num_calls;
    const int32_t down_dtype = num_calls++ % 3, up_dtype = num_calls % 3;
    const int64_t stride = outputs + 3;
    const size_t size = (size_t)((rows - 1) * stride + outputs), num_bytes = size * sizeof(float);
    float *hidden = allocate((size_t)(rows * inputs)), *between = allocate((size_t)(rows * rank));
    void *down = allocate_matrix((size_t)(rank * inputs), down_dtype);
    void *up = allocate_matrix((size_t)(outputs * rank), up_dtype);
    int64_t *order = is_ordered ? malloc((size_t)outputs * sizeof(int64_t)) : NULL;
    for (int64_t i = 0; is_ordered && i < outputs; i++) order[i] = outputs - 1 - i;
    float *start = allocate(size), *expected = allocate(size), *result = allocate(size);
    memcpy(expected, start, num_bytes);
    shoal_low_rank_add(
        hidden, down, up, order, between, expected, rows, inputs, rank, outputs, stride, 0.3f,
        down_dtype, up_dtype, 0, 1);
    digest_bytes(expected, num_bytes);
    int is_wrong = 0;
    for (int set = 0; set < 2; set++)
        for (int threads = 1; shoal_low_rank_has(set) && threads <= 3; threads += 2) {
            memcpy(result, start, num_bytes);
            shoal_low_rank_add(
                hidden, down, up, order, between, result, rows, inputs, rank, outputs, stride,
                0.3f, down_dtype, up_dtype, set, threads);
            is_wrong |= memcmp(result, expected, num_bytes);
        }
    free(hidden), free(between), free(down), free(up), free(order);
    free(start), free(expected), free(result);
    if (is_wrong)
        printf("wrong: %d rows, %d to %d to %d\n", (int)rows, (int)inputs, (int)rank, (int)outputs);
    return is_wrong != 0;
}

int main(void) {
    int num_wrong = 0;
    for (int64_t rank = 1; rank < 20; rank++)
        for (int64_t rows = 1; rows < 6; rows++)
            for (int64_t outputs = 1; outputs < 70; outputs += 11)
                num_wrong += check(rows, 3 * outputs + rank, rank, outputs, (int)(rank % 2));
    num_wrong += check(40, 300, 64, 200, 1); /* threads */
    print_digest();
    return num_wrong != 0;
}
