/* Attention of generated tokens over KV caches: one token after the other, as they were generated.

   For every token: normalize and rotate its queries and its key, write key and value into the
   cache, and attend over the cache up to the token itself. Nothing is shared between the rows of a
   batch, and every sum is taken in one fixed order: sixteen lanes, added up like a tree. So a
   token's result depends on its own session only, and is the same on every processor. */

#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>

#define WIDTH 4
#define ATTEND attend_portable
#include "attention_body.h"

/* ---- What Python calls ------------------------------------------------------------------------ */

/* 0: portable, 1: AVX2, 2: AVX-512. NULL where the processor lacks it. */
static Attend *find_attend(int32_t instruction_set) {
    if (instruction_set == 0) return attend_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (instruction_set == 1 && __builtin_cpu_supports("avx2")) return attend_avx2;
    if (instruction_set == 2 && __builtin_cpu_supports("avx512f")) return attend_avx512;
#endif
    return NULL;
}

/* To be raised whenever a function below or its structures change: Python compares it. */
int32_t shoal_attention_version(void) { return 2; }

int32_t shoal_attention_has(int32_t instruction_set) {
    return find_attend(instruction_set) != NULL;
}

typedef struct {
    Batch batch;
    Attend *attend;
    atomic_int is_out_of_memory;
} Work;

/* `index` counts the rows and groups of all segments. */
static void attend_some(void *context, size_t index) {
    Work *work = context;
    const Shape *shape = work->batch.shape;
    const size_t num_groups = (size_t)shape->num_groups;
    const Segment *segment = work->batch.segments;
    for (; index >= (size_t)segment->num_rows * num_groups; segment++)
        index -= (size_t)segment->num_rows * num_groups;
    const size_t heads_per_group = (size_t)shape->num_heads / num_groups;
    const size_t num_keys = (size_t)(segment->position + segment->num_tokens);
    size_t num_floats = heads_per_group * (num_keys + (size_t)shape->head_dim);
    if (segment->is_int8) num_floats += KEYS_PER_BLOCK * (size_t)shape->head_dim;
    float *scratch = malloc(num_floats * sizeof(float));
    if (scratch == NULL) {
        atomic_store(&work->is_out_of_memory, 1);
        return;
    }
    work->attend(&work->batch, segment, index, num_keys, scratch);
    free(scratch);
}

/* Computes all segments with an instruction set that the processor must have. Returns 0, or 1
   when memory is short. */
int32_t shoal_attention_attend(
    const Shape *shape, const Segment *segments, int64_t num_segments, int64_t block,
    const float *fused, float *result, int32_t instruction_set, int32_t num_threads
) {
    Work work = {
        .batch = {shape, segments, block, fused, result},
        .attend = find_attend(instruction_set),
    };
    size_t num_tasks = 0;
    for (int64_t i = 0; i < num_segments; i++)
        num_tasks += (size_t)(segments[i].num_rows * shape->num_groups);
    run_tasks(num_tasks, (size_t)num_threads, attend_some, &work);
    return atomic_load(&work.is_out_of_memory);
}
