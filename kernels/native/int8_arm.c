/* The kernel of 64-bit ARM without products of bytes: they are widened and multiplied as int16. It
   multiplies a tile of rows by a panel of outputs; how many rows is known to the compiler, so that
   the sums stay in registers. */

#include "int8_rows.h"

#if defined(__AARCH64EL__) && defined(__linux__)
#include <arm_neon.h>

/* A panel does not fit into registers beside several rows. It is taken in parts, a stretch of groups
   at a time, which stays in the first cache meanwhile. */
enum { GROUPS_PER_STRETCH = 64 };

/* What a number of rows needs. Not inlined: together GCC would keep their sums in memory. */
#define SEPARATE static __attribute__((noinline))

/* Sums of a stretch stay below 2^31: 64 * 4 * 255 * 32639. Then they move on to memory, as
   256 * high + low. */
enum { NEON_ROWS = 4 };

/* Adds the products of a group: 16 outputs of every row. */
INLINE void add_group_neon(
    const uint8_t *rows, const uint8_t *weights, const size_t num_rows,
    int32x4_t sums[NEON_ROWS][4]
) {
    const uint8x16x4_t columns = vld4q_u8(weights);
    int16x4_t numbers[NEON_ROWS];
    UNROLL for (size_t i = 0; i < num_rows; i++)
        numbers[i] = vreinterpret_s16_u8(vld1_u8(rows + 8 * i));
/* Which of a row's four numbers is part of the instruction. */
#define ADD(column)                                                                           \
    {                                                                                         \
        const uint8x16_t bytes = columns.val[column];                                         \
        const int16x8_t first = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));          \
        const int16x8_t second = vreinterpretq_s16_u16(vmovl_high_u8(bytes));                 \
        UNROLL for (size_t i = 0; i < num_rows; i++) {                                        \
            const int16x4_t row = numbers[i];                                                 \
            sums[i][0] = vmlal_lane_s16(sums[i][0], vget_low_s16(first), row, column);        \
            sums[i][1] = vmlal_high_lane_s16(sums[i][1], first, row, column);                 \
            sums[i][2] = vmlal_lane_s16(sums[i][2], vget_low_s16(second), row, column);       \
            sums[i][3] = vmlal_high_lane_s16(sums[i][3], second, row, column);                \
        }                                                                                     \
    }
    ADD(0) ADD(1) ADD(2) ADD(3)
#undef ADD
}

/* Adds a stretch of 16 outputs, from `start` on. */
INLINE void add_stretch_neon(
    const uint8_t *rows, const uint8_t *weights, size_t num_groups, const size_t num_rows,
    Sums *result, size_t start
) {
    int32x4_t sums[NEON_ROWS][4];
    UNROLL for (size_t i = 0; i < num_rows; i++)
        UNROLL for (size_t k = 0; k < 4; k++) sums[i][k] = vdupq_n_s32(0);
    for (size_t group = 0; group < num_groups; group++) {
        add_group_neon(rows, weights, num_rows, sums);
        weights += PANEL * GROUP;
        rows += 8 * num_rows;
    }
    UNROLL for (size_t i = 0; i < num_rows; i++)
        UNROLL for (size_t k = 0; k < 4; k++) {
            int32_t *high = result->high[i] + start + 4 * k;
            int32_t *low = result->low[i] + start + 4 * k;
            const int32x4_t rest = vandq_s32(sums[i][k], vdupq_n_s32(255));
            vst1q_s32(high, vaddq_s32(vld1q_s32(high), vshrq_n_s32(sums[i][k], 8)));
            vst1q_s32(low, vaddq_s32(vld1q_s32(low), rest));
        }
}

#define STRETCH(num_rows)                                                                    \
    SEPARATE void add_##num_rows##_rows_neon(                                                \
        const uint8_t *rows, const uint8_t *weights, size_t num_groups, Sums *sums           \
    ) {                                                                                      \
        for (size_t start = 0; start < PANEL; start += 16)                                   \
            add_stretch_neon(                                                                \
                rows, weights + start * GROUP, num_groups, num_rows, sums, start);           \
    }
STRETCH(1) STRETCH(2) STRETCH(3) STRETCH(4)
#undef STRETCH

static void multiply_neon(const Product *product, size_t tile, size_t panel) {
    static void (*const add_rows[NEON_ROWS])(const uint8_t *, const uint8_t *, size_t, Sums *) = {
        add_1_rows_neon, add_2_rows_neon, add_3_rows_neon, add_4_rows_neon,
    };
    const size_t num_groups = product->layer->num_groups, num_rows = rows_of_tile(product, tile);
    Sums sums = {0};
    for (size_t start = 0; start < num_groups; start += GROUPS_PER_STRETCH)
        add_rows[num_rows - 1](
            tile_rows(product, tile) + start * num_rows * 8,
            panel_weights(product, panel) + start * PANEL * GROUP,
            min_size(GROUPS_PER_STRETCH, num_groups - start), &sums);
    finish_tile(product, tile, panel, &sums, WHOLE_NUMBERS);
}

static void encode_neon(const Product *product, size_t row) {
    encode_row(product, row, WHOLE_NUMBERS);
}

const Kernel *kernels_neon(void) {
    /* int16 holds one digit and two alike. */
    static const Kernel kernels[2] = {
        {NEON_ROWS, 8, encode_neon, multiply_neon},
        {NEON_ROWS, 8, encode_neon, multiply_neon},
    };
    return kernels;
}

#else

const Kernel *kernels_neon(void) { return NULL; }

#endif
