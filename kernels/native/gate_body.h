/* The middle of a gated MLP, once for each width of registers: a file that includes this one says
   how many floats a register holds (WIDTH), and how its `Gate` is called (GATE). */

#include "fused_body.h"
#include "gate.h"

/* gate / (1 + e^-gate) * up, with a power that cannot overflow: e^gate below zero. */
INLINE Part gate_part(Part gate, Part up) {
    const Bits is_negative = gate < 0.0f;
    const Part power = raise_e((Part)((Bits)gate | INT32_MIN));
    const Part share =
        (Part)(((Bits)power & is_negative) | ((Bits)spread(1.0f) & ~is_negative)) / (1.0f + power);
    return gate * share * up;
}

/* See `Gate`. */
void GATE(const float *gates, const float *ups, float *result, size_t count) {
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        store_part(result + i, gate_part(load_part(gates + i), load_part(ups + i)));
    if (i == count) return;
    const size_t num_bytes = (count - i) * sizeof(float);
    float last_gates[WIDTH] = {0}, last_ups[WIDTH] = {0}, last[WIDTH];
    memcpy(last_gates, gates + i, num_bytes);
    memcpy(last_ups, ups + i, num_bytes);
    store_part(last, gate_part(load_part(last_gates), load_part(last_ups)));
    memcpy(result + i, last, num_bytes);
}
