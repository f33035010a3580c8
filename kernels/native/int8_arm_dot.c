/* The kernel of 64-bit ARM with products of bytes: SDOT, 4 outputs a register. Bytes are signed:
   weights lose their 128 in registers, and nothing comes off the sums. A digit of a row is a row of
   its own here, and how many there are is known to the compiler, as in int8_arm.c. */

/* Clang before 16 knows products of bytes only where all code may use them. */
#if defined(__AARCH64EL__) && defined(__linux__) && !(defined(__clang__) && __clang_major__ < 16)

#include <math.h>
#include <string.h>
#include <sys/auxv.h>

/* What follows is compiled for these processors, and what is included with it: GCC inlines nothing
   that was meant for others, as all would be where the installation names a processor. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=armv8.2-a+dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include <arm_neon.h>

#include "int8_rows.h"

/* A panel does not fit into registers beside several rows. It is taken in parts, a stretch of groups
   at a time, which stays in the first cache meanwhile. */
enum { GROUPS_PER_STRETCH = 64 };

/* What a number of rows needs. Not inlined: together GCC would keep their sums in memory. */
#define SEPARATE static __attribute__((noinline))

enum { DIGIT_ROWS = 12, MAX_WIDTH = 8 };

/* The bytes of up to four digits, and nothing behind them. */
INLINE int8x16_t load_digits(const uint8_t *rows, const size_t count) {
    if (count == 4) return vreinterpretq_s8_u8(vld1q_u8(rows));
    if (count == 1) return vreinterpretq_s8_s32(vdupq_n_s32(load_int32(rows)));
    const int32x2_t first = vreinterpret_s32_u8(vld1_u8(rows));
    const int32_t third = count == 3 ? load_int32(rows + 8) : 0;
    return vreinterpretq_s8_s32(vcombine_s32(first, vdup_n_s32(third)));
}

/* Adds the products of a group: `width` registers of outputs. */
INLINE void add_group_dot(
    const uint8_t *rows, const uint8_t *weights, const size_t num_digits, const size_t width,
    int32x4_t sums[DIGIT_ROWS][MAX_WIDTH]
) {
    int8x16_t digits[DIGIT_ROWS / 4];
    UNROLL for (size_t i = 0; i < num_digits; i += 4)
        digits[i / 4] = load_digits(rows + 4 * i, min_size(num_digits - i, 4));
/* Which of four digits is part of the instruction. */
#define ADD(digit)                                                                              \
    if (i + digit < num_digits)                                                                 \
        sums[i + digit][k] = vdotq_laneq_s32(sums[i + digit][k], loaded, digits[i / 4], digit);
    UNROLL for (size_t k = 0; k < width; k++) {
        const int8x16_t loaded =
            vreinterpretq_s8_u8(veorq_u8(vld1q_u8(weights + 16 * k), vdupq_n_u8(128)));
        UNROLL for (size_t i = 0; i < num_digits; i += 4) { ADD(0) ADD(1) ADD(2) ADD(3) }
    }
#undef ADD
}

INLINE void add_stretch_dot(
    const uint8_t *rows, const uint8_t *weights, size_t num_groups, const size_t num_digits,
    const size_t width, int32_t totals[DIGIT_ROWS][PANEL], size_t start
) {
    int32x4_t sums[DIGIT_ROWS][MAX_WIDTH];
    UNROLL for (size_t i = 0; i < num_digits; i++)
        UNROLL for (size_t k = 0; k < width; k++) sums[i][k] = vdupq_n_s32(0);
    for (size_t group = 0; group < num_groups; group++) {
        add_group_dot(rows, weights, num_digits, width, sums);
        weights += PANEL * GROUP;
        rows += 4 * num_digits;
    }
    UNROLL for (size_t i = 0; i < num_digits; i++)
        UNROLL for (size_t k = 0; k < width; k++) {
            int32_t *total = totals[i] + start + 4 * k;
            vst1q_s32(total, vaddq_s32(vld1q_s32(total), sums[i][k]));
        }
}

#define STRETCH(num_digits, width)                                                               \
    SEPARATE void add_##num_digits##_digits(                                                 \
        const uint8_t *rows, const uint8_t *weights, size_t num_groups,                          \
        int32_t totals[DIGIT_ROWS][PANEL]                                                        \
    ) {                                                                                          \
        for (size_t start = 0; start < PANEL; start += 4 * width)                                \
            add_stretch_dot(                                                                     \
                rows, weights + start * GROUP, num_groups, num_digits, width, totals, start);    \
    }
STRETCH(1, 8) STRETCH(2, 8) STRETCH(3, 4) STRETCH(4, 4) STRETCH(5, 4) STRETCH(6, 4)
STRETCH(7, 2) STRETCH(8, 2) STRETCH(9, 2) STRETCH(10, 2) STRETCH(11, 2) STRETCH(12, 2)
#undef STRETCH

INLINE void multiply_dot(
    const Product *product, size_t tile, size_t panel, const size_t digits, const Form form
) {
    static void (*const add_digits[DIGIT_ROWS])(
        const uint8_t *, const uint8_t *, size_t, int32_t[DIGIT_ROWS][PANEL]
    ) = {
        add_1_digits, add_2_digits, add_3_digits, add_4_digits, add_5_digits, add_6_digits,
        add_7_digits, add_8_digits, add_9_digits, add_10_digits, add_11_digits, add_12_digits,
    };
    const size_t num_groups = product->layer->num_groups, num_rows = rows_of_tile(product, tile);
    const size_t num_digits = num_rows * digits;
    int32_t totals[DIGIT_ROWS][PANEL] = {{0}};
    for (size_t start = 0; start < num_groups; start += GROUPS_PER_STRETCH)
        add_digits[num_digits - 1](
            tile_rows(product, tile) + start * num_digits * 4,
            panel_weights(product, panel) + start * PANEL * GROUP,
            min_size(GROUPS_PER_STRETCH, num_groups - start), totals);
    for (size_t row = 0; row < num_rows; row++) {
        const int32_t *low = totals[row * digits], *high = totals[row * digits + digits - 1];
        finish_row(product, tile * product->rows_per_tile + row, panel, high, low, form);
    }
}

static void multiply_one_dot(const Product *product, size_t tile, size_t panel) {
    multiply_dot(product, tile, panel, 1, ONE_DIGIT);
}

static void multiply_two_dot(const Product *product, size_t tile, size_t panel) {
    multiply_dot(product, tile, panel, 2, TWO_DIGITS);
}

static void encode_one_dot(const Product *product, size_t row) {
    encode_row(product, row, ONE_DIGIT);
    product->number_sums[row] = 0;
}

static void encode_two_dot(const Product *product, size_t row) {
    encode_row(product, row, TWO_DIGITS);
    product->number_sums[row] = 0;
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Kernel *kernels_neon_dot(void) {
    static const Kernel kernels[2] = {
        {DIGIT_ROWS, 4, encode_one_dot, multiply_one_dot},
        {DIGIT_ROWS / 2, 8, encode_two_dot, multiply_two_dot},
    };
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? kernels : NULL;
}

#else

#include "int8.h"

const Kernel *kernels_neon_dot(void) { return NULL; }

#endif
