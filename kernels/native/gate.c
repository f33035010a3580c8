/* What the middle of a gated MLP does: silu(gate) * up, in one pass. The bits are the same on every
   processor, and whatever rows there are beside each other. */

#include "threads.h"

#define WIDTH 4
#define GATE gate_portable
#include "gate_body.h"

/* 0: portable, 1: AVX2, 2: AVX-512. NULL where the processor lacks it. */
static Gate *find_gate(int32_t instruction_set) {
    if (instruction_set == 0) return gate_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("fma")) return NULL;
    if (instruction_set == 1 && __builtin_cpu_supports("avx2")) return gate_avx2;
    if (instruction_set == 2 && __builtin_cpu_supports("avx512f")) return gate_avx512;
#endif
    return NULL;
}

typedef struct {
    const float *gate_up;
    float *result;
    size_t num_rows, num_columns, rows_per_task;
    Gate *gate;
} Work;

static void gate_some(void *context, size_t index) {
    const Work *work = context;
    const size_t num_columns = work->num_columns;
    for (size_t i = 0; i < work->rows_per_task; i++) {
        const size_t row = index * work->rows_per_task + i;
        if (row >= work->num_rows) return;
        const float *gates = work->gate_up + 2 * row * num_columns;
        work->gate(gates, gates + num_columns, work->result + row * num_columns, num_columns);
    }
}

/* ---- What Python calls ------------------------------------------------------------------------ */

/* To be raised whenever a function below changes: Python compares it. */
int32_t shoal_gate_version(void) { return 1; }

int32_t shoal_gate_has(int32_t instruction_set) { return find_gate(instruction_set) != NULL; }

/* Numbers that are worth a thread's while. */
enum { NUMBERS_PER_TASK = 16384 };

/* Writes silu(gate) * up for every row of `gate_up` [num_rows, 2 * num_columns] to `result`, with
   an instruction set that the processor must have. */
void shoal_gate_silu(
    const float *gate_up, float *result, int64_t num_rows, int64_t num_columns,
    int32_t instruction_set, int32_t num_threads
) {
    Work work = {
        .gate_up = gate_up,
        .result = result,
        .num_rows = (size_t)num_rows,
        .num_columns = (size_t)num_columns,
        .rows_per_task = 1 + NUMBERS_PER_TASK / ((size_t)num_columns + 1),
        .gate = find_gate(instruction_set),
    };
    const size_t num_tasks = (work.num_rows + work.rows_per_task - 1) / work.rows_per_task;
    run_tasks(num_tasks, (size_t)num_threads, gate_some, &work);
}
