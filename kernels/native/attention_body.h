/* The computation, once for each width of registers: a file that includes this one says how many
   floats a register holds (WIDTH), and how its `Attend` is called (ATTEND). Sums are taken in
   sixteen lanes, which are one, two or four registers, and added up like a tree: what is added to
   what is the same for all. */

#include "attention.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, PARTS = LANES / WIDTH, KEYS_PER_BLOCK = 64 };

/* Of values, what fits into registers beside each other: AVX-512 has 32, the others 16. */
enum { HEADS_AT_ONCE = WIDTH == 16 ? 4 : 2, PARTS_AT_ONCE = 4 };

typedef float Part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef float Quad __attribute__((vector_size(16)));
typedef struct {
    Part parts[PARTS];
} Floats;

/* ---- Sixteen numbers at a time ---------------------------------------------------------------- */

INLINE Part load_part(const float *source) {
    Part values;
    memcpy(&values, source, sizeof values);
    return values;
}

INLINE void store_part(float *target, Part values) { memcpy(target, &values, sizeof values); }

INLINE Floats load(const float *source) {
    Floats values;
    for (size_t i = 0; i < PARTS; i++) values.parts[i] = load_part(source + i * WIDTH);
    return values;
}

/* The first `count` numbers; zeros follow. */
INLINE Floats load_some(const float *source, size_t count) {
    float lanes[LANES] = {0};
    memcpy(lanes, source, count * sizeof(float));
    return load(lanes);
}

INLINE void store(float *target, Floats values) {
    for (size_t i = 0; i < PARTS; i++) store_part(target + i * WIDTH, values.parts[i]);
}

INLINE Floats zeros(void) { return (Floats){0}; }

INLINE Floats add(Floats a, Floats b) {
    for (size_t i = 0; i < PARTS; i++) a.parts[i] += b.parts[i];
    return a;
}

INLINE Floats multiply(Floats a, Floats b) {
    for (size_t i = 0; i < PARTS; i++) a.parts[i] *= b.parts[i];
    return a;
}

INLINE Floats scale(Floats a, float factor) {
    for (size_t i = 0; i < PARTS; i++) a.parts[i] *= factor;
    return a;
}

/* `b` where one of them is NaN. */
INLINE Part larger(Part a, Part b) {
    const Bits is_larger = a > b;
    return (Part)(((Bits)a & is_larger) | ((Bits)b & ~is_larger));
}

INLINE float find_largest(Part numbers) {
    float lanes[WIDTH];
    store_part(lanes, numbers);
    _Pragma("GCC unroll 4") for (size_t half = WIDTH / 2; half > 0; half /= 2)
        _Pragma("GCC unroll 8") for (size_t i = 0; i < half; i++)
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

/* The upper half of the lanes onto the lower, until four are left. */
INLINE Quad fold(Floats values) {
#if WIDTH == 16
    const __m512 part = (__m512)values.parts[0];
    return (Quad)((_mm512_castps512_ps128(part) + _mm512_extractf32x4_ps(part, 2))
                  + (_mm512_extractf32x4_ps(part, 1) + _mm512_extractf32x4_ps(part, 3)));
#elif WIDTH == 8
    const __m256 part = (__m256)(values.parts[0] + values.parts[1]);
    return (Quad)(_mm256_castps256_ps128(part) + _mm256_extractf128_ps(part, 1));
#else
    return (values.parts[0] + values.parts[2]) + (values.parts[1] + values.parts[3]);
#endif
}

/* And on until one is left. */
INLINE float add_lanes(Floats values) {
    const Quad sums = fold(values);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* The sums of four times four, one beside the other. */
INLINE Quad add_quads(Quad a, Quad b, Quad c, Quad d) {
#if defined(__x86_64__)
    const __m128 one = _mm_unpacklo_ps((__m128)a, (__m128)b) + _mm_unpackhi_ps((__m128)a, (__m128)b);
    const __m128 two = _mm_unpacklo_ps((__m128)c, (__m128)d) + _mm_unpackhi_ps((__m128)c, (__m128)d);
    return (Quad)(_mm_movelh_ps(one, two) + _mm_movehl_ps(two, one));
#else
    return (Quad){
        (a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]),
        (c[0] + c[2]) + (c[1] + c[3]), (d[0] + d[2]) + (d[1] + d[3]),
    };
#endif
}

/* `add_lanes` of four. */
INLINE Quad add_lanes_of_four(const Floats *values) {
    return add_quads(fold(values[0]), fold(values[1]), fold(values[2]), fold(values[3]));
}

/* e to the power of numbers that are not positive, to about 1e-7 of the result; NaN stays NaN. */
INLINE Part exponential(Part x) {
    const Part zero = {0};
    x = larger(zero - 87.0f, x); /* the second of the two, if that is NaN */
    const Part rounder = zero + 12582912.0f; /* leaves whole numbers in the low bits */
    const Part shifted = x * 1.44269504f + rounder;
    const Part power = shifted - rounder;
    const Part rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    Part sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const Part result = (Part)((Bits)sum + (((Bits)shifted - (Bits)rounder) << 23));
    return result + (x - x); /* zero, or a NaN, of which the bits above may have made a number */
}

INLINE float multiply_add_up(const float *a, const float *b, size_t count) {
    Floats sums = zeros();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) sums = add(sums, multiply(load(a + i), load(b + i)));
    if (i < count)
        sums = add(sums, multiply(load_some(a + i, count - i), load_some(b + i, count - i)));
    return add_lanes(sums);
}

/* ---- Keys and values ----------------------------------------------------------------------------- */

#include "states.h"

/* ---- One token ---------------------------------------------------------------------------------- */

/* Normalizes (if the model does) and rotates one head's query or key. */
INLINE void prepare_head(
    const Shape *shape, const Segment *segment, size_t token, const float *source, size_t head,
    float scale, float *target
) {
    const size_t head_dim = (size_t)shape->head_dim, half = (size_t)segment->rotary_dim / 2;
    const float *cos = segment->cos + 2 * half * token, *sin = segment->sin + 2 * half * token;
    float normed[MAX_HEAD_DIM];
    if (shape->query_key_norm != NULL) {
        const float *weights = shape->query_key_norm + head * head_dim;
        const float mean = multiply_add_up(source, source, head_dim) / (float)head_dim;
        const float factor = 1.0f / sqrtf(mean + shape->norm_eps);
        for (size_t i = 0; i < head_dim; i++) normed[i] = source[i] * factor * weights[i];
        source = normed;
    }
    for (size_t i = 0; i < half; i++) {
        const float first = source[i], second = source[i + half];
        target[i] = (first * cos[i] - second * sin[i]) * scale;
        target[i + half] = (second * cos[i + half] + first * sin[i + half]) * scale;
    }
    for (size_t i = 2 * half; i < head_dim; i++) target[i] = source[i] * scale;
}

/* Asks for numbers of the block after this one, while this one is computed. */
INLINE void ask_for_next_block(const float *numbers, size_t head_dim, size_t count) {
    const char *next = (const char *)(numbers + KEYS_PER_BLOCK * head_dim);
    for (size_t i = 0; i < count * sizeof(float); i += 64) __builtin_prefetch(next + i);
}

/* One query over some keys: four at a time, whose lanes are added up together. */
INLINE void score_keys(
    const float *query, const float *keys, size_t head_dim, size_t num_keys, float *scores,
    const int is_first
) {
    size_t key = 0;
    for (; key + 4 <= num_keys; key += 4) {
        const float *four = keys + key * head_dim;
        if (is_first) ask_for_next_block(four, head_dim, 4 * head_dim);
        Floats sums[4];
        for (size_t k = 0; k < 4; k++) sums[k] = zeros();
        size_t i = 0;
        for (; i + LANES <= head_dim; i += LANES) {
            const Floats part = load(query + i);
            for (size_t k = 0; k < 4; k++)
                sums[k] = add(sums[k], multiply(part, load(four + k * head_dim + i)));
        }
        if (i < head_dim) {
            const size_t rest = head_dim - i;
            const Floats part = load_some(query + i, rest);
            for (size_t k = 0; k < 4; k++)
                sums[k] = add(sums[k], multiply(part, load_some(four + k * head_dim + i, rest)));
        }
        const Quad added = add_lanes_of_four(sums);
        memcpy(scores + key, &added, sizeof added);
    }
    for (; key < num_keys; key++)
        scores[key] = multiply_add_up(query, keys + key * head_dim, head_dim);
}

/* Turns scores into weights that are not divided by their sum yet; returns the sum. A score that is
   NaN or plus infinity has a weight that is NaN, and so is the sum: overflow must be seen. */
INLINE float weigh(float *scores, size_t num_keys) {
    Part largest = (Part){0} - INFINITY;
    size_t rest = 0;
    for (; rest + WIDTH <= num_keys; rest += WIDTH)
        largest = larger(load_part(scores + rest), largest);
    float maximum = find_largest(largest);
    for (; rest < num_keys; rest++) maximum = scores[rest] > maximum ? scores[rest] : maximum;
    Floats sums = zeros();
    for (size_t i = 0; i < num_keys; i += LANES) {
        const size_t count = num_keys - i < LANES ? num_keys - i : LANES;
        Floats weights = count == LANES ? load(scores + i) : load_some(scores + i, count);
        for (size_t k = 0; k < PARTS; k++) weights.parts[k] = exponential(weights.parts[k] - maximum);
        if (count < LANES) {
            float lanes[LANES];
            store(lanes, weights);
            memcpy(scores + i, lanes, count * sizeof(float));
            weights = load_some(lanes, count);
        } else {
            store(scores + i, weights);
        }
        sums = add(sums, weights);
    }
    return add_lanes(sums);
}

/* Adds a block of values, weighted, to the results of some heads: some columns of each at a time,
   which stay in registers. */
INLINE void add_values(
    const float *values, size_t head_dim, size_t num_keys, const float *weights,
    size_t weights_stride, float *results, const size_t num_heads, const size_t num_parts
) {
    Part sums[4][4];
    for (size_t head = 0; head < num_heads; head++)
        for (size_t i = 0; i < num_parts; i++)
            sums[head][i] = load_part(results + head * head_dim + i * WIDTH);
    for (size_t key = 0; key < num_keys; key++) {
        ask_for_next_block(values + key * head_dim, head_dim, num_parts * WIDTH);
        for (size_t i = 0; i < num_parts; i++) {
            const Part value = load_part(values + key * head_dim + i * WIDTH);
            for (size_t head = 0; head < num_heads; head++)
                sums[head][i] += value * weights[head * weights_stride + key];
        }
    }
    for (size_t head = 0; head < num_heads; head++)
        for (size_t i = 0; i < num_parts; i++)
            store_part(results + head * head_dim + i * WIDTH, sums[head][i]);
}

INLINE void add_block(
    const float *values, size_t head_dim, size_t num_keys, const float *weights,
    size_t weights_stride, size_t num_heads, float *results
) {
    size_t column = 0;
    for (; column + PARTS_AT_ONCE * WIDTH <= head_dim; column += PARTS_AT_ONCE * WIDTH) {
        size_t head = 0;
        for (; head + HEADS_AT_ONCE <= num_heads; head += HEADS_AT_ONCE)
            add_values(
                values + column, head_dim, num_keys, weights + head * weights_stride,
                weights_stride, results + head * head_dim + column, HEADS_AT_ONCE, PARTS_AT_ONCE);
        for (; head < num_heads; head++)
            add_values(
                values + column, head_dim, num_keys, weights + head * weights_stride,
                weights_stride, results + head * head_dim + column, 1, PARTS_AT_ONCE);
    }
    for (; column + WIDTH <= head_dim; column += WIDTH)
        for (size_t head = 0; head < num_heads; head++)
            add_values(
                values + column, head_dim, num_keys, weights + head * weights_stride,
                weights_stride, results + head * head_dim + column, 1, 1);
    for (; column < head_dim; column++)
        for (size_t head = 0; head < num_heads; head++)
            for (size_t key = 0; key < num_keys; key++)
                results[head * head_dim + column] +=
                    values[key * head_dim + column] * weights[head * weights_stride + key];
}

/* One token of a row: the queries of one group over the keys up to its own, which is written. */
INLINE void attend_token(
    const Shape *shape, const Segment *segment, size_t token, const float *fused, size_t group,
    char *keys, char *values, size_t scratch_keys, float *scratch, float *results
) {
    const size_t position = (size_t)segment->position + token;
    const size_t head_dim = (size_t)shape->head_dim, num_heads = (size_t)shape->num_heads;
    const size_t num_groups = (size_t)shape->num_groups, window = (size_t)shape->window;
    const size_t heads_per_group = num_heads / num_groups;
    const size_t first_head = group * heads_per_group, key_head = num_heads + group;
    const size_t token_bytes = count_token_bytes(segment, head_dim);
    float *queries = scratch + heads_per_group * scratch_keys;
    float *room = queries + heads_per_group * head_dim, key[MAX_HEAD_DIM];

    prepare_head(shape, segment, token, fused + key_head * head_dim, key_head, 1.0f, key);
    write_state(segment, key, head_dim, keys + position * token_bytes);
    write_state(
        segment, fused + (key_head + num_groups) * head_dim, head_dim,
        values + position * token_bytes);
    for (size_t i = 0; i < heads_per_group; i++)
        prepare_head(
            shape, segment, token, fused + (first_head + i) * head_dim, first_head + i,
            shape->scale, queries + i * head_dim);

    const size_t first = window > 0 && position >= window ? position + 1 - window : 0;
    const size_t num_keys = position + 1 - first;
    for (size_t start = 0; start < num_keys; start += KEYS_PER_BLOCK) {
        const size_t rest = num_keys - start, count = rest < KEYS_PER_BLOCK ? rest : KEYS_PER_BLOCK;
        const float *block =
            read_states(segment, keys + (first + start) * token_bytes, head_dim, count, room);
        for (size_t i = 0; i < heads_per_group; i++)
            score_keys(
                queries + i * head_dim, block, head_dim, count, scratch + i * scratch_keys + start,
                i == 0);
    }
    float sums[MAX_HEADS_PER_GROUP];
    for (size_t i = 0; i < heads_per_group; i++)
        sums[i] = weigh(scratch + i * scratch_keys, num_keys);

    memset(results, 0, heads_per_group * head_dim * sizeof(float));
    for (size_t start = 0; start < num_keys; start += KEYS_PER_BLOCK) {
        const size_t rest = num_keys - start, count = rest < KEYS_PER_BLOCK ? rest : KEYS_PER_BLOCK;
        const float *block =
            read_states(segment, values + (first + start) * token_bytes, head_dim, count, room);
        add_block(
            block, head_dim, count, scratch + start, scratch_keys, heads_per_group, results);
    }
    for (size_t i = 0; i < heads_per_group; i++)
        for (size_t column = 0; column < head_dim; column++)
            results[i * head_dim + column] /= sums[i];
}

#ifdef ATTEND /* not where somebody borrows what is above */
/* See `Attend`. */
void ATTEND(
    const Batch *batch, const Segment *segment, size_t index, size_t scratch_keys, float *scratch
) {
    const Shape *shape = batch->shape;
    const size_t head_dim = (size_t)shape->head_dim, num_groups = (size_t)shape->num_groups;
    const size_t num_heads = (size_t)shape->num_heads;
    const size_t num_tokens = (size_t)segment->num_tokens;
    const size_t row = index / num_groups, group = index % num_groups;
    const size_t head_size = (size_t)segment->capacity * count_token_bytes(segment, head_dim);
    const size_t half_size = (size_t)segment->num_rows * num_groups * head_size;
    char *keys = segment->cache
                 + 2 * (size_t)(batch->block - segment->first_block) * half_size
                 + index * head_size;

    for (size_t token = 0; token < num_tokens; token++) {
        const size_t place = (size_t)segment->first_row + row * num_tokens + token;
        attend_token(
            shape, segment, token,
            batch->fused + place * (num_heads + 2 * num_groups) * head_dim, group, keys,
            keys + half_size, scratch_keys, scratch,
            batch->result + (place * num_heads + group * (num_heads / num_groups)) * head_dim);
    }
}
#endif
