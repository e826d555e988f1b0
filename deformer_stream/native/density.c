/* What Gaussians expect of the next reading, and how surprising a mixture is on the whole. */
#include "lanes.h"

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

/* Readings of R records, ragged, and the pages where their rows are. A thread takes the next unit when it is done. */
typedef struct {
    int64_t components, features; /* components: a multiple of 8, of which some may weigh nothing */
    const double *log_weights, *means, *covariances; /* (components), (F, components), (F, F, components) */
    const int64_t *page_of, *place_in; /* (readings) where in a record's pages the row of its k-th reading is */
    const int64_t *feature;  /* (M) place among the features of the covariances, -1 for what they know nothing of */
    const double *value;     /* (M) */
    float *log_weight, *mean, *scale; /* (Z, components) of what is asked for; the weights not yet normalised */
    const int64_t *first, *asked, *start; /* (R + 1), (R + 1), (R), as in blocks.c */
    const int64_t *place;    /* (M) or NULL, as in blocks.c */
    const int64_t *pages;    /* (R, columns) */
    int64_t columns;
    char *pool;
    int64_t page_bytes;
    const int64_t *unit;     /* (units + 1) */
    int64_t units;
    int64_t *next;
} Expectation;

/* The row of reading k: k entries of the Cholesky factor, then these, each a vector of all components; the likelihood is
 * of doubles and takes two. */
enum { INVERSE, WHITENED, FEATURE, LIKELIHOOD, ENTRIES = LIKELIHOOD + 2 };

INLINE float *row_of(const Expectation *e, const int64_t *pages, int64_t k) {
    return (float *)(e->pool + pages[e->page_of[k]] * e->page_bytes) + e->place_in[k] * e->components;
}

/* w = (L^-1 c), also into the new row, for the covariances c of a feature with those before: row by row, all components
 * side by side. */
static void whiten(const Expectation *e, const int64_t *pages, int64_t k, const double *covariance, float *to,
                   double *w) {
    int64_t C = e->components;
    for (int64_t i = 0; i < k; i++) {
        const float *row = row_of(e, pages, i), *end = row + i * C;
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

/* out: of what is expected, negative where nobody asks. */
static void expect(const Expectation *e, const int64_t *pages, int64_t k, int64_t m, int64_t out, double *w) {
    int64_t C = e->components, feature = e->feature[m];
    float *row = row_of(e, pages, k), *end = row + k * C;
    double before[C], after[C], top = -INFINITY;
    float *weight = e->log_weight + out * C, *mean = e->mean + out * C, *scale = e->scale + out * C;
    const double *covariance = e->covariances + (feature < 0 ? 0 : feature) * e->features * C;
    if (feature < 0) memset(w, 0, k * C * sizeof *w), memset(row, 0, k * C * sizeof *row);
    else whiten(e, pages, k, covariance, row, w);
    if (k) memcpy(before, row_of(e, pages, k - 1) + (k - 1 + LIKELIHOOD) * C, sizeof before);
    else memset(before, 0, sizeof before);
    for (int64_t c = 0; c < C; c++) {
        double now = e->log_weights[c] + before[c];
        top = now > top ? now : top;
    }
    for (int64_t b = 0; b < C; b += 8) {
        v8 centre = {0}, variance = {0};
        for (int64_t i = 0; i < k; i++) {
            v8 x = load8(w + i * C + b);
            centre += x * wide8(row_of(e, pages, i) + (i + WHITENED) * C + b);
            variance -= x * x;
        }
        if (feature >= 0) {
            centre += load8(e->means + feature * C + b);
            variance += load8(covariance + feature * C + b);
        }
        for (int64_t c = b; c < b + 8; c++) {
            double wide = sqrt(fmax(variance[c - b], 1e-18)), z = 0;
            after[c] = before[c];
            if (feature >= 0) {
                z = (e->value[m] - centre[c - b]) / wide;
                after[c] -= 0.5 * z * z + log(wide);
            } else wide = 1;
            if (out >= 0) {
                weight[c] = (float)(e->log_weights[c] + before[c] - top);
                mean[c] = feature < 0 ? 0 : (float)centre[c - b];
                scale[c] = (float)wide;
            }
            end[INVERSE * C + c] = (float)(1 / wide);
            end[WHITENED * C + c] = (float)z;
            end[FEATURE * C + c] = (float)feature;
        }
    }
    memcpy(end + LIKELIHOOD * C, after, sizeof after);
}

/* Ask for the rows of a record: the next record's come from memory while this one is worked on. */
static void fetch(const Expectation *e, int64_t r) {
    const int64_t *pages = e->pages + r * e->columns;
    for (int64_t k = 0; k < e->start[r]; k++) {
        const char *row = (const char *)row_of(e, pages, k);
        for (int64_t i = 0; i < (k + ENTRIES) * e->components * 4; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
}

int64_t expect_readings(const Expectation *e) {
    int64_t most = 1;
    for (int64_t r = 0; r < e->unit[e->units]; r++) {
        int64_t n = e->start[r] + e->first[r + 1] - e->first[r];
        most = n > most ? n : most;
    }
    double *w = malloc(most * e->components * sizeof *w);
    if (!w) return -1;
    for (int64_t u; (u = __atomic_fetch_add(e->next, 1, __ATOMIC_RELAXED)) < e->units;)
        for (int64_t r = e->unit[u]; r < e->unit[u + 1]; r++) {
            if (r + 1 < e->unit[u + 1]) fetch(e, r + 1);
            for (int64_t m = e->first[r]; m < e->first[r + 1]; m++) {
                int64_t out = e->asked[r + 1] - (e->first[r + 1] - m);
                expect(e, e->pages + r * e->columns, e->place ? e->place[m] : e->start[r] + m - e->first[r], m,
                       out < e->asked[r] ? -1 : out, w);
            }
        }
    free(w);
    return 0;
}

typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *values;                       /* (M) */
    float *surprisal, *least, *mean, *variance; /* (M): at the value; over the mixture itself */
    int64_t readings, components;
    int64_t *next;
} Surprise;

#define TAKEN 32   /* readings a thread takes at once */
#define TOGETHER 4 /* vectors of nodes summed side by side */
#define LOG_SQRT_2PI 0.91893853f

/* -ln p at the value, by the largest component; w: (4, C) heights, means, inverse scales, weights. */
static float at_value(const float *w, size_t C, float value) {
    v16 top = all(-INFINITY), total = all(0);
    for (size_t j = 0; j < C; j += LANES) {
        v16 z = (value - load(w + C + j)) * load(w + 2 * C + j);
        top = larger(top, load(w + j) - 0.5f * z * z);
    }
    float peak = largest(top);
    for (size_t j = 0; j < C; j += LANES) {
        v16 z = (value - load(w + C + j)) * load(w + 2 * C + j);
        total += exponential(load(w + j) - 0.5f * z * z - peak);
    }
    return -peak - logarithm(all(sum(total)))[0];
}

/* -ln p at the Gauss-Hermite nodes of each component, (3, C), relative to the density of the component itself there:
 * that is within reach of the whole, or so much below the highest that its weight is nothing. */
static void at_nodes(const float *w, size_t C, size_t components, float *out) {
    static const float node[3] = {-1.7320508f, 0, 1.7320508f};
    float highest = -INFINITY;
    for (size_t j = 0; j < components; j++) highest = w[j] > highest ? w[j] : highest;
    for (size_t from = 0; from < 3 * C; from += TOGETHER * LANES) {
        v16 x[TOGETHER], own[TOGETHER], s[TOGETHER];
        for (int v = 0; v < TOGETHER; v++) {
            size_t n = from + v * LANES < 3 * C ? from + v * LANES : 0, j = n % C;
            x[v] = load(w + C + j) + node[n / C] / load(w + 2 * C + j);
            own[v] = larger(load(w + j) - 0.5f * node[n / C] * node[n / C], all(highest - 80.0f));
            s[v] = all(0);
        }
        for (size_t j = 0; j < components; j++)
            for (int v = 0; v < TOGETHER; v++) {
                v16 z = (x[v] - w[C + j]) * w[2 * C + j];
                s[v] += exponential(w[j] - own[v] - 0.5f * z * z);
            }
        for (int v = 0; v < TOGETHER; v++)
            if (from + v * LANES < 3 * C) store(out + from + v * LANES, -own[v] - logarithm(larger(s[v], all(1e-37f))));
    }
}

static void surprise_of(const Surprise *s, size_t m, size_t C, float *w, float *at) {
    size_t components = s->components;
    const float *log_weights = s->log_weights + m * components, *scales = s->scales + m * components;
    const float *means = s->means + m * components;
    for (size_t j = 0; j < C; j++) { /* lanes beyond the last component repeat the first, with no weight */
        size_t from = j < components ? j : 0;
        w[j] = log_weights[from], w[C + j] = means[from], w[2 * C + j] = scales[from];
    }
    for (size_t j = 0; j < C; j += LANES) {
        v16 scale = load(w + 2 * C + j), weight = load(w + j);
        store(w + 3 * C + j, exponential(weight));
        store(w + j, weight - logarithm(scale) - LOG_SQRT_2PI);
        store(w + 2 * C + j, 1.0f / scale);
    }
    at_nodes(w, C, components, at);
    for (size_t j = components; j < C; j++) w[j] = -INFINITY, w[3 * C + j] = 0;
    s->surprisal[m] = at_value(w, C, s->values[m]);
    v16 least = all(INFINITY), mean = all(0), variance = all(0);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        v16 share = load(w + 3 * C + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6);
        least = smaller(least, load(at + n));
        mean += share * load(at + n);
    }
    float centre = sum(mean);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        v16 share = load(w + 3 * C + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6), off = load(at + n) - centre;
        variance += share * off * off;
    }
    s->least[m] = -largest(-least), s->mean[m] = centre, s->variance[m] = sum(variance);
}

int64_t measure_surprise(const Surprise *s) {
    size_t C = (s->components + LANES - 1) / LANES * LANES;
    float *w = malloc(7 * C * sizeof *w);
    if (!w) return -1;
    for (int64_t from; (from = __atomic_fetch_add(s->next, TAKEN, __ATOMIC_RELAXED)) < s->readings;)
        for (int64_t m = from; m < from + TAKEN && m < s->readings; m++) surprise_of(s, m, C, w, w + 4 * C);
    free(w);
    return 0;
}

typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *levels;                       /* (quantiles) */
    float *out;                                /* (quantiles, M) */
    int64_t readings, components, quantiles;
    int64_t *next;
} Quantiles;

#define REACH 12.0f /* scales beyond which no mass is looked for */
#define HALVINGS 30

/* The normal distribution function (Abramowitz and Stegun 7.1.26, to 1e-7). */
INLINE v16 normal_cdf(v16 z) {
    v16 x = larger(z, -z) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * x);
    v16 tail = t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
    tail *= exponential(larger(-x * x, all(-80.0f)));
    return chosen(z < all(0), tail, 1.0f - tail);
}

/* Where the mixture has so much mass below, by bisection; w: (3, C) means, inverse scales, weights. */
static float quantile(const float *w, size_t C, float low, float high, float level) {
    for (int i = 0; i < HALVINGS; i++) {
        float middle = 0.5f * (low + high);
        v16 below = all(0);
        for (size_t j = 0; j < C; j += LANES)
            below += load(w + 2 * C + j) * normal_cdf((middle - load(w + j)) * load(w + C + j));
        if (sum(below) < level) low = middle;
        else high = middle;
    }
    return 0.5f * (low + high);
}

int64_t find_quantiles(const Quantiles *s) {
    size_t components = s->components, C = (components + LANES - 1) / LANES * LANES;
    float *w = malloc(3 * C * sizeof *w);
    if (!w) return -1;
    for (int64_t from; (from = __atomic_fetch_add(s->next, TAKEN, __ATOMIC_RELAXED)) < s->readings;)
        for (int64_t m = from; m < from + TAKEN && m < s->readings; m++) {
            float low = INFINITY, high = -INFINITY;
            for (size_t j = 0; j < C; j++) { /* lanes beyond the last component repeat the first, with no weight */
                size_t at = m * components + (j < components ? j : 0);
                float mean = s->means[at], scale = s->scales[at];
                low = fminf(low, mean - REACH * scale), high = fmaxf(high, mean + REACH * scale);
                w[j] = mean, w[C + j] = 1.0f / scale, w[2 * C + j] = j < components ? expf(s->log_weights[at]) : 0.0f;
            }
            for (int64_t q = 0; q < s->quantiles; q++)
                s->out[q * s->readings + m] = quantile(w, C, low, high, s->levels[q]);
        }
    free(w);
    return 0;
}
