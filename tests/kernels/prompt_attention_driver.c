/* Attends with prompts, or with tokens one by one, of many shapes on every instruction set, over
   caches of floats and of integers. Arrays are as large as they have to be and no larger: built
   with the address sanitizer, it ends at the first byte out of place. Results must be the same
   bits in two parts, on other instruction sets and threads. Prints a digest of all of them. */

#include "../../kernels/native/attention.h"
#include "digest.h"

#include <string.h>

typedef int32_t Attention(const Shape *, const Segment *, int64_t, int64_t, const float *, float *,
                          int32_t, int32_t);
int32_t shoal_prompt_attention_has(int32_t instruction_set);
Attention shoal_prompt_attention_attend, shoal_attention_attend;

static Attention *attention;
static int64_t is_int8;

static unsigned state = 1;

static float draw(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1u << 23) - 1.0f;
}

static float *allocate(size_t count) {
    float *numbers = malloc(count * sizeof(float));
    if (numbers == NULL) exit(2);
    for (size_t i = 0; i < count; i++) numbers[i] = draw();
    return numbers;
}

static size_t count_state_bytes(size_t head_dim) {
    return is_int8 ? 4 + (head_dim + 3) / 4 * 4 : 4 * head_dim;
}

/* Keys and values, as many bytes as they take. */
static char *allocate_cache(size_t num_states, size_t head_dim) {
    if (!is_int8) return (char *)allocate(num_states * head_dim);
    const size_t state_bytes = count_state_bytes(head_dim);
    char *cache = malloc(num_states * state_bytes);
    if (cache == NULL) exit(2);
    for (size_t i = 0; i < num_states * state_bytes; i++) cache[i] = (char)(int8_t)(draw() * 127.0f);
    for (size_t i = 0; i < num_states; i++) {
        const float scale = 0.01f;
        memcpy(cache + i * state_bytes, &scale, sizeof scale);
    }
    return cache;
}

/* Attends from `token` on with `count` tokens of one row. */
static void attend(const Shape *shape, Segment segment, int64_t token, int64_t count,
                   const float *fused, float *result, int set, int threads) {
    const int64_t width = (shape->num_heads + 2 * shape->num_groups) * shape->head_dim;
    segment.position += token;
    segment.num_tokens = count;
    segment.cos += token * segment.rotary_dim;
    segment.sin += token * segment.rotary_dim;
    if (attention(shape, &segment, 1, 0, fused + token * width,
                  result + token * shape->num_heads * shape->head_dim, set, threads))
        exit(2);
}

static int check_shape(int64_t heads, int64_t groups, int64_t head_dim, int64_t position,
                       int64_t num_tokens, int64_t window) {
    const int64_t rotary_dim = head_dim / 2 * 2, capacity = position + num_tokens;
    float *norms = allocate((size_t)((heads + groups) * head_dim));
    float *cos = allocate((size_t)(num_tokens * rotary_dim));
    float *sin = allocate((size_t)(num_tokens * rotary_dim));
    char *cache = allocate_cache((size_t)(2 * groups * capacity), (size_t)head_dim);
    float *fused = allocate((size_t)(num_tokens * (heads + 2 * groups) * head_dim));
    const size_t size = (size_t)(num_tokens * heads * head_dim);
    float *expected = allocate(size), *result = allocate(size);
    const Shape shape = {heads, groups, head_dim, window, 0.125f, 1e-5f,
                         position % 2 ? norms : NULL};
    const Segment segment = {cache, cos, sin, rotary_dim, 0, capacity, 0, 1, num_tokens, position,
                             is_int8};
    attend(&shape, segment, 0, num_tokens, fused, expected, 0, 1);
    digest_bytes(expected, size * sizeof(float));
    digest_bytes(cache, (size_t)(2 * groups * capacity) * count_state_bytes((size_t)head_dim));
    int is_wrong = 0;
    for (int set = 0; set < 3; set++)
        for (int threads = 1; shoal_prompt_attention_has(set) && threads <= 3; threads += 2) {
            attend(&shape, segment, 0, num_tokens, fused, result, set, threads);
            is_wrong |= memcmp(result, expected, size * sizeof(float));
            attend(&shape, segment, 0, num_tokens / 3, fused, result, set, threads);
            attend(&shape, segment, num_tokens / 3, num_tokens - num_tokens / 3, fused, result,
                   set, threads);
            is_wrong |= memcmp(result, expected, size * sizeof(float));
        }
    free(norms), free(cos), free(sin), free(cache), free(fused), free(expected), free(result);
    if (is_wrong)
        printf("%d heads, %d groups of %d, %d tokens at %d, window %d%s\n", (int)heads,
               (int)groups, (int)head_dim, (int)num_tokens, (int)position, (int)window,
               is_int8 ? ", int8" : "");
    return is_wrong != 0;
}

static int check_shapes(char **arguments) {
    static const int64_t head_dims[] = {1, 2, 15, 33, 64, 1024};
    static const int64_t positions[] = {0, 63, 130};
    static const int64_t counts[] = {0, 1, 65};
    int num_wrong = 0;
    for (size_t d = 0; d < sizeof head_dims / sizeof *head_dims; d++)
        for (size_t p = 0; p < sizeof positions / sizeof *positions; p++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                for (int64_t window = 0; window < 90; window += 44) {
                    if (is_chosen(arguments))
                        num_wrong +=
                            check_shape(2, 2, head_dims[d], positions[p], counts[c], window);
                    if (head_dims[d] < 100 && is_chosen(arguments))
                        num_wrong +=
                            check_shape(7, 1, head_dims[d], positions[p], counts[c], window);
                }
    return num_wrong;
}

int main(int count, char **arguments) {
    (void)count;
    int num_wrong = 0;
    for (is_int8 = 0; is_int8 < 2; is_int8++) {
        attention = shoal_prompt_attention_attend;
        num_wrong += check_shapes(arguments);
        attention = shoal_attention_attend;
        num_wrong += check_shapes(arguments);
    }
    print_digest();
    return num_wrong != 0;
}
