/* Multiplies many shapes on every instruction set, with arrays that are as large as they have to
   be and no larger: built with the address sanitizer, it ends at the first byte out of place.
   Prints the numbers of the instruction sets, then a digest of all results. */

#include "../../kernels/native/int8.h"
#include "digest.h"

#include <math.h>
#include <string.h>

int32_t shoal_int8_has(int32_t instruction_set);
void shoal_int8_pack(const int8_t *, int64_t, int64_t, uint8_t *);
void shoal_int8_transpose(const uint8_t *, int64_t, int64_t, uint8_t *);
int32_t shoal_int8_multiply(const Layer *, const void *, void *, int32_t *, int64_t, int32_t,
                            int32_t, int32_t, int32_t);

enum { NUM_SETS = 6 };

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

typedef struct {
    void *numbers;
    int32_t *squares; /* or NULL */
    size_t num_bytes, num_square_bytes;
} Result;

static Result multiply(const Layer *layer, const void *hidden, int64_t num_rows, int dtype,
                       int digits, int instruction_set, int threads) {
    Result result = {.num_bytes = (size_t)num_rows * layer->out_features * (dtype ? 2 : 4)};
    result.numbers = allocate(result.num_bytes);
    if (digits == 1) {
        result.num_square_bytes = (size_t)num_rows * sizeof *result.squares;
        result.squares = allocate(result.num_square_bytes);
    }
    if (shoal_int8_multiply(layer, hidden, result.numbers, result.squares, num_rows, dtype,
                            digits, instruction_set, threads))
        exit(2);
    return result;
}

static void free_result(Result result) { free(result.numbers), free(result.squares); }

static int is_same(Result a, Result b) {
    return memcmp(a.numbers, b.numbers, a.num_bytes) == 0
           && (a.squares == NULL || memcmp(a.squares, b.squares, a.num_square_bytes) == 0);
}

/* Whether all instruction sets and numbers of threads come to the same bits. */
static int check_sets(const Layer *layer, const void *hidden, int64_t num_rows, int dtype) {
    int is_wrong = 0;
    for (int digits = 1; digits <= 2; digits++) {
        const Result expected = multiply(layer, hidden, num_rows, dtype, digits, 0, 1);
        digest_bytes(expected.numbers, expected.num_bytes);
        digest_bytes(expected.squares, expected.num_square_bytes);
        for (int set = 0; set < NUM_SETS; set++)
            for (int threads = 1; shoal_int8_has(set) && threads <= 3; threads += 2) {
                const Result result =
                    multiply(layer, hidden, num_rows, dtype, digits, set, threads);
                is_wrong |= !is_same(result, expected);
                free_result(result);
            }
        free_result(expected);
    }
    if (is_wrong)
        printf("wrong: %zu -> %zu, %d rows\n", layer->in_features, layer->out_features,
               (int)num_rows);
    return is_wrong;
}

/* Whether what is transposed is what packing the transposed weights gives. */
static int check_transposed(const int8_t *values, const uint8_t *packed, size_t in_features,
                            size_t out_features) {
    const size_t num_bytes =
        divide_up(in_features, PANEL) * PANEL * divide_up(out_features, GROUP) * GROUP;
    int8_t *turned = allocate(in_features * out_features);
    uint8_t *expected = allocate(num_bytes), *transposed = allocate(num_bytes);
    for (size_t i = 0; i < in_features * out_features; i++)
        turned[i % in_features * out_features + i / in_features] = values[i];
    shoal_int8_pack(turned, (int64_t)in_features, (int64_t)out_features, expected);
    shoal_int8_transpose(packed, (int64_t)out_features, (int64_t)in_features, transposed);
    const int is_wrong = memcmp(transposed, expected, num_bytes) != 0;
    if (is_wrong) printf("wrong: transposed %zu -> %zu\n", in_features, out_features);
    free(turned), free(expected), free(transposed);
    return is_wrong;
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
        const int is_broken = in_features > 60 && i / in_features == 2 && i % in_features == 50;
        const float number = is_broken ? INFINITY : (float)(draw(2001) - 1000) / 64;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        const uint16_t half = (uint16_t)(bits >> 16);
        memcpy(hidden + i * size, dtype == FLOAT32 ? (void *)&bits : (void *)&half, size);
    }
    const int is_wrong = check_sets(&layer, hidden, num_rows, dtype)
                         | check_transposed(values, packed, in_features, out_features);
    free(values), free(packed), free(scales), free(bias), free(hidden);
    return is_wrong;
}

/* The longest sums of the largest numbers: 32 bits are nearly full, or more than full on the way. */
static int check_extremes(void) {
    enum { COLUMNS = 65536, OUTPUTS = 33, ROWS = 3 };
    int8_t *values = allocate(COLUMNS * OUTPUTS);
    uint8_t *packed = allocate(2 * PANEL * COLUMNS);
    float *scales = allocate(OUTPUTS * sizeof(float)), *hidden = allocate(ROWS * COLUMNS * 4);
    for (size_t i = 0; i < COLUMNS * OUTPUTS; i++)
        values[i] = i / COLUMNS == 0 ? -128 : i / COLUMNS == 2 && i % 2 ? -127 : 127;
    for (size_t i = 0; i < OUTPUTS; i++) scales[i] = 1.0f;
    for (size_t i = 0; i < ROWS * COLUMNS; i++)
        hidden[i] = i / COLUMNS == 1 || (i / COLUMNS == 2 && i % 2) ? -1.0f : 1.0f;
    shoal_int8_pack(values, OUTPUTS, COLUMNS, packed);
    const Layer layer = {packed, scales, NULL, COLUMNS / GROUP, 2, COLUMNS, OUTPUTS};
    const int is_wrong = check_sets(&layer, hidden, ROWS, FLOAT32);
    free(values), free(packed), free(scales), free(hidden);
    return is_wrong;
}

int main(int count, char **arguments) {
    (void)count;
    static const size_t in_features[] = {1, 3, 4, 64, 257, 511, 1030};
    static const size_t out_features[] = {1, 31, 32, 33, 100};
    for (int set = 0; set < NUM_SETS; set++)
        if (shoal_int8_has(set)) printf("%d ", set);
    printf("\n");
    int num_wrong = check_extremes();
    for (size_t i = 0; i < sizeof in_features / sizeof *in_features; i++)
        for (size_t o = 0; o < sizeof out_features / sizeof *out_features; o++)
            for (int64_t rows = 1; rows <= 40; rows += rows < 17 ? 1 : 23)
                for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++)
                    if (is_chosen(arguments))
                        num_wrong += check_shape(in_features[i], out_features[o], rows, dtype);
    print_digest();
    return num_wrong != 0;
}
