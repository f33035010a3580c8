/* What an adapter adds to the outputs of a linear, once for each width of registers: a file that
   includes this one says how many floats a register holds (WIDTH), and how its `Multiply` is called
   (MULTIPLY).

   Every sum is taken in eight lanes, with one rounding for a product and its addition, and the lanes
   are added up like a tree. Eight, because that is how many numbers the smallest adapters have
   between their matrices. */

#include "fused_body.h"
#include "low_rank.h"

enum { SUM_LANES = 8, SUM_PARTS = SUM_LANES / WIDTH };

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef struct {
    Part parts[SUM_PARTS];
} Eight;

/* What a file of two bytes for each number has there. Such numbers are finite. */
INLINE Part widen(Halves halves, const int32_t dtype) {
    const Words words = __builtin_convertvector(halves, Words);
    if (dtype == BFLOAT16) return (Part)(words << 16);
    /* Its exponents begin elsewhere. */
    return (Part)((words & 0x8000) << 16 | (words & 0x7fff) << 13) * spread(0x1p112f);
}

INLINE Eight load_eight(const void *numbers, size_t start, const int32_t dtype) {
    Eight values;
    for (size_t i = 0; i < SUM_PARTS; i++, start += WIDTH) {
        if (dtype == FLOAT32) {
            values.parts[i] = load_part((const float *)numbers + start);
            continue;
        }
        Halves halves;
        memcpy(&halves, (const uint16_t *)numbers + start, sizeof halves);
        values.parts[i] = widen(halves, dtype);
    }
    return values;
}

/* The same where fewer are left; zeros follow. */
INLINE Eight load_rest(const void *numbers, size_t start, size_t count, const int32_t dtype) {
    float rest[SUM_LANES] = {0};
    const size_t size = dtype == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    memcpy(rest, (const char *)numbers + start * size, count * size);
    return load_eight(rest, 0, dtype);
}

INLINE void add_products(Eight *sums, Eight a, Eight b) {
    for (size_t i = 0; i < SUM_PARTS; i++)
        sums->parts[i] = multiply_add(a.parts[i], b.parts[i], sums->parts[i]);
}

INLINE Quad fold_eight(Eight values) {
#if WIDTH == 8
    const __m256 part = (__m256)values.parts[0];
    return (Quad)(_mm256_castps256_ps128(part) + _mm256_extractf128_ps(part, 1));
#else
    return values.parts[0] + values.parts[1];
#endif
}

INLINE const void *find_outputs(const Factor *factor, size_t output, const int32_t dtype) {
    const size_t place = factor->order == NULL ? output : (size_t)factor->order[output];
    const size_t size = dtype == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    return (const char *)factor->matrix + place * factor->num_inputs * size;
}

/* Four outputs of some rows, as many as the compiler knows. Where fewer than four are left, the last
   one is computed again. */
INLINE void multiply_four(
    const Factor *factor, size_t row, size_t output, const size_t num_rows, const int32_t dtype
) {
    const size_t num_inputs = factor->num_inputs;
    const size_t num_left = factor->num_outputs - output;
    const float *rows[2];
    const void *matrix[4];
    Eight sums[2][4];
    for (size_t i = 0; i < num_rows; i++) rows[i] = factor->rows + (row + i) * num_inputs;
    for (size_t k = 0; k < 4; k++)
        matrix[k] = find_outputs(factor, output + (k < num_left ? k : num_left - 1), dtype);
    for (size_t i = 0; i < num_rows; i++)
        for (size_t k = 0; k < 4; k++) sums[i][k] = (Eight){0};
    size_t n = 0;
    for (; n + SUM_LANES <= num_inputs; n += SUM_LANES) {
        Eight numbers[4];
        for (size_t k = 0; k < 4; k++) numbers[k] = load_eight(matrix[k], n, dtype);
        for (size_t i = 0; i < num_rows; i++) {
            const Eight row_numbers = load_eight(rows[i], n, FLOAT32);
            for (size_t k = 0; k < 4; k++) add_products(&sums[i][k], row_numbers, numbers[k]);
        }
    }
    for (size_t i = 0; n < num_inputs && i < num_rows; i++)
        for (size_t k = 0; k < 4; k++)
            add_products(
                &sums[i][k], load_rest(rows[i], n, num_inputs - n, FLOAT32),
                load_rest(matrix[k], n, num_inputs - n, dtype));
    for (size_t i = 0; i < num_rows; i++) {
        const Quad found = add_quads(
            fold_eight(sums[i][0]), fold_eight(sums[i][1]), fold_eight(sums[i][2]),
            fold_eight(sums[i][3]));
        float *target = factor->result + (row + i) * factor->result_stride + output;
        for (size_t k = 0; k < 4 && k < num_left; k++)
            target[k] = factor->adds ? target[k] + found[k] * factor->scale : found[k];
    }
}

INLINE void multiply_outputs(const Factor *factor, size_t first, const int32_t dtype) {
    const size_t rest = factor->num_outputs - first;
    const size_t stop = first + (rest < OUTPUTS_AT_ONCE ? rest : OUTPUTS_AT_ONCE);
    for (size_t output = first; output < stop; output += 4) {
        size_t row = 0;
        for (; row + 2 <= factor->num_rows; row += 2) multiply_four(factor, row, output, 2, dtype);
        if (row < factor->num_rows) multiply_four(factor, row, output, 1, dtype);
    }
}

/* See `Multiply`. */
void MULTIPLY(const Factor *factor, size_t first) {
    if (factor->dtype == FLOAT32) multiply_outputs(factor, first, FLOAT32);
    else if (factor->dtype == BFLOAT16) multiply_outputs(factor, first, BFLOAT16);
    else multiply_outputs(factor, first, FLOAT16);
}
