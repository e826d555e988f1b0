/* Surprisals (-ln p of values) and quantiles of mixtures of Gaussians. Threads take readings from a shared counter. */
#include "abi.h"
#include "surprisal.h"

#define READINGS_PER_STEP 32 /* readings that a thread takes from the counter at once */
#define MASS_LIMIT 12.0f     /* the mass of a component farther than this many scales from its mean is neglected */
#define BISECTION_STEPS 30   /* each step halves the interval in which a quantile lies */

/* Advance the counter that all threads share by READINGS_PER_STEP readings, and return the index of the first one. */
INLINE int64_t take_readings(int64_t *next_reading) {
    return __atomic_fetch_add(next_reading, READINGS_PER_STEP, __ATOMIC_RELAXED);
}

/* Compute surprisals until no reading of the task is left; each thread calls this once. Return 0, or -1 if memory
 * cannot be allocated. */
int64_t compute_surprisals(const SurprisalTask *task) {
    size_t n = task->num_components, C = round_up(n, LANES);
    float *mixture = malloc(SURPRISAL_ROWS * C * sizeof *mixture);
    if (!mixture) return -1;
    for (int64_t from; (from = take_readings(task->next_reading)) < task->num_readings;)
        for (int64_t m = from; m < from + READINGS_PER_STEP && m < task->num_readings; m++) {
            memcpy(mixture, task->log_weights + m * n, n * sizeof *mixture);
            memcpy(mixture + C, task->means + m * n, n * sizeof *mixture);
            memcpy(mixture + 2 * C, task->scales + m * n, n * sizeof *mixture);
            Surprisal s = compute_surprisal(mixture, n, task->values[m]);
            task->surprisal[m] = s.value, task->minimum[m] = s.minimum;
            task->mean[m] = s.mean, task->variance[m] = s.variance;
        }
    free(mixture);
    return 0;
}

/* Return the standard normal distribution function of z (formula 7.1.26 of Abramowitz and Stegun, error 1e-7). */
INLINE float_vector normal_cdf(float_vector z) {
    float_vector x = vector_max(z, -z) * 0.70710678f /* |z| / sqrt(2) */, t = 1.0f / (1.0f + 0.3275911f * x);
    float_vector p = -0.7265760135f + t * 0.5307027145f;
    p = 0.7107068705f + t * p;
    p = -0.142248368f + t * p;
    float_vector tail = t * (0.127414796f + t * p);
    tail *= exponential(vector_max(-x * x, splat(-80.0f)));
    return select_lanes(z < splat(0), tail, 1.0f - tail);
}

/* Return the value below which a mixture has the probability `level`, by bisection between low and high.
 *
 * mixture: (3, C) rows with means, inverse scales and weights of the components. C is their number, rounded up to whole
 * vectors. */
static float find_quantile(const float *mixture, size_t C, float low, float high, float level) {
    const float *means = mixture, *inverse_scales = mixture + C, *weights = mixture + 2 * C;
    for (int i = 0; i < BISECTION_STEPS; i++) {
        float middle = 0.5f * (low + high);
        float_vector below = splat(0);
        for (size_t j = 0; j < C; j += LANES)
            below += load(weights + j) * normal_cdf((middle - load(means + j)) * load(inverse_scales + j));
        if (reduce_sum(below) < level) low = middle;
        else high = middle;
    }
    return 0.5f * (low + high);
}

/* Compute quantiles until no reading of the task is left; each thread calls this once. Return 0, or -1 if memory cannot
 * be allocated. */
int64_t compute_quantiles(const QuantileTask *task) {
    size_t n = task->num_components, C = round_up(n, LANES);
    float *mixture = malloc(3 * C * sizeof *mixture);
    if (!mixture) return -1;
    float *means = mixture, *inverse_scales = mixture + C, *weights = mixture + 2 * C;
    for (int64_t from; (from = take_readings(task->next_reading)) < task->num_readings;)
        for (int64_t m = from; m < from + READINGS_PER_STEP && m < task->num_readings; m++) {
            float low = INFINITY, high = -INFINITY; /* bounds of all quantiles */
            for (size_t j = 0; j < C; j++) {        /* the padding up to C repeats the first component, with weight 0 */
                size_t at = m * n + (j < n ? j : 0);
                float mean = task->means[at], scale = task->scales[at];
                low = fminf(low, mean - MASS_LIMIT * scale), high = fmaxf(high, mean + MASS_LIMIT * scale);
                means[j] = mean, inverse_scales[j] = 1.0f / scale;
                weights[j] = j < n ? expf(task->log_weights[at]) : 0.0f;
            }
            for (int64_t q = 0; q < task->num_levels; q++)
                task->quantiles[q * task->num_readings + m] = find_quantile(mixture, C, low, high, task->levels[q]);
        }
    free(mixture);
    return 0;
}
