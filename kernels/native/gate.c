/* What the middle of a gated MLP does: silu(gate) * up, and its gradient, in one pass each. The bits
   are the same on every processor, and whatever rows there are beside each other. */

#include "threads.h"

#define WIDTH 4
#define GATE gate_portable
#define GATE_BACK gate_back_portable
#include "gate_body.h"

typedef struct {
    Gate *gate;
    GateBack *back;
} Gates;

/* 0: portable, 1: AVX2, 2: AVX-512. NULL where the processor lacks it. */
static const Gates *find_gates(int32_t instruction_set) {
    static const Gates portable = {gate_portable, gate_back_portable};
    if (instruction_set == 0) return &portable;
#if defined(__x86_64__)
    static const Gates avx2 = {gate_avx2, gate_back_avx2};
    static const Gates avx512 = {gate_avx512, gate_back_avx512};
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("fma")) return NULL;
    if (instruction_set == 1 && __builtin_cpu_supports("avx2")) return &avx2;
    if (instruction_set == 2 && __builtin_cpu_supports("avx512f")) return &avx512;
#endif
    return NULL;
}

typedef struct {
    const float *gate_up;
    const float *grads; /* NULL on the way forth */
    float *result;
    size_t num_rows, num_columns, rows_per_task;
    const Gates *gates;
} Work;

static void gate_some(void *context, size_t index) {
    const Work *work = context;
    const size_t num_columns = work->num_columns;
    for (size_t i = 0; i < work->rows_per_task; i++) {
        const size_t row = index * work->rows_per_task + i;
        if (row >= work->num_rows) return;
        const float *gates = work->gate_up + 2 * row * num_columns, *ups = gates + num_columns;
        if (work->grads == NULL) {
            work->gates->gate(gates, ups, work->result + row * num_columns, num_columns);
            continue;
        }
        float *gate_grads = work->result + 2 * row * num_columns;
        work->gates->back(
            gates, ups, work->grads + row * num_columns, gate_grads, gate_grads + num_columns,
            num_columns);
    }
}

/* ---- What Python calls ------------------------------------------------------------------------ */

/* To be raised whenever a function below changes: Python compares it. */
int32_t shoal_gate_version(void) { return 2; }

int32_t shoal_gate_has(int32_t instruction_set) { return find_gates(instruction_set) != NULL; }

/* Numbers that are worth a thread's while. */
enum { NUMBERS_PER_TASK = 16384 };

/* For every row of `gate_up` [num_rows, 2 * num_columns], writes silu(gate) * up to `result`; or its
   gradients, as many as there are gates and ups, given those of the product in `grads`. The
   processor must have the instruction set. */
void shoal_gate_silu(
    const float *gate_up, const float *grads, float *result, int64_t num_rows, int64_t num_columns,
    int32_t instruction_set, int32_t num_threads
) {
    Work work = {
        .gate_up = gate_up,
        .grads = grads,
        .result = result,
        .num_rows = (size_t)num_rows,
        .num_columns = (size_t)num_columns,
        .rows_per_task = 1 + NUMBERS_PER_TASK / ((size_t)num_columns + 1),
        .gates = find_gates(instruction_set),
    };
    const size_t num_tasks = (work.num_rows + work.rows_per_task - 1) / work.rows_per_task;
    run_tasks(num_tasks, (size_t)num_threads, gate_some, &work);
}
