/* Linear maps in float32, for encoder and output head. The Transformer layers use gemm.h, in float32 or bfloat16. */
#ifndef LINEAR_MAP_H
#define LINEAR_MAP_H
#include "abi.h"

/* Compute 32 outputs of a linear map, from number `column` on, for `num_rows` (a compile-time constant) inputs.
 *
 * x, out: the first row of inputs and of outputs. A row begins `stride` floats (of inputs) or `out_stride` floats (of
 * outputs) after the one before it. is_added: whether to add the result to `out` instead of overwriting it. */
INLINE void apply_map_tile(const LinearMap *map, const float *x, size_t stride, int num_rows, int is_added,
                           size_t column, float *out, size_t out_stride) {
    for (size_t first = column; first < column + COLUMNS; first += TILE_VECTORS * LANES) {
        const float *weights = map->weights + column * map->inputs + (first - column);
        float_vector c[ROWS][TILE_VECTORS];
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < TILE_VECTORS; v++) c[r][v] = load(map->bias + first + v * LANES);
        for (size_t k = 0; k < (size_t)map->inputs; k++, weights += COLUMNS)
#pragma GCC unroll 24
            for (int i = 0; i < num_rows * TILE_VECTORS; i++) {
                int r = row_of_sum(i, num_rows), v = vector_of_sum(i, num_rows);
                c[r][v] += x[r * stride + k] * load(weights + v * LANES);
            }
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < TILE_VECTORS; v++) {
                float *place = out + r * out_stride + first + v * LANES;
                store(place, is_added ? load(place) + c[r][v] : c[r][v]);
            }
    }
}

/* Compute out = x W + bias, or out += x W + bias if `is_added`.
 *
 * x: (num_rows, inputs); a row begins `stride` floats after the one before it. out: (num_rows, columns), with the
 * distance `out_stride`. Each sum has one fixed order, so the result of a row does not depend on the other rows. ROWS
 * rows are computed at once as long as there are so many, then four at once, then single rows. */
static void apply_map(const LinearMap *map, const float *x, size_t stride, size_t num_rows, int is_added, float *out,
                      size_t out_stride) {
    for (size_t n = 0; n < (size_t)map->columns; n += COLUMNS) {
        size_t m = 0;
        for (; m + ROWS <= num_rows; m += ROWS)
            apply_map_tile(map, x + m * stride, stride, ROWS, is_added, n, out + m * out_stride, out_stride);
        for (; ROWS > 4 && m + 4 <= num_rows; m += 4)
            apply_map_tile(map, x + m * stride, stride, 4, is_added, n, out + m * out_stride, out_stride);
        for (; m < num_rows; m++)
            apply_map_tile(map, x + m * stride, stride, 1, is_added, n, out + m * out_stride, out_stride);
    }
}
#endif
