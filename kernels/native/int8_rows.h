/* What every instruction set does alike before and after the integer sums: round rows of
   activations, and turn sums into results. Inlined into each, and so compiled for each. */

#ifndef SHOAL_INT8_ROWS_H
#define SHOAL_INT8_ROWS_H

#include "int8.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Before a loop whose sums are to stay in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* How a kernel wants a group of 4 columns: as int16, or digit by digit as signed bytes. */
typedef enum { WHOLE_NUMBERS, ONE_DIGIT, TWO_DIGITS } Form;

enum { CHUNK = 512 };

INLINE size_t bytes_of(Form form) { return form == ONE_DIGIT ? 4 : 8; }

INLINE size_t rows_of_tile(const Product *product, size_t tile) {
    const size_t rows_per_tile = product->rows_per_tile;
    return min_size(rows_per_tile, product->num_rows - tile * rows_per_tile);
}

/* Where a tile's encoded rows start. */
INLINE const uint8_t *tile_rows(const Product *product, size_t tile) {
    const size_t first_row = tile * product->rows_per_tile;
    return product->encoded
           + first_row * product->layer->num_groups * product->kernel->bytes_per_group;
}

INLINE const uint8_t *panel_weights(const Product *product, size_t panel) {
    return product->layer->packed + panel * product->layer->num_groups * PANEL * GROUP;
}

INLINE int32_t load_int32(const uint8_t *bytes) {
    int32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

INLINE int64_t load_int64(const uint8_t *bytes) {
    int64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* A number of the activations as the bits of a float. */
INLINE uint32_t hidden_bits(const Product *product, size_t index) {
    if (product->dtype == FLOAT32) return ((const uint32_t *)product->hidden)[index];
    return (uint32_t)((const uint16_t *)product->hidden)[index] << 16;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The largest magnitude as bits: they are ordered like the numbers, infinity and NaN last. */
INLINE uint32_t largest_bits(const Product *product, size_t start, size_t num_columns) {
    int32_t largest = 0;
    for (size_t i = 0; i < num_columns; i++) {
        int32_t bits = (int32_t)(hidden_bits(product, start + i) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    return (uint32_t)largest;
}

/* Adding this number leaves the nearest whole number, ties to even, in the low bits. */
#define ROUNDER 12582912.0f

INLINE void round_chunk(
    const Product *product, size_t start, size_t count, float inverse, int16_t *out
) {
    for (size_t i = 0; i < count; i++)
        out[i] = (int16_t)(bits_of(float_of(hidden_bits(product, start + i)) * inverse + ROUNDER)
                           - bits_of(ROUNDER));
}

INLINE void scatter_chunk(
    const int16_t *numbers, size_t num_groups, Form form, uint8_t *target, size_t stride
) {
    int8_t low[CHUNK], high[CHUNK];
    for (size_t i = 0; form != WHOLE_NUMBERS && i < num_groups * GROUP; i++) {
        low[i] = (int8_t)numbers[i];
        high[i] = (int8_t)((numbers[i] - low[i]) >> 8);
    }
    for (size_t group = 0; group < num_groups; group++, target += stride) {
        if (form == WHOLE_NUMBERS) memcpy(target, numbers + group * GROUP, 8);
        else memcpy(target, low + group * GROUP, 4);
        if (form == TWO_DIGITS) memcpy(target + 4, high + group * GROUP, 4);
    }
}

/* Rounds one row and writes it into its place in its tile. A row that holds NaN or infinity gets
   NaN as its step, and so NaN as its results. */
INLINE void encode_row(const Product *product, size_t row, Form form) {
    const size_t num_columns = product->layer->in_features;
    const size_t num_groups = product->layer->num_groups;
    const size_t rows_per_tile = product->rows_per_tile;
    const size_t tile = row / rows_per_tile;
    const size_t stride = rows_of_tile(product, tile) * bytes_of(form);
    uint8_t *target = product->encoded + tile * rows_per_tile * num_groups * bytes_of(form)
                      + row % rows_per_tile * bytes_of(form);

    const float limit = product->num_digits == 1 ? 127.0f : 32639.0f;
    const uint32_t largest = largest_bits(product, row * num_columns, num_columns);
    const int is_finite = largest < 0x7f800000;
    /* The floor keeps the division finite for rows of zeros or of tiny numbers. */
    const float smallest = 0x1p-100f;
    const float absmax = float_of(largest) > smallest ? float_of(largest) : smallest;
    const float inverse = is_finite ? limit / absmax : 0.0f;
    product->steps[row] = is_finite ? absmax / limit : NAN;

    int32_t sum = 0, squares = 0;
    for (size_t start = 0; start < num_groups * GROUP; start += CHUNK) {
        int16_t numbers[CHUNK] = {0};
        const size_t chunk_groups = min_size(CHUNK / GROUP, num_groups - start / GROUP);
        const size_t count = min_size(CHUNK, num_columns - start);
        if (is_finite) round_chunk(product, row * num_columns + start, count, inverse, numbers);
        for (size_t i = 0; i < count; i++) sum += numbers[i];
        if (product->square_sums != NULL)
            for (size_t i = 0; i < count; i++) squares += numbers[i] * numbers[i];
        scatter_chunk(numbers, chunk_groups, form, target + start / GROUP * stride, stride);
    }
    product->number_sums[row] = sum;
    if (product->square_sums != NULL) product->square_sums[row] = squares;
}

INLINE uint16_t bfloat16_bits(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* The integer sums of a tile of rows and a panel of outputs, as 256 * high + low. */
typedef struct {
    int32_t high[MAX_TILE_ROWS][PANEL], low[MAX_TILE_ROWS][PANEL];
} Sums;

/* Rounds the integer sums of one row to float, once. One digit's fit into 32 bits, and doubles
   hold those of two digits. Bytes of one digit have no high sums. */
INLINE void round_sums(
    const Product *product, size_t row, const int32_t *high, const int32_t *low, Form form,
    float *rounded
) {
    const int32_t number_sum = product->number_sums[row];
    if (product->num_digits == 1) {
        for (size_t i = 0; i < PANEL; i++) {
            const int32_t upper = form == WHOLE_NUMBERS ? 256 * high[i] : 0;
            rounded[i] = (float)(upper + low[i] - 128 * number_sum);
        }
    } else {
        for (size_t i = 0; i < PANEL; i++)
            rounded[i] = (float)(256.0 * high[i] + low[i] - 128.0 * number_sum);
    }
}

/* Writes the results of one row and panel. */
INLINE void finish_row(
    const Product *product, size_t row, size_t panel, const int32_t *high, const int32_t *low,
    Form form
) {
    const Layer *layer = product->layer;
    const size_t start = panel * PANEL;
    const size_t count = min_size(PANEL, layer->out_features - start);
    const float step = product->steps[row];
    const float *scales = layer->scales + start;
    float results[PANEL];
    round_sums(product, row, high, low, form, results);
    for (size_t i = 0; i < count; i++) results[i] = results[i] * step * scales[i];
    if (layer->bias != NULL)
        for (size_t i = 0; i < count; i++) results[i] += layer->bias[start + i];
    const size_t first = row * layer->out_features + start;
    if (product->dtype == FLOAT32) {
        memcpy((float *)product->result + first, results, count * sizeof(float));
    } else {
        uint16_t *target = (uint16_t *)product->result + first;
        for (size_t i = 0; i < count; i++) target[i] = bfloat16_bits(results[i]);
    }
}

INLINE void finish_tile(
    const Product *product, size_t tile, size_t panel, const Sums *sums, Form form
) {
    const size_t num_rows = rows_of_tile(product, tile);
    const size_t first_row = tile * product->rows_per_tile;
    for (size_t row = 0; row < num_rows; row++)
        finish_row(product, first_row + row, panel, sums->high[row], sums->low[row], form);
}

#endif
