/* Root mean square normalization. Sums are taken in sixteen lanes and added up like a tree, so that
   a row's result depends on the row alone. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES = 16 };

static float sum_squares(const float *row, size_t num_columns) {
    float sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= num_columns; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) sums[lane] += row[i + lane] * row[i + lane];
    for (size_t lane = 0; i + lane < num_columns; lane++)
        sums[lane] += row[i + lane] * row[i + lane];
    for (size_t width = LANES / 2; width > 0; width /= 2)
        for (size_t lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}

/* To be raised whenever the function below changes: Python compares it. */
int32_t shoal_norm_version(void) { return 1; }

/* Writes every row of `hidden` [num_rows, num_columns], divided by its root mean square and
   multiplied by `weight`, to `result`. */
void shoal_norm_rms(
    const float *restrict hidden, const float *restrict weight, float *restrict result,
    int64_t num_rows, int64_t num_columns, float eps
) {
    const size_t columns = (size_t)num_columns;
    for (size_t row = 0; row < (size_t)num_rows; row++) {
        const float *source = hidden + row * columns;
        float *target = result + row * columns;
        const float factor = 1.0f / sqrtf(sum_squares(source, columns) / (float)columns + eps);
        for (size_t i = 0; i < columns; i++) target[i] = source[i] * factor * weight[i];
    }
}
