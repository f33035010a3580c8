/* Linear layers with int8 weights: what Python calls, and the kernel for every other processor. */

#include "int8_rows.h"
#include "threads.h"

#include <stdlib.h>

/* ---- The portable kernel: whole numbers, in plain C ---------------------------------------- */

/* Sums of so many groups stay below 2^31: 64 * 4 * 255 * 32639. */
enum { GROUPS_PER_STRETCH = 64, TILE_ROWS = 4 };

/* Adds the products of one group of 4 columns, of one row and all outputs of a panel. */
INLINE void add_group(const uint8_t *row, const uint8_t *weights, int32_t *sums) {
    int16_t numbers[GROUP];
    memcpy(numbers, row, sizeof numbers);
    for (size_t i = 0; i < PANEL; i++)
        sums[i] += numbers[0] * weights[GROUP * i] + numbers[1] * weights[GROUP * i + 1]
                   + numbers[2] * weights[GROUP * i + 2] + numbers[3] * weights[GROUP * i + 3];
}

static void multiply_portable(const Product *product, size_t tile, size_t panel) {
    const size_t num_rows = rows_of_tile(product, tile), num_groups = product->layer->num_groups;
    const uint8_t *weights = panel_weights(product, panel);
    const uint8_t *rows = tile_rows(product, tile);
    Sums sums = {0};
    for (size_t start = 0; start < num_groups; start += GROUPS_PER_STRETCH) {
        const size_t stop = min_size(start + GROUPS_PER_STRETCH, num_groups);
        int32_t stretch[TILE_ROWS][PANEL] = {{0}};
        for (size_t group = start; group < stop; group++, weights += PANEL * GROUP)
            for (size_t row = 0; row < num_rows; row++, rows += 8)
                add_group(rows, weights, stretch[row]);
        for (size_t row = 0; row < num_rows; row++)
            for (size_t i = 0; i < PANEL; i++) {
                sums.high[row][i] += stretch[row][i] >> 8;
                sums.low[row][i] += stretch[row][i] & 255;
            }
    }
    finish_tile(product, tile, panel, &sums, WHOLE_NUMBERS);
}

static void encode_portable(const Product *product, size_t row) {
    encode_row(product, row, WHOLE_NUMBERS);
}

const Kernel *kernels_portable(void) {
    static const Kernel kernels[2] = {
        {TILE_ROWS, 8, encode_portable, multiply_portable},
        {TILE_ROWS, 8, encode_portable, multiply_portable},
    };
    return kernels;
}

/* ---- What Python calls --------------------------------------------------------------------- */

static const Kernel *find_kernels(int32_t instruction_set) {
    switch (instruction_set) {
        case 0: return kernels_portable();
        case 1: return kernels_avx2();
        case 2: return kernels_avx_vnni();
        case 3: return kernels_avx512_vnni();
        case 4: return kernels_neon();
        case 5: return kernels_neon_dot();
        default: return NULL;
    }
}

/* To be raised whenever a function below or its structures change: Python compares it. */
int32_t shoal_int8_version(void) { return 3; }

int32_t shoal_int8_has(int32_t instruction_set) { return find_kernels(instruction_set) != NULL; }

/* Packs weights [out_features, in_features]; `packed` is as large as the layout in int8.h says. */
void shoal_int8_pack(
    const int8_t *values, int64_t out_features, int64_t in_features, uint8_t *packed
) {
    const size_t num_groups = divide_up((size_t)in_features, GROUP);
    const size_t num_outputs = divide_up((size_t)out_features, PANEL) * PANEL;
    for (size_t output = 0; output < num_outputs; output++) {
        uint8_t *target = packed
                          + (output / PANEL * num_groups * PANEL + output % PANEL) * GROUP;
        const int8_t *source = values + output * (size_t)in_features;
        const size_t num_columns = output < (size_t)out_features ? (size_t)in_features : 0;
        for (size_t column = 0; column < num_groups * GROUP; column++)
            target[column / GROUP * PANEL * GROUP + column % GROUP] =
                (uint8_t)((column < num_columns ? source[column] : 0) + 128);
    }
}

/* Transposes 4 columns of 4 outputs: 16 bytes, of which 4 lie together in either layout.
   First squares of 2 times 2 bytes change places inside of pairs of words, then pairs of bytes. */
INLINE void transpose_words(const uint8_t *source, uint8_t *target) {
    const uint32_t even = 0x00ff00ff, low = 0x0000ffff;
    uint32_t words[GROUP], pairs[GROUP], columns[GROUP];
    memcpy(words, source, sizeof words);
    for (size_t i = 0; i < GROUP; i += 2) {
        pairs[i] = (words[i] & even) | (words[i + 1] & even) << 8;
        pairs[i + 1] = (words[i] >> 8 & even) | (words[i + 1] & ~even);
    }
    for (size_t i = 0; i < 2; i++) {
        columns[i] = (pairs[i] & low) | pairs[i + 2] << 16;
        columns[i + 2] = pairs[i] >> 16 | (pairs[i + 2] & ~low);
    }
    memcpy(target, columns, sizeof columns);
}

/* Packs the transposed matrix of one that is packed: `transposed` has the layout of int8.h for
   weights [in_features, out_features]. A square of 32 times 32 is one piece in both. */
void shoal_int8_transpose(
    const uint8_t *packed, int64_t out_features, int64_t in_features, uint8_t *transposed
) {
    const size_t num_groups = divide_up((size_t)in_features, GROUP);
    const size_t num_panels = divide_up((size_t)out_features, PANEL);
    const size_t new_groups = divide_up((size_t)out_features, GROUP);
    const size_t new_panels = divide_up((size_t)in_features, PANEL);
    const size_t group_bytes = PANEL * GROUP, square_groups = PANEL / GROUP;
    for (size_t column = 0; column < new_panels; column++)
        for (size_t output = 0; output < num_panels; output++) {
            const size_t first = column * square_groups, new_first = output * square_groups;
            const uint8_t *source = packed + (output * num_groups + first) * group_bytes;
            uint8_t *target = transposed + (column * new_groups + new_first) * group_bytes;
            const size_t count = min_size(square_groups, num_groups - first);
            const size_t new_count = min_size(square_groups, new_groups - new_first);
            for (size_t to = 0; to < new_count; to++, target += group_bytes) {
                for (size_t from = 0; from < count; from++)
                    transpose_words(
                        source + from * group_bytes + to * GROUP * GROUP,
                        target + from * GROUP * GROUP
                    );
                memset(target + count * GROUP * GROUP, 128, (square_groups - count) * GROUP * GROUP);
            }
        }
}

typedef struct {
    Product product;
    size_t num_tiles;
    size_t panels_per_task;
} Work;

/* Fewer rows than a task has are rounded sooner than a second thread has come. More tasks than
   threads, because a thread may lose its processor to somebody else. */
enum { ROWS_PER_TASK = 16, TASKS_PER_THREAD = 4 };

static void encode_some(void *context, size_t index) {
    const Work *work = context;
    const size_t start = index * ROWS_PER_TASK;
    const size_t stop = min_size(start + ROWS_PER_TASK, work->product.num_rows);
    for (size_t row = start; row < stop; row++)
        work->product.kernel->encode_row(&work->product, row);
}

static void multiply_some(void *context, size_t index) {
    const Work *work = context;
    const size_t start = index * work->panels_per_task;
    const size_t stop = min_size(start + work->panels_per_task, work->product.layer->num_panels);
    for (size_t panel = start; panel < stop; panel++)
        for (size_t tile = 0; tile < work->num_tiles; tile++)
            work->product.kernel->multiply(&work->product, tile, panel);
}

/* Computes all rows with one instruction set, which the processor must have. `square_sums`, one
   for each row, is NULL for two digits, whose squares are too large. Returns 0, or 1 when memory is
   short. */
int32_t shoal_int8_multiply(
    const Layer *layer, const void *hidden, void *result, int32_t *square_sums, int64_t num_rows,
    int32_t dtype, int32_t num_digits, int32_t instruction_set, int32_t num_threads
) {
    if (num_rows == 0) return 0;
    const Kernel *kernel = &find_kernels(instruction_set)[num_digits - 1];
    const size_t rows = (size_t)num_rows, threads = (size_t)num_threads;
    const size_t num_tiles = divide_up(rows, kernel->max_tile_rows);
    const size_t row_bytes =
        sizeof(float) + sizeof(int32_t) + layer->num_groups * kernel->bytes_per_group;
    uint8_t *memory = malloc(rows * row_bytes);
    if (memory == NULL) return 1;
    Work work = {
        .product = {
            .layer = layer,
            .kernel = kernel,
            .hidden = hidden,
            .result = result,
            .dtype = dtype,
            .num_digits = (size_t)num_digits,
            .num_rows = rows,
            .rows_per_tile = divide_up(rows, num_tiles), /* 8 rows are 4 and 4, not 6 and 2 */
            .steps = (float *)memory,
            .number_sums = (int32_t *)(memory + rows * sizeof(float)),
            .square_sums = square_sums,
            .encoded = memory + rows * (sizeof(float) + sizeof(int32_t)),
        },
        .num_tiles = num_tiles,
        .panels_per_task = divide_up(layer->num_panels, threads * TASKS_PER_THREAD),
    };
    run_tasks(divide_up(rows, ROWS_PER_TASK), threads, encode_some, &work);
    run_tasks(divide_up(layer->num_panels, work.panels_per_task), threads, multiply_some, &work);
    free(memory);
    return 0;
}
