/* New readings on their way through the network: R records, one after the other, M readings, of which Z are asked for. */
#ifndef READINGS_H
#define READINGS_H
#include "products.h"

typedef struct {
    const struct Network *network;
    const int64_t *code;     /* (M) features */
    const float *value;      /* (M) normalised */
    const int64_t *first;    /* (R + 1) where a record's readings begin */
    const int64_t *asked;    /* (R + 1) where those begin that are asked for: a record's last ones */
    const int64_t *start;    /* (R) readings that were there before */
    const int64_t *place;    /* (M) or NULL: how many readings a reading sees, after which its own goes into the pages */
    const int64_t *pages;    /* (R, columns) */
    char *pool;
    float *log_weight, *mean, *scale; /* (Z, padded) what the guide expects, where there is one */
    float *hidden;           /* (Z, d) what comes out at tokens z; or NULL, and readings are judged: */
    float *judged;           /* (3, Z) ln p, ln of the p-value, excess */
    int64_t *next;           /* the unit to be taken next */
    int64_t records, columns, page_bytes, unit_tokens;
} Work;

/* Which of all readings is the r-th one that is asked for of a record, counted from its first. */
INLINE int64_t reading_of(const Work *work, int64_t record, int64_t r) {
    return work->first[record + 1] - (work->asked[record + 1] - work->asked[record]) + r;
}

/* A map of floats, whatever the layers' factors are rounded to. */
typedef struct {
    int64_t inputs, columns; /* columns: up to whole ones, of which some may weigh nothing */
    const float *weights, *bias; /* (columns / 32, inputs, 32), (columns) */
} Map;

/* out = x weights + bias, or out += that. x: (rows, inputs), out: (rows, columns), each so far apart. Every number is
 * summed up in one order, whatever stands beside it. */
INLINE void map_tile(const Map *map, const float *x, size_t stride, size_t rows, int adds, size_t n, float *out,
                     size_t to) {
    const float *weights = map->weights + n * map->inputs;
    v16 c[ROWS][2];
    for (size_t r = 0; r < rows; r++) c[r][0] = load(map->bias + n), c[r][1] = load(map->bias + n + LANES);
    for (size_t k = 0; k < (size_t)map->inputs; k++, weights += COLUMNS)
#pragma GCC unroll 12
        for (size_t r = 0; r < rows; r++) {
            c[r][0] += x[r * stride + k] * load(weights);
            c[r][1] += x[r * stride + k] * load(weights + LANES);
        }
    for (size_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            float *place = out + r * to + n + half * LANES;
            store(place, adds ? load(place) + c[r][half] : c[r][half]);
        }
}
static void mapped(const Map *map, const float *x, size_t stride, size_t rows, int adds, float *out, size_t to) {
    for (size_t n = 0; n < (size_t)map->columns; n += COLUMNS) {
        size_t m = 0;
        for (; m + ROWS <= rows; m += ROWS) map_tile(map, x + m * stride, stride, ROWS, adds, n, out + m * to, to);
        for (; ROWS > 4 && m + 4 <= rows; m += 4) map_tile(map, x + m * stride, stride, 4, adds, n, out + m * to, to);
        for (; m < rows; m++) map_tile(map, x + m * stride, stride, 1, adds, n, out + m * to, to);
    }
}
#endif
