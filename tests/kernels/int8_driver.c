/* Multiplies many shapes on every instruction set, with arrays that are as large as they have to
   be and no larger: built with the address sanitizer, it ends at the first byte out of place. */

#include "../../kernels/native/int8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int32_t shoal_int8_has(int32_t instruction_set);
void shoal_int8_pack(const int8_t *, int64_t, int64_t, uint8_t *);
int32_t shoal_int8_multiply(const Layer *, const void *, void *, int32_t *, int64_t, int32_t,
                            int32_t, int32_t, int32_t);

static unsigned state = 1;

static int draw(int below) {
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (unsigned)below);
}

static void *allocate(size_t num_bytes) {
    void *memory = malloc(num_bytes);
    if (memory == NULL) exit(2);
    return memory;
}

/* Returns the result of the first rows, to be freed. */
static void *multiply(const Layer *layer, const void *hidden, int64_t num_rows, int dtype,
                      int digits, int instruction_set, int threads) {
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    void *result = allocate((size_t)num_rows * layer->out_features * size);
    int32_t *squares = digits == 1 ? allocate((size_t)num_rows * sizeof *squares) : NULL;
    if (shoal_int8_multiply(layer, hidden, result, squares, num_rows, dtype, digits,
                            instruction_set, threads))
        exit(2);
    free(squares);
    return result;
}

static int check_shape(size_t in_features, size_t out_features, int64_t num_rows, int dtype) {
    const size_t num_groups = divide_up(in_features, GROUP);
    const size_t num_panels = divide_up(out_features, PANEL);
    const size_t size = dtype == FLOAT32 ? 4 : 2;
    int8_t *values = allocate(in_features * out_features);
    for (size_t i = 0; i < in_features * out_features; i++) values[i] = (int8_t)(draw(255) - 127);
    uint8_t *packed = allocate(num_panels * PANEL * num_groups * GROUP);
    float *scales = allocate(out_features * sizeof(float));
    float *bias = allocate(out_features * sizeof(float));
    for (size_t i = 0; i < out_features; i++) scales[i] = 0.01f, bias[i] = (float)i;
    shoal_int8_pack(values, (int64_t)out_features, (int64_t)in_features, packed);
    const Layer layer = {
        packed, scales, num_rows % 2 ? bias : NULL, num_groups, num_panels, in_features,
        out_features,
    };
    char *hidden = allocate((size_t)num_rows * in_features * size);
    for (size_t i = 0; i < (size_t)num_rows * in_features; i++) {
        const float number = (float)(draw(2001) - 1000) / 64;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        const uint16_t half = (uint16_t)(bits >> 16);
        memcpy(hidden + i * size, dtype == FLOAT32 ? (void *)&bits : (void *)&half, size);
    }
    int is_wrong = 0;
    for (int digits = 1; digits <= 2; digits++) {
        void *expected = multiply(&layer, hidden, num_rows, dtype, digits, 0, 1);
        for (int set = 0; set < 4; set++)
            for (int threads = 1; shoal_int8_has(set) && threads <= 3; threads += 2) {
                void *result = multiply(&layer, hidden, num_rows, dtype, digits, set, threads);
                is_wrong |= memcmp(result, expected, (size_t)num_rows * out_features * size);
                free(result);
            }
        free(expected);
    }
    free(values), free(packed), free(scales), free(bias), free(hidden);
    if (is_wrong) printf("%zu -> %zu, %d rows\n", in_features, out_features, (int)num_rows);
    return is_wrong != 0;
}

int main(void) {
    static const size_t in_features[] = {1, 3, 4, 64, 257, 511, 1030};
    static const size_t out_features[] = {1, 31, 32, 33, 100};
    int num_wrong = 0;
    for (size_t i = 0; i < sizeof in_features / sizeof *in_features; i++)
        for (size_t o = 0; o < sizeof out_features / sizeof *out_features; o++)
            for (int64_t rows = 1; rows <= 25; rows += rows < 13 ? 1 : 12)
                for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++)
                    num_wrong += check_shape(in_features[i], out_features[o], rows, dtype);
    return num_wrong != 0;
}
