/* Attention of prompts over KV caches: all tokens of a step together.

   First every token's key is normalized and rotated, and written into the cache beside its value;
   then the queries attend, in tiles that share the work of reading keys. A token's result depends
   on its own session's tokens up to itself, and on nothing else: not on how the prompt was cut
   into steps, on threads, on company, or on the processor. */

#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>

#define WIDTH 4
#define ATTEND_TILE attend_tile_portable
#include "prompt_attention_body.h"

/* Enough for turning a block of keys to be cheap beside attending over it. */
enum { QUERIES_PER_TILE = 128 };

/* 0: portable, 1: AVX2, 2: AVX-512. NULL where the processor lacks it. */
static AttendTile *find_attend(int32_t instruction_set) {
    if (instruction_set == 0) return attend_tile_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("fma")) return NULL;
    if (instruction_set == 1 && __builtin_cpu_supports("avx2")) return attend_tile_avx2;
    if (instruction_set == 2 && __builtin_cpu_supports("avx512f")) return attend_tile_avx512;
#endif
    return NULL;
}

typedef struct {
    Batch batch;
    AttendTile *attend;
    atomic_int is_out_of_memory;
} Work;

static size_t count_queries(const Shape *shape, const Segment *segment) {
    return (size_t)(segment->num_tokens * (shape->num_heads / shape->num_groups));
}

static size_t count_tiles(const Shape *shape, const Segment *segment) {
    return (count_queries(shape, segment) + QUERIES_PER_TILE - 1) / QUERIES_PER_TILE;
}

/* `index` counts the tiles of all rows and groups of all segments. */
static Tile find_tile(const Batch *batch, size_t index) {
    const Segment *segment = batch->segments;
    for (;; segment++) {
        const size_t num_tiles = count_tiles(batch->shape, segment);
        const size_t num_tasks = (size_t)(segment->num_rows * batch->shape->num_groups) * num_tiles;
        if (index >= num_tasks) {
            index -= num_tasks;
            continue;
        }
        const size_t first = index % num_tiles * QUERIES_PER_TILE;
        const size_t num_queries = count_queries(batch->shape, segment);
        const size_t stop = at_most(first + QUERIES_PER_TILE, num_queries);
        return (Tile){segment, index / num_tiles, first, stop};
    }
}

/* Writes keys and values of the tokens whose first query is in a tile. */
static void write_some(void *context, size_t index) {
    const Batch *batch = &((Work *)context)->batch;
    const Shape *shape = batch->shape;
    const Tile tile = find_tile(batch, index);
    const Segment *segment = tile.segment;
    const size_t num_heads = (size_t)shape->num_heads, num_groups = (size_t)shape->num_groups;
    const size_t heads_per_group = num_heads / num_groups, head_dim = (size_t)shape->head_dim;
    const size_t row = tile.index / num_groups, key_head = num_heads + tile.index % num_groups;
    const size_t token_bytes = count_token_bytes(segment, head_dim);
    size_t half_size;
    char *keys = find_keys(batch, &tile, &half_size);
    for (size_t query = tile.first; query < tile.stop; query++) {
        if (query % heads_per_group > 0) continue;
        const size_t token = query / heads_per_group;
        const size_t place = (size_t)(segment->first_row + row * segment->num_tokens) + token;
        const float *source =
            batch->fused + (place * (num_heads + 2 * num_groups) + key_head) * head_dim;
        char *target = keys + ((size_t)segment->position + token) * token_bytes;
        float key[MAX_HEAD_DIM];
        prepare_head(shape, segment, token, source, key_head, 1.0f, key);
        write_state(segment, key, head_dim, target);
        write_state(segment, source + num_groups * head_dim, head_dim, target + half_size);
    }
}

static void attend_some(void *context, size_t index) {
    Work *work = context;
    const Tile tile = find_tile(&work->batch, index);
    const size_t width = ((size_t)work->batch.shape->head_dim + LANES - 1) / LANES * LANES;
    const size_t num_queries = tile.stop - tile.first;
    size_t num_floats = 2 * width * (KEYS_PER_BLOCK + num_queries) + 2 * num_queries;
    num_floats = (num_floats + 15) / 16 * 16;
    float *scratch = aligned_alloc(64, num_floats * sizeof(float));
    if (scratch == NULL) {
        atomic_store(&work->is_out_of_memory, 1);
        return;
    }
    work->attend(&work->batch, &tile, scratch);
    free(scratch);
}

/* ---- What Python calls ------------------------------------------------------------------------ */

/* To be raised whenever a function below or its structures change: Python compares it. */
int32_t shoal_prompt_attention_version(void) { return 2; }

int32_t shoal_prompt_attention_has(int32_t instruction_set) {
    return find_attend(instruction_set) != NULL;
}

/* The best instruction set; -1 where a fused multiplication is no instruction but a long
   computation, and torch is faster. */
int32_t shoal_prompt_attention_choose(void) {
    for (int32_t instruction_set = 2; instruction_set > 0; instruction_set--)
        if (find_attend(instruction_set) != NULL) return instruction_set;
#if defined(__FP_FAST_FMAF) || defined(__FP_FAST_FMAF32)
    return 0;
#else
    return -1;
#endif
}

/* Computes all segments with an instruction set that the processor must have. Returns 0, or 1
   when memory is short. */
int32_t shoal_prompt_attention_attend(
    const Shape *shape, const Segment *segments, int64_t num_segments, int64_t block,
    const float *fused, float *result, int32_t instruction_set, int32_t num_threads
) {
    Work work = {
        .batch = {shape, segments, block, fused, result},
        .attend = find_attend(instruction_set),
    };
    size_t num_tasks = 0;
    for (int64_t i = 0; i < num_segments; i++)
        num_tasks += (size_t)(segments[i].num_rows * shape->num_groups)
                     * count_tiles(shape, &segments[i]);
    run_tasks(num_tasks, (size_t)num_threads, write_some, &work);
    run_tasks(num_tasks, (size_t)num_threads, attend_some, &work);
    return atomic_load(&work.is_out_of_memory);
}
