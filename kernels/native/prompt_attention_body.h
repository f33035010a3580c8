/* Attention of prompts, once for each width of registers: a file that includes this one says how
   many floats a register holds (WIDTH), and how its `AttendTile` is called (ATTEND_TILE).

   Keys are read in blocks that begin at multiples of KEYS_PER_BLOCK, wherever a prompt was cut,
   and every query keeps its own maximum and sums from block to block. Each sum runs in the order
   of the columns or of the keys, with one rounding for a product and its addition. So nothing
   depends on which queries are computed beside each other, or on the width of registers. */

#include "fused_body.h"
#include "prompt_attention.h"

#include <float.h>
#include <stdbool.h>

/* Sums that stay in registers: AVX-512 and 64-bit ARM have 32 of them, the others 16. */
#if WIDTH == 16 || defined(__aarch64__)
enum { QUERIES_AT_ONCE = 4, COLUMN_PARTS_AT_ONCE = 4 };
#else
enum { QUERIES_AT_ONCE = 4, COLUMN_PARTS_AT_ONCE = 2 };
#endif

/* ---- Numbers side by side ---------------------------------------------------------------------- */

INLINE size_t at_least(size_t a, size_t b) { return a > b ? a : b; }
INLINE size_t at_most(size_t a, size_t b) { return a < b ? a : b; }

/* ---- Products ------------------------------------------------------------------------------------ */

/* Products, added up for some queries: [queries, count] times [count, columns] is added to
   [queries, columns], or begins it. A query's numbers are `..._stride` after those of the one
   before. */
typedef struct {
    const float *factors;
    const float *rows;
    float *sums;
    size_t factors_stride, rows_stride, sums_stride;
    size_t num_queries, count, num_parts; /* columns are whole registers */
    bool begins;
} Product;

/* Some columns of some queries, as many as the compiler knows. */
INLINE void add_columns(
    const Product *product, size_t query, size_t column, const size_t num_queries,
    const size_t num_parts
) {
    const float *factors = product->factors + query * product->factors_stride;
    const float *rows = product->rows + column;
    float *target = product->sums + query * product->sums_stride + column;
    Part sums[QUERIES_AT_ONCE][COLUMN_PARTS_AT_ONCE];
    for (size_t i = 0; i < num_queries; i++)
        for (size_t k = 0; k < num_parts; k++)
            sums[i][k] = product->begins
                             ? spread(0.0f)
                             : load_part(target + i * product->sums_stride + k * WIDTH);
    for (size_t n = 0; n < product->count; n++, rows += product->rows_stride) {
        Part row[COLUMN_PARTS_AT_ONCE];
        for (size_t k = 0; k < num_parts; k++) row[k] = load_part(rows + k * WIDTH);
        for (size_t i = 0; i < num_queries; i++) {
            const Part factor = spread(factors[i * product->factors_stride + n]);
            for (size_t k = 0; k < num_parts; k++)
                sums[i][k] = multiply_add(factor, row[k], sums[i][k]);
        }
    }
    for (size_t i = 0; i < num_queries; i++)
        for (size_t k = 0; k < num_parts; k++)
            store_part(target + i * product->sums_stride + k * WIDTH, sums[i][k]);
}

/* Some columns of all queries. */
INLINE void add_queries(const Product *product, size_t column, const size_t num_parts) {
    if (product->num_queries == QUERIES_AT_ONCE) {
        add_columns(product, 0, column, QUERIES_AT_ONCE, num_parts);
        return;
    }
    for (size_t query = 0; query < product->num_queries; query++)
        add_columns(product, query, column, 1, num_parts);
}

static void add_product(const Product *product) {
    size_t part = 0;
    for (; part + COLUMN_PARTS_AT_ONCE <= product->num_parts; part += COLUMN_PARTS_AT_ONCE)
        add_queries(product, part * WIDTH, COLUMN_PARTS_AT_ONCE);
    for (; part < product->num_parts; part++) add_queries(product, part * WIDTH, 1);
}

/* ---- Blocks of keys -------------------------------------------------------------------------------- */

/* A tile on its way through the keys. */
typedef struct {
    size_t head_dim, width; /* `width`: head_dim in whole registers */
    const float *queries;   /* [queries, head_dim] */
    float *results;         /* [queries, width]: sums of values, not divided yet */
    float *maxima, *sums;   /* of each query's scores, and of their weights */
} State;

/* Keys and values of KEYS_PER_BLOCK positions, or of the first of them. */
typedef struct {
    const float *columns; /* [head_dim, KEYS_PER_BLOCK]: the keys, transposed */
    const float *values;  /* [keys, values_stride], with `width` numbers to read */
    size_t values_stride;
} Block;

/* The keys of a block that a query sees. */
typedef struct {
    size_t first, stop;
} Range;

/* Missing keys are zeros, which nobody sees. */
static void transpose(const float *keys, size_t num_keys, size_t head_dim, float *columns) {
    size_t key = 0;
    for (; key + 4 <= num_keys; key += 4) {
        const float *source = keys + key * head_dim;
        float *target = columns + key;
        size_t i = 0;
        for (; i + 4 <= head_dim; i += 4) {
            Quad a, b, c, d;
            memcpy(&a, source + i, sizeof a);
            memcpy(&b, source + i + head_dim, sizeof b);
            memcpy(&c, source + i + 2 * head_dim, sizeof c);
            memcpy(&d, source + i + 3 * head_dim, sizeof d);
            for (size_t k = 0; k < 4; k++) {
                const Quad column = {a[k], b[k], c[k], d[k]};
                memcpy(target + (i + k) * KEYS_PER_BLOCK, &column, sizeof column);
            }
        }
        for (; i < head_dim; i++)
            for (size_t k = 0; k < 4; k++)
                target[i * KEYS_PER_BLOCK + k] = source[k * head_dim + i];
    }
    for (; key < KEYS_PER_BLOCK; key++)
        for (size_t i = 0; i < head_dim; i++)
            columns[i * KEYS_PER_BLOCK + key] = key < num_keys ? keys[key * head_dim + i] : 0.0f;
}

/* Turns a query's scores of a block into weights, relative to the largest score so far; what was
   summed before becomes relative to it, too. */
static void weigh_block(const State *state, size_t query, Range seen, float *scores) {
    for (size_t i = 0; i < seen.first; i++) scores[i] = -INFINITY;
    for (size_t i = seen.stop; i < KEYS_PER_BLOCK; i++) scores[i] = -INFINITY;
    const float before = state->maxima[query];
    Part largest = spread(before);
    for (size_t i = 0; i < KEYS_PER_BLOCK; i += WIDTH)
        largest = larger(largest, load_part(scores + i));
    const float maximum = find_largest(largest);

    Floats sums = zeros();
    for (size_t i = 0; i < KEYS_PER_BLOCK; i += WIDTH) {
        const Part weights = raise_e(load_part(scores + i) - maximum);
        store_part(scores + i, weights);
        sums.parts[i / WIDTH % PARTS] += weights;
    }
    const float sum = add_lanes(sums);
    if (maximum == before) {
        state->sums[query] += sum;
        return;
    }
    const float factor = raise_e(spread(before - maximum))[0];
    state->maxima[query] = maximum;
    state->sums[query] = fmaf(state->sums[query], factor, sum);
    float *results = state->results + query * state->width;
    for (size_t i = 0; i < state->width; i += WIDTH)
        store_part(results + i, load_part(results + i) * factor);
}

/* Adds the values of some keys to the results of some queries. */
INLINE void add_values_of(
    const State *state, const Block *block, size_t query, size_t num_queries, Range keys,
    const float *weights
) {
    if (keys.first >= keys.stop) return;
    const Product product = {
        .factors = weights + keys.first,
        .factors_stride = KEYS_PER_BLOCK,
        .rows = block->values + keys.first * block->values_stride,
        .rows_stride = block->values_stride,
        .sums = state->results + query * state->width,
        .sums_stride = state->width,
        .num_queries = num_queries,
        .count = keys.stop - keys.first,
        .num_parts = state->width / WIDTH,
    };
    add_product(&product);
}

/* Some queries over a block, of which each may see other keys: they go together over those that
   all see, and each for itself over those before and behind. What a query does not see is not
   touched, since it need not be finite. */
static void attend_block(
    const State *state, const Block *block, size_t query, size_t num_queries, const Range *seen
) {
    float scores[QUERIES_AT_ONCE * KEYS_PER_BLOCK];
    Range common = {0, KEYS_PER_BLOCK};
    size_t stop = 0;
    for (size_t i = 0; i < num_queries; i++) {
        common.first = at_least(common.first, seen[i].first);
        common.stop = at_most(common.stop, seen[i].stop);
        stop = at_least(stop, seen[i].stop);
    }
    if (stop == 0) return;
    if (common.first > common.stop) common = (Range){KEYS_PER_BLOCK, KEYS_PER_BLOCK};

    const Product product = {
        .factors = state->queries + query * state->head_dim,
        .factors_stride = state->head_dim,
        .rows = block->columns,
        .rows_stride = KEYS_PER_BLOCK,
        .sums = scores,
        .sums_stride = KEYS_PER_BLOCK,
        .num_queries = num_queries,
        .count = state->head_dim,
        .num_parts = (stop + WIDTH - 1) / WIDTH,
        .begins = true,
    };
    add_product(&product);
    for (size_t i = 0; i < num_queries; i++) {
        float *weights = scores + i * KEYS_PER_BLOCK;
        if (seen[i].first >= seen[i].stop) continue;
        weigh_block(state, query + i, seen[i], weights);
        const Range before = {seen[i].first, at_most(common.first, seen[i].stop)};
        add_values_of(state, block, query + i, 1, before, weights);
    }
    add_values_of(state, block, query, num_queries, common, scores);
    for (size_t i = 0; i < num_queries; i++) {
        const Range behind = {at_least(common.stop, seen[i].first), seen[i].stop};
        add_values_of(state, block, query + i, 1, behind, scores + i * KEYS_PER_BLOCK);
    }
}

/* ---- One tile -------------------------------------------------------------------------------------- */

/* The positions that a query sees. */
INLINE Range find_seen(const Shape *shape, const Segment *segment, size_t token) {
    const size_t stop = (size_t)segment->position + token + 1, window = (size_t)shape->window;
    return (Range){window > 0 && stop > window ? stop - window : 0, stop};
}

/* See `AttendTile`. */
void ATTEND_TILE(const Batch *batch, const Tile *tile, float *scratch) {
    const Shape *shape = batch->shape;
    const Segment *segment = tile->segment;
    const size_t num_heads = (size_t)shape->num_heads, num_groups = (size_t)shape->num_groups;
    const size_t heads_per_group = num_heads / num_groups, head_dim = (size_t)shape->head_dim;
    const size_t width = (head_dim + WIDTH - 1) / WIDTH * WIDTH;
    const size_t num_queries = tile->stop - tile->first;
    const size_t row = tile->index / num_groups, group = tile->index % num_groups;
    const size_t first_place = (size_t)(segment->first_row + row * segment->num_tokens);
    const size_t token_bytes = count_token_bytes(segment, head_dim);
    size_t half_size;
    const char *keys = find_keys(batch, tile, &half_size), *values = keys + half_size;

    float *columns = scratch, *padded = columns + head_dim * KEYS_PER_BLOCK;
    float *results = padded + KEYS_PER_BLOCK * width, *queries = results + num_queries * width;
    float *maxima = queries + num_queries * head_dim;
    const State state = {head_dim, width, queries, results, maxima, maxima + num_queries};
    memset(padded, 0, KEYS_PER_BLOCK * width * sizeof(float));
    memset(results, 0, num_queries * width * sizeof(float));
    for (size_t i = 0; i < num_queries; i++) {
        const size_t token = (tile->first + i) / heads_per_group;
        const size_t head = group * heads_per_group + (tile->first + i) % heads_per_group;
        const size_t place = (first_place + token) * (num_heads + 2 * num_groups) + head;
        prepare_head(
            shape, segment, token, batch->fused + place * head_dim, head, shape->scale,
            queries + i * head_dim);
        state.maxima[i] = -FLT_MAX;
        state.sums[i] = 0.0f;
    }

    const size_t first_key = find_seen(shape, segment, tile->first / heads_per_group).first;
    const size_t stop_key = find_seen(shape, segment, (tile->stop - 1) / heads_per_group).stop;
    for (size_t start = first_key / KEYS_PER_BLOCK * KEYS_PER_BLOCK; start < stop_key;
         start += KEYS_PER_BLOCK) {
        const size_t num_keys = at_most(stop_key - start, KEYS_PER_BLOCK);
        const char *block_keys = keys + start * token_bytes;
        const char *block_values = values + start * token_bytes;
        transpose(
            read_states(segment, block_keys, head_dim, num_keys, padded), num_keys, head_dim,
            columns);
        Block block = {columns, padded, width};
        if (width > head_dim) /* reading whole registers could leave the cache */
            copy_states(segment, block_values, head_dim, num_keys, width, padded);
        else
            block.values = read_states(segment, block_values, head_dim, num_keys, padded);
        for (size_t query = 0; query < num_queries; query += QUERIES_AT_ONCE) {
            const size_t count = at_most(num_queries - query, QUERIES_AT_ONCE);
            Range seen[QUERIES_AT_ONCE];
            for (size_t i = 0; i < count; i++) {
                seen[i] =
                    find_seen(shape, segment, (tile->first + query + i) / heads_per_group);
                seen[i].first = at_least(seen[i].first, start) - start;
                seen[i].stop = at_most(at_least(seen[i].stop, start) - start, KEYS_PER_BLOCK);
            }
            attend_block(&state, &block, query, count, seen);
        }
    }

    for (size_t i = 0; i < num_queries; i++) {
        const size_t token = (tile->first + i) / heads_per_group;
        const size_t head = group * heads_per_group + (tile->first + i) % heads_per_group;
        float *target = batch->result + ((first_place + token) * num_heads + head) * head_dim;
        for (size_t k = 0; k < head_dim; k++) target[k] = results[i * width + k] / state.sums[i];
    }
}
