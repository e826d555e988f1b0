/* What is asked of mixtures: how surprising they are, and their quantiles. A thread takes the next readings when it is
 * done. */
#include "mixture.h"

#define TAKEN 32 /* readings a thread takes at once */

typedef struct {
    const float *log_weights, *means, *scales; /* (M, components) */
    const float *values;                       /* (M) */
    float *surprisal, *least, *mean, *variance; /* (M): at the value; over the mixture itself */
    int64_t readings, components;
    int64_t *next;
} Surprise;

int64_t measure_surprise(const Surprise *s) {
    size_t n = s->components, C = whole(n, LANES);
    float *w = malloc(7 * C * sizeof *w);
    if (!w) return -1;
    for (int64_t from; (from = __atomic_fetch_add(s->next, TAKEN, __ATOMIC_RELAXED)) < s->readings;)
        for (int64_t m = from; m < from + TAKEN && m < s->readings; m++) {
            memcpy(w, s->log_weights + m * n, n * sizeof *w);
            memcpy(w + C, s->means + m * n, n * sizeof *w);
            memcpy(w + 2 * C, s->scales + m * n, n * sizeof *w);
            Surprisal found = surprisal(w, n, s->values[m]);
            s->surprisal[m] = found.value, s->least[m] = found.least;
            s->mean[m] = found.mean, s->variance[m] = found.variance;
        }
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
