/* The middle of a gated MLP, once for each width of registers: a file that includes this one says
   how many floats a register holds (WIDTH), and what its functions are called (GATE, GATE_BACK). */

#include "fused_body.h"
#include "gate.h"

/* The sigmoid: 1 / (1 + e^-gate), with a power that cannot overflow: e^gate below zero. */
INLINE Part share_of(Part gate) {
    const Bits is_negative = gate < 0.0f;
    const Part power = raise_e((Part)((Bits)gate | INT32_MIN));
    return (Part)(((Bits)power & is_negative) | ((Bits)spread(1.0f) & ~is_negative))
           / (1.0f + power);
}

INLINE Part gate_part(Part gate, Part up) { return gate * share_of(gate) * up; }

INLINE void turn_part_back(
    const float *gates, const float *ups, const float *grads, float *gate_grads, float *up_grads
) {
    const Part gate = load_part(gates), grad = load_part(grads), share = share_of(gate);
    const Part slope = share * multiply_add(gate, 1.0f - share, spread(1.0f));
    store_part(gate_grads, grad * load_part(ups) * slope);
    store_part(up_grads, grad * (gate * share));
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

/* See `GateBack`. */
void GATE_BACK(
    const float *gates, const float *ups, const float *grads, float *gate_grads, float *up_grads,
    size_t count
) {
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        turn_part_back(gates + i, ups + i, grads + i, gate_grads + i, up_grads + i);
    if (i == count) return;
    const size_t num_bytes = (count - i) * sizeof(float);
    float last_gates[WIDTH] = {0}, last_ups[WIDTH] = {0}, last_grads[WIDTH] = {0};
    memcpy(last_gates, gates + i, num_bytes);
    memcpy(last_ups, ups + i, num_bytes);
    memcpy(last_grads, grads + i, num_bytes);
    turn_part_back(last_gates, last_ups, last_grads, last_gates, last_ups);
    memcpy(gate_grads + i, last_gates, num_bytes);
    memcpy(up_grads + i, last_ups, num_bytes);
}
