/* Arithmetic with fused multiplication, once for each width of registers: a file that includes this
   one says how many floats a register holds (WIDTH). A product and its addition are rounded once,
   on every processor. */

#include "attention_body.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

/* a * b + c, rounded once. */
INLINE Part multiply_add(Part a, Part b, Part c) {
#if WIDTH == 16
    return _mm512_fmadd_ps(a, b, c);
#elif WIDTH == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    for (size_t i = 0; i < WIDTH; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE Part spread(float number) {
#if WIDTH == 16
    return _mm512_set1_ps(number);
#elif WIDTH == 8
    return _mm256_set1_ps(number);
#elif defined(__aarch64__)
    return vdupq_n_f32(number);
#else
    return (Part){number, number, number, number};
#endif
}

/* e to the power of numbers that are not positive, to about 1e-7 of the result: zero below -87,
   and no number of no number. */
INLINE Part raise_e(Part x) {
    const Part rounder = spread(12582912.0f); /* leaves whole numbers in the low bits */
    const Part shifted = multiply_add(x, spread(1.44269504f), rounder);
    const Part power = shifted - rounder;
    Part rest = multiply_add(power, spread(-0.693359375f), x);
    rest = multiply_add(power, spread(2.12194440e-4f), rest);
    Part sum = multiply_add(rest, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
    sum = multiply_add(sum, rest, spread(8.3334519073e-3f));
    sum = multiply_add(sum, rest, spread(4.1665795894e-2f));
    sum = multiply_add(sum, rest, spread(1.6666665459e-1f));
    sum = multiply_add(sum, rest, spread(5.0000001201e-1f));
    sum = multiply_add(sum, rest * rest, rest) + 1.0f;
    /* Unsigned: below -87 this overflows, and is not used. */
    const Bits raised = (Bits)((Words)sum + (((Words)shifted - (Words)rounder) << 23));
    return (Part)((raised & (x >= -87.0f)) | ((Bits)x & (x != x)));
}
