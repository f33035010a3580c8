/* Shared by the instruction sets: what the middle of a gated MLP does. */

#ifndef SHOAL_GATE_H
#define SHOAL_GATE_H

#include <stddef.h>

/* Writes silu(gate) * up, number by number. */
typedef void Gate(const float *gates, const float *ups, float *result, size_t count);

/* Writes the gradients of gates and ups, given those of silu(gate) * up. */
typedef void GateBack(
    const float *gates, const float *ups, const float *grads, float *gate_grads, float *up_grads,
    size_t count
);

Gate gate_portable, gate_avx2, gate_avx512;
GateBack gate_back_portable, gate_back_avx2, gate_back_avx512;

#endif
