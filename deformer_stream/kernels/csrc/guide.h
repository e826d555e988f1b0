/* What Gaussians expect of the next reading. */
#ifndef GUIDE_H
#define GUIDE_H
#include "tokens.h"

typedef double v8 __attribute__((vector_size(64)));
INLINE v8 load8(const double *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store8(double *p, v8 v) { memcpy(p, &v, sizeof v); }

/* Rows are kept as floats, half the memory to fetch, and computed in doubles from what is kept: the factor is then that
 * of a matrix which differs from the covariances by one part in 10^7. */
typedef float f8 __attribute__((vector_size(32)));
INLINE v8 wide8(const float *p) { f8 v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, v8); }
INLINE v8 keep8(float *p, v8 v) {
    f8 kept = __builtin_convertvector(v, f8);
    memcpy(p, &kept, sizeof kept);
    return __builtin_convertvector(kept, v8);
}

typedef struct {
    int64_t components, padded, features; /* padded: a multiple of 8, of which some weigh nothing */
    const double *log_weights, *means, *covariances; /* (padded), (D, padded), (D, D, padded) */
    const int64_t *page_of, *place_in; /* (readings) where in a record's pages the row of its k-th reading is */
    const int64_t *place;    /* (F) which of the D features a feature is, -1 for what they know nothing of */
} Gaussians;

/* The row of reading k: k entries of the Cholesky factor, then these, each a vector of all components; the likelihood is
 * of doubles and takes two. */
enum { INVERSE, WHITENED, FEATURE, LIKELIHOOD, ENTRIES = LIKELIHOOD + 2 };

INLINE float *row_of(const Gaussians *g, const Work *work, const int64_t *pages, int64_t k) {
    return (float *)(work->pool + pages[g->page_of[k]] * work->page_bytes) + g->place_in[k] * g->padded;
}

/* w = (L^-1 c), also into the new row, for the covariances c of a feature with those before: row by row, all components
 * side by side. */
static void whiten(const Gaussians *g, const Work *work, const int64_t *pages, int64_t k, const double *covariance,
                   float *to, double *w) {
    int64_t C = g->padded;
    for (int64_t i = 0; i < k; i++) {
        const float *row = row_of(g, work, pages, i), *end = row + i * C;
        int64_t feature = (int64_t)end[FEATURE * C];
        for (int64_t b = 0; b < C; b += 8) {
            v8 s[4] = {{0}, {0}, {0}, {0}};
            int64_t j = 0;
            if (feature >= 0) {
                for (; j + 4 <= i; j += 4)
                    for (int64_t u = 0; u < 4; u++) s[u] += wide8(row + (j + u) * C + b) * load8(w + (j + u) * C + b);
                for (; j < i; j++) s[0] += wide8(row + j * C + b) * load8(w + j * C + b);
                s[0] = load8(covariance + feature * C + b) - ((s[0] + s[1]) + (s[2] + s[3]));
            }
            store8(w + i * C + b, keep8(to + i * C + b, s[0] * wide8(end + INVERSE * C + b)));
        }
    }
}

/* Weights of the components, (C,) logarithms up to a constant, as they are told. */
static void weigh(int64_t C, const double *now, float *weight) {
    double top = -INFINITY, total = 0;
    for (int64_t c = 0; c < C; c++) top = now[c] > top ? now[c] : top;
    for (int64_t c = 0; c < C; c++) total += exp(now[c] - top);
    for (int64_t c = 0; c < C; c++) weight[c] = (float)(now[c] - top - log(total));
}

/* Reading m is the k-th of its record. out: of what is expected, negative where nobody asks. */
static void expect(const Gaussians *g, const Work *work, const int64_t *pages, int64_t k, int64_t m, int64_t out,
                   double *w) {
    int64_t C = g->padded, feature = g->place[work->code[m]];
    float *row = row_of(g, work, pages, k), *end = row + k * C;
    float *weight = work->log_weight + out * C, *mean = work->mean + out * C, *scale = work->scale + out * C;
    const double *covariance = g->covariances + (feature < 0 ? 0 : feature) * g->features * C;
    double before[C], after[C], value = fmin(fmax(work->value[m], -VALUE_REACH), VALUE_REACH);
    if (feature < 0) memset(w, 0, k * C * sizeof *w), memset(row, 0, k * C * sizeof *row);
    else whiten(g, work, pages, k, covariance, row, w);
    if (k) memcpy(before, row_of(g, work, pages, k - 1) + (k - 1 + LIKELIHOOD) * C, sizeof before);
    else memset(before, 0, sizeof before);
    for (int64_t b = 0; b < C; b += 8) {
        v8 centre = {0}, variance = {0};
        for (int64_t i = 0; i < k; i++) {
            v8 x = load8(w + i * C + b);
            centre += x * wide8(row_of(g, work, pages, i) + (i + WHITENED) * C + b);
            variance -= x * x;
        }
        if (feature >= 0) {
            centre += load8(g->means + feature * C + b);
            variance += load8(covariance + feature * C + b);
        }
        for (int64_t c = b; c < b + 8; c++) {
            double wide = sqrt(fmax(variance[c - b], 1e-18)), z = 0;
            after[c] = before[c];
            if (feature >= 0) {
                z = (value - centre[c - b]) / wide;
                after[c] -= 0.5 * z * z + log(wide);
            } else wide = 1;
            if (out >= 0) {
                mean[c] = feature < 0 ? 0 : (float)centre[c - b];
                scale[c] = (float)wide;
            }
            end[INVERSE * C + c] = (float)(1 / wide);
            end[WHITENED * C + c] = (float)z;
            end[FEATURE * C + c] = (float)feature;
        }
    }
    memcpy(end + LIKELIHOOD * C, after, sizeof after);
    for (int64_t c = 0; c < C; c++) before[c] += g->log_weights[c];
    if (out >= 0) weigh(C, before, weight);
}

/* Ask for the rows of a record: the next record's come from memory while this one is worked on. */
static void fetch(const Gaussians *g, const Work *work, int64_t r) {
    const int64_t *pages = work->pages + r * work->columns;
    for (int64_t k = 0; k < work->start[r]; k++) {
        const char *row = (const char *)row_of(g, work, pages, k);
        for (int64_t i = 0; i < (k + ENTRIES) * g->padded * 4; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Of some records' readings. w: (most readings of a record, padded). */
static void expect_all(const Gaussians *g, const Work *work, int64_t from, int64_t to, double *w) {
    for (int64_t r = from; r < to; r++) {
        if (r + 1 < to) fetch(g, work, r + 1);
        for (int64_t m = work->first[r]; m < work->first[r + 1]; m++) {
            int64_t out = work->asked[r] + m - reading_of(work, r, 0);
            int64_t k = work->place ? work->place[m] : work->start[r] + m - work->first[r];
            expect(g, work, work->pages + r * work->columns, k, m, out < work->asked[r] ? -1 : out, w);
        }
    }
}

/* What the network is told, (asked, 3, components): numbers of a size that suits it. */
static void tell_guide(const Gaussians *g, const Work *work, int64_t from, int64_t to, float *told) {
    for (int64_t i = from; i < to; i++)
        for (int64_t r = 0; r < work->asked[i + 1] - work->asked[i]; r++, told += 3 * g->components) {
            int64_t at = (work->asked[i] + r) * g->padded, C = g->components;
            int knows = g->place[work->code[reading_of(work, i, r)]] >= 0;
            for (int64_t c = 0; c < C; c++) {
                told[c] = knows ? 0.25f * fmaxf(work->log_weight[at + c], -8) : 0;
                told[C + c] = knows ? 0.5f * fminf(fmaxf(work->mean[at + c], -8), 8) : 0;
                told[2 * C + c] = knows ? 0.5f * logf(work->scale[at + c]) : 0;
            }
        }
}
#endif
