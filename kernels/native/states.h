/* Keys and values as a cache keeps them: as floats, or as records of 8-bit integers, which
   ../int8_kv.py describes. For a file that includes attention_body.h. */

/* A record with less in it is all zeros: the inverse of its scale could be infinite. */
#define TINY 1e-30f

/* Quantizes the key or value of one token. One that is not finite has a scale that is NaN. */
INLINE void quantize_state(const float *source, size_t head_dim, char *record) {
    float largest = 0.0f, rest = 0.0f; /* `rest` becomes NaN if a number is not finite */
    for (size_t i = 0; i < head_dim; i++) {
        const float size = fabsf(source[i]);
        largest = size > largest ? size : largest;
        rest += size - size;
    }
    const int is_usual = largest >= TINY && rest == 0.0f;
    const float scale = is_usual ? largest / 127.0f : rest;
    const float factor = is_usual ? 127.0f / largest : 0.0f;
    const float rounder = 12582912.0f; /* leaves whole numbers, even ones where in doubt */
    memcpy(record, &scale, sizeof scale);
    record += sizeof scale;
    for (size_t i = 0; i < head_dim; i++)
        record[i] = (char)(int8_t)(is_usual ? source[i] * factor + rounder - rounder : 0.0f);
}

INLINE void write_state(
    const Segment *segment, const float *source, size_t head_dim, char *target
) {
    if (segment->is_int8)
        quantize_state(source, head_dim, target);
    else
        memcpy(target, source, head_dim * sizeof(float));
}

/* Copies keys or values of consecutive tokens as floats, each `stride` after the one before. */
INLINE void copy_states(
    const Segment *segment, const char *source, size_t head_dim, size_t count, size_t stride,
    float *target
) {
    const size_t token_bytes = count_token_bytes(segment, head_dim);
    for (size_t token = 0; token < count; token++, source += token_bytes, target += stride) {
        if (!segment->is_int8) {
            memcpy(target, source, head_dim * sizeof(float));
            continue;
        }
        float scale;
        memcpy(&scale, source, sizeof scale);
        const int8_t *numbers = (const int8_t *)source + sizeof scale;
        for (size_t i = 0; i < head_dim; i++) target[i] = (float)numbers[i] * scale;
    }
}

/* Returns them as floats, one after the other: where they are, or in `room`. */
INLINE const float *read_states(
    const Segment *segment, const char *source, size_t head_dim, size_t count, float *room
) {
    if (!segment->is_int8) return (const float *)source;
    copy_states(segment, source, head_dim, count, head_dim, room);
    return room;
}
