/* Shared by the instruction sets: what generated tokens of several sessions attend over. */

#ifndef SHOAL_ATTENTION_H
#define SHOAL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

enum { MAX_HEAD_DIM = 1024, MAX_HEADS_PER_GROUP = 1024 };

/* What one block does with every token. */
typedef struct {
    int64_t num_heads;
    int64_t num_groups; /* key-value heads */
    int64_t head_dim;
    int64_t window; /* most keys that a token sees; 0: all */
    float scale;
    float norm_eps;
    const float *query_key_norm; /* [num_heads + num_groups, head_dim], or NULL for none */
} Shape;

/* The tokens of one session: `num_tokens` in each of its rows. */
typedef struct {
    char *cache;            /* [blocks, 2, rows, groups, capacity, head]: keys and values */
    const float *cos, *sin; /* [tokens, rotary_dim] */
    int64_t rotary_dim;
    int64_t first_block;    /* the first one in the cache */
    int64_t capacity;
    int64_t first_row; /* where its tokens begin among those of the batch */
    int64_t num_rows, num_tokens, position;
    int64_t is_int8; /* whether the cache keeps records of integers, not floats */
} Segment;

/* Bytes of one token's key or value in one head of the cache. */
static inline size_t count_token_bytes(const Segment *segment, size_t head_dim) {
    return segment->is_int8 ? sizeof(float) + (head_dim + 3) / 4 * 4 : head_dim * sizeof(float);
}

/* One block's share of a batch. */
typedef struct {
    const Shape *shape;
    const Segment *segments;
    int64_t block;
    const float *fused; /* [tokens, (heads + 2 groups) * head_dim]: queries, keys, values */
    float *result;      /* [tokens, heads * head_dim] */
} Batch;

/* Computes one row and one key-value head of a segment: all its tokens, in order. `index` counts
   rows and groups, `scratch` holds a query and the scores of `scratch_keys` keys for every head,
   and then, where they are integers, a block of keys or values. */
typedef void Attend(
    const Batch *batch, const Segment *segment, size_t index, size_t scratch_keys, float *scratch);

Attend attend_portable, attend_avx2, attend_avx512;

#endif
