/* Shared by the instruction sets: how the queries of prompts attend. */

#ifndef SHOAL_PROMPT_ATTENTION_H
#define SHOAL_PROMPT_ATTENTION_H

#include "attention.h"

/* Some queries of one row and key-value head of a segment: those from `first` to `stop` when they
   are counted token by token, and head by head within a token. */
typedef struct {
    const Segment *segment;
    size_t index; /* counts rows and groups */
    size_t first, stop;
} Tile;

/* The keys of a head, in the cache; as many values follow, `half_size` bytes behind them. */
static inline char *find_keys(const Batch *batch, const Tile *tile, size_t *half_size) {
    const Segment *segment = tile->segment;
    const size_t token_bytes = count_token_bytes(segment, (size_t)batch->shape->head_dim);
    const size_t head_size = (size_t)segment->capacity * token_bytes;
    *half_size = (size_t)(segment->num_rows * batch->shape->num_groups) * head_size;
    return segment->cache + 2 * (size_t)(batch->block - segment->first_block) * *half_size
           + tile->index * head_size;
}

/* Attends with the queries of a tile. The keys and values of its tokens are in the cache.
   `scratch` begins at a multiple of 64 bytes. */
typedef void AttendTile(const Batch *batch, const Tile *tile, float *scratch);

AttendTile attend_tile_portable, attend_tile_avx2, attend_tile_avx512;

#endif
