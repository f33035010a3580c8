/* The kernels of x86-64, in three instruction sets. Each multiplies a tile of rows by a panel of
   outputs; the number of rows is known to the compiler, so that the sums stay in registers. */

#include "int8_rows.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define AVXVNNI __attribute__((target("avx2,avxvnni")))
#define AVX2 __attribute__((target("avx2")))

/* Without it GCC keeps two copies of each sum and moves them through memory. */
#define STAY_IN_REGISTER(sum) __asm__("" : "+x"(sum))

/* The same for sums of 32 bits in a loop that is unrolled: there it would still copy each sum. */
#define ADD_IN_PLACE(sum, term) __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(term))

INLINE __m256i *at256(int32_t *target) { return (__m256i *)target; }

/* ---- AVX512-VNNI: 16 outputs a register, unsigned times signed bytes ----------------------- */

/* How far ahead of the multiplication one row's weights are asked for. */
enum { PREFETCH_BYTES = 2048 };

INLINE AVX512 void sum_avx512(
    const Product *product, size_t tile, size_t panel, const size_t num_rows, const size_t digits,
    Sums *result
) {
    const size_t num_groups = product->layer->num_groups;
    const uint8_t *weights = panel_weights(product, panel);
    const uint8_t *rows = tile_rows(product, tile);
    __m512i sums[MAX_TILE_ROWS][2];
    UNROLL for (size_t i = 0; i < num_rows * digits; i++)
        sums[i][0] = sums[i][1] = _mm512_setzero_si512();
    for (size_t group = 0; group < num_groups; group++) {
        const __m512i first = _mm512_loadu_si512(weights);
        const __m512i second = _mm512_loadu_si512(weights + 64);
        _mm_prefetch((const char *)weights + PREFETCH_BYTES, _MM_HINT_T0);
        _mm_prefetch((const char *)weights + PREFETCH_BYTES + 64, _MM_HINT_T0);
        UNROLL for (size_t i = 0; i < num_rows * digits; i++) {
            const __m512i numbers = _mm512_set1_epi32(load_int32(rows + 4 * i));
            sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], first, numbers);
            sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], second, numbers);
        }
        weights += PANEL * GROUP;
        rows += 4 * digits * num_rows;
    }
    UNROLL for (size_t i = 0; i < num_rows * digits; i++) {
        int32_t *target = i % digits ? result->high[i / digits] : result->low[i / digits];
        _mm512_storeu_si512(target, sums[i][0]);
        _mm512_storeu_si512(target + 16, sums[i][1]);
    }
}

#define CASE(rows, digits) \
    case rows: sum_avx512(product, tile, panel, rows, digits, &sums); break;

static AVX512 void multiply_one_avx512(const Product *product, size_t tile, size_t panel) {
    Sums sums;
    switch (rows_of_tile(product, tile)) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
    }
    finish_tile(product, tile, panel, &sums, ONE_DIGIT);
}

static AVX512 void multiply_two_avx512(const Product *product, size_t tile, size_t panel) {
    Sums sums;
    switch (rows_of_tile(product, tile)) {
        CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
    }
    finish_tile(product, tile, panel, &sums, TWO_DIGITS);
}
#undef CASE

static AVX512 void encode_one_avx512(const Product *product, size_t row) {
    encode_row(product, row, ONE_DIGIT);
}

static AVX512 void encode_two_avx512(const Product *product, size_t row) {
    encode_row(product, row, TWO_DIGITS);
}

const Kernel *kernels_avx512_vnni(void) {
    static const Kernel kernels[2] = {
        {12, 4, encode_one_avx512, multiply_one_avx512},
        {6, 8, encode_two_avx512, multiply_two_avx512},
    };
    __builtin_cpu_init();
    const int has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                    && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                    && __builtin_cpu_supports("avx512vnni");
    return has ? kernels : NULL;
}

/* With half as many registers of half the width, a panel does not fit beside several rows. It is
   taken in parts, a stretch of groups at a time, which stays in the first cache meanwhile. */
enum { GROUPS_PER_STRETCH = 64 };

/* ---- AVX-VNNI: the same with 8 outputs a register ------------------------------------------ */

INLINE AVXVNNI void add_stretch_avx_vnni(
    const uint8_t *rows, const uint8_t *weights, size_t num_groups, const size_t num_rows,
    const size_t digits, const size_t width, Sums *result, size_t start
) {
    __m256i sums[6][4];
    UNROLL for (size_t i = 0; i < num_rows * digits; i++)
        UNROLL for (size_t k = 0; k < width; k++) sums[i][k] = _mm256_setzero_si256();
    for (size_t group = 0; group < num_groups; group++) {
        __m256i loaded[4];
        UNROLL for (size_t k = 0; k < width; k++)
            loaded[k] = _mm256_loadu_si256((const __m256i *)weights + k);
        UNROLL for (size_t i = 0; i < num_rows * digits; i++) {
            const __m256i numbers = _mm256_set1_epi32(load_int32(rows + 4 * i));
            UNROLL for (size_t k = 0; k < width; k++) {
                __m256i sum = _mm256_dpbusd_avx_epi32(sums[i][k], loaded[k], numbers);
                STAY_IN_REGISTER(sum);
                sums[i][k] = sum;
            }
        }
        weights += PANEL * GROUP;
        rows += 4 * digits * num_rows;
    }
    UNROLL for (size_t i = 0; i < num_rows * digits; i++)
        UNROLL for (size_t k = 0; k < width; k++) {
            int32_t *target = i % digits ? result->high[i / digits] : result->low[i / digits];
            __m256i *total = at256(target + start) + k;
            _mm256_storeu_si256(total, _mm256_add_epi32(_mm256_loadu_si256(total), sums[i][k]));
        }
}

INLINE AVXVNNI void sum_avx_vnni(
    const Product *product, size_t tile, size_t panel, const size_t num_rows, const size_t digits,
    const size_t width, Sums *sums
) {
    const size_t num_groups = product->layer->num_groups;
    for (size_t group = 0; group < num_groups; group += GROUPS_PER_STRETCH)
        for (size_t start = 0; start < PANEL; start += 8 * width)
            add_stretch_avx_vnni(
                tile_rows(product, tile) + group * num_rows * digits * 4,
                panel_weights(product, panel) + (group * PANEL + start) * GROUP,
                min_size(GROUPS_PER_STRETCH, num_groups - group), num_rows, digits, width, sums,
                start);
}

static AVXVNNI void multiply_one_avx_vnni(const Product *product, size_t tile, size_t panel) {
    Sums sums = {0};
    switch (rows_of_tile(product, tile)) {
        case 1: sum_avx_vnni(product, tile, panel, 1, 1, 4, &sums); break;
        case 2: sum_avx_vnni(product, tile, panel, 2, 1, 4, &sums); break;
        case 3: sum_avx_vnni(product, tile, panel, 3, 1, 2, &sums); break;
        case 4: sum_avx_vnni(product, tile, panel, 4, 1, 2, &sums); break;
        case 5: sum_avx_vnni(product, tile, panel, 5, 1, 2, &sums); break;
        case 6: sum_avx_vnni(product, tile, panel, 6, 1, 2, &sums); break;
    }
    finish_tile(product, tile, panel, &sums, ONE_DIGIT);
}

static AVXVNNI void multiply_two_avx_vnni(const Product *product, size_t tile, size_t panel) {
    Sums sums = {0};
    switch (rows_of_tile(product, tile)) {
        case 1: sum_avx_vnni(product, tile, panel, 1, 2, 4, &sums); break;
        case 2: sum_avx_vnni(product, tile, panel, 2, 2, 2, &sums); break;
        case 3: sum_avx_vnni(product, tile, panel, 3, 2, 2, &sums); break;
    }
    finish_tile(product, tile, panel, &sums, TWO_DIGITS);
}

static AVXVNNI void encode_one_avx_vnni(const Product *product, size_t row) {
    encode_row(product, row, ONE_DIGIT);
}

static AVXVNNI void encode_two_avx_vnni(const Product *product, size_t row) {
    encode_row(product, row, TWO_DIGITS);
}

/* Asked of the processor: not every Clang that can compile for it knows its name. */
static int has_avx_vnni(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

const Kernel *kernels_avx_vnni(void) {
    static const Kernel kernels[2] = {
        {6, 4, encode_one_avx_vnni, multiply_one_avx_vnni},
        {3, 8, encode_two_avx_vnni, multiply_two_avx_vnni},
    };
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && has_avx_vnni() ? kernels : NULL;
}

/* ---- AVX2: bytes are widened and multiplied as int16 ------------------------------------------

   Its product of bytes saturates. Sums of int16 products are exact: a lane takes two of them per
   group, each at most 255 * 32639, so that a stretch of 64 (up to 128) stays below 2^31. Then the
   sums move on to memory, those of two digits as 256 * high + low. Four lanes of int16 make two of
   int32: a register holds two halves of the sums of four outputs. */

enum { HALVES = 2 * PANEL };

/* The next stretch is asked for while this one is multiplied. */
enum { STRETCH_BYTES = GROUPS_PER_STRETCH * PANEL * GROUP };

enum { AVX2_ROWS = 6 };

/* Those of one digit are all low. */
typedef struct {
    int32_t low[AVX2_ROWS][HALVES], high[AVX2_ROWS][HALVES];
} Halves;

INLINE AVX2 void add_stretch_avx2(
    const uint8_t *rows, const uint8_t *weights, size_t num_groups, const size_t groups_at_once,
    const size_t num_rows, const size_t width, const size_t digits, Halves *result, size_t start
) {
    __m256i sums[AVX2_ROWS][8];
    UNROLL for (size_t i = 0; i < num_rows; i++)
        UNROLL for (size_t k = 0; k < width; k++) sums[i][k] = _mm256_setzero_si256();
    for (size_t group = 0; group < num_groups; group += groups_at_once)
        UNROLL for (size_t part = 0; part < groups_at_once; part++) {
            __m256i wide[8];
            UNROLL for (size_t k = 0; k < width; k++)
                wide[k] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)weights + k));
            UNROLL for (size_t i = 0; i < num_rows; i++) {
                const __m256i numbers = _mm256_set1_epi64x(load_int64(rows + 8 * i));
                UNROLL for (size_t k = 0; k < width; k++)
                    ADD_IN_PLACE(sums[i][k], _mm256_madd_epi16(numbers, wide[k]));
            }
            _mm_prefetch((const char *)weights + STRETCH_BYTES, _MM_HINT_T0);
            if (width == 8) _mm_prefetch((const char *)weights + STRETCH_BYTES + 64, _MM_HINT_T0);
            weights += PANEL * GROUP;
            rows += 8 * num_rows;
        }
    UNROLL for (size_t i = 0; i < num_rows; i++)
        UNROLL for (size_t k = 0; k < width; k++) {
            __m256i *low = at256(result->low[i] + start) + k, rest = sums[i][k];
            if (digits == 2) {
                __m256i *high = at256(result->high[i] + start) + k;
                const __m256i whole = _mm256_srai_epi32(rest, 8);
                _mm256_storeu_si256(high, _mm256_add_epi32(_mm256_loadu_si256(high), whole));
                rest = _mm256_and_si256(rest, _mm256_set1_epi32(255));
            }
            _mm256_storeu_si256(low, _mm256_add_epi32(_mm256_loadu_si256(low), rest));
        }
}

/* Two groups at a time, and one that is left: fewer instructions beside those that count. */
#define STRETCH(num_rows, width, digits)                                                          \
    static AVX2 __attribute__((noinline)) void add_##num_rows##_rows_##digits##_avx2(             \
        const uint8_t *rows, const uint8_t *weights, size_t num_groups, Halves *result            \
    ) {                                                                                           \
        const size_t even = num_groups / 2 * 2;                                                   \
        for (size_t k = 0; k < 8; k += width)                                                     \
            add_stretch_avx2(                                                                     \
                rows, weights + 16 * k, even, 2, num_rows, width, digits, result, 8 * k);         \
        rows += even * 8 * num_rows, weights += even * PANEL * GROUP;                             \
        for (size_t k = 0; even < num_groups && k < 8; k += width)                                \
            add_stretch_avx2(rows, weights + 16 * k, 1, 1, num_rows, width, digits, result, 8 * k); \
    }
#define STRETCHES(digits)                                                                         \
    STRETCH(1, 8, digits) STRETCH(2, 4, digits) STRETCH(3, 2, digits)                             \
    STRETCH(4, 2, digits) STRETCH(5, 2, digits) STRETCH(6, 2, digits)
STRETCHES(1) STRETCHES(2)
#undef STRETCHES
#undef STRETCH

typedef void (*AddRows)(const uint8_t *, const uint8_t *, size_t, Halves *);

/* The sums of 32 outputs from their halves. */
INLINE AVX2 void join_halves(const int32_t *halves, int32_t *sums) {
    for (size_t i = 0; i < PANEL; i += 8) {
        const __m256i *pairs = (const __m256i *)(halves + 2 * i);
        const __m256i joined =
            _mm256_hadd_epi32(_mm256_loadu_si256(pairs), _mm256_loadu_si256(pairs + 1));
        _mm256_storeu_si256(at256(sums + i), _mm256_permute4x64_epi64(joined, 0xd8));
    }
}

INLINE AVX2 void multiply_avx2(
    const Product *product, size_t tile, size_t panel, const AddRows *add_rows, const size_t digits
) {
    const size_t num_groups = product->layer->num_groups, num_rows = rows_of_tile(product, tile);
    Halves halves;
    memset(halves.low, 0, num_rows * sizeof halves.low[0]);
    if (digits == 2) memset(halves.high, 0, num_rows * sizeof halves.high[0]);
    for (size_t start = 0; start < num_groups; start += GROUPS_PER_STRETCH)
        add_rows[num_rows - 1](
            tile_rows(product, tile) + start * num_rows * 8,
            panel_weights(product, panel) + start * PANEL * GROUP,
            min_size(GROUPS_PER_STRETCH, num_groups - start), &halves);
    Sums sums;
    for (size_t row = 0; row < num_rows; row++) {
        join_halves(halves.low[row], sums.low[row]);
        if (digits == 2) join_halves(halves.high[row], sums.high[row]);
    }
    finish_tile(product, tile, panel, &sums, digits == 2 ? WHOLE_NUMBERS : ONE_DIGIT);
}

static AVX2 void multiply_one_avx2(const Product *product, size_t tile, size_t panel) {
    static const AddRows add_rows[AVX2_ROWS] = {
        add_1_rows_1_avx2, add_2_rows_1_avx2, add_3_rows_1_avx2,
        add_4_rows_1_avx2, add_5_rows_1_avx2, add_6_rows_1_avx2,
    };
    multiply_avx2(product, tile, panel, add_rows, 1);
}

static AVX2 void multiply_two_avx2(const Product *product, size_t tile, size_t panel) {
    static const AddRows add_rows[AVX2_ROWS] = {
        add_1_rows_2_avx2, add_2_rows_2_avx2, add_3_rows_2_avx2,
        add_4_rows_2_avx2, add_5_rows_2_avx2, add_6_rows_2_avx2,
    };
    multiply_avx2(product, tile, panel, add_rows, 2);
}

static AVX2 void encode_avx2(const Product *product, size_t row) {
    encode_row(product, row, WHOLE_NUMBERS);
}

const Kernel *kernels_avx2(void) {
    /* int16 holds one digit and two alike. */
    static const Kernel kernels[2] = {
        {AVX2_ROWS, 8, encode_avx2, multiply_one_avx2},
        {AVX2_ROWS, 8, encode_avx2, multiply_two_avx2},
    };
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") ? kernels : NULL;
}

#else

const Kernel *kernels_avx2(void) { return NULL; }
const Kernel *kernels_avx_vnni(void) { return NULL; }
const Kernel *kernels_avx512_vnni(void) { return NULL; }

#endif
