/* The surprisal -ln p of a value under a mixture of Gaussians, and the moments of -ln p(V) for V drawn from it.
 *
 * The moments are computed by Gauss-Hermite quadrature with three nodes (values V) per component: its mean, and its
 * mean plus or minus sqrt(3) scales. C is the number of components, rounded up to whole vectors. */
#ifndef SURPRISAL_H
#define SURPRISAL_H
#include "simd.h"

#define NODE_VECTORS 4 /* vectors of quadrature nodes that are summed side by side */
#define LOG_SQRT_2PI 0.91893853f
#define SURPRISAL_ROWS 7 /* rows of C floats in the scratch memory of `compute_surprisal` */

/* The surprisal of a value, and the minimum, mean and variance of -ln p(V) for V drawn from the mixture. */
typedef struct {
    float value, minimum, mean, variance;
} Surprisal;

/* Return -ln p(value), where p is the density of a mixture.
 *
 * mixture: (3, C) rows with the components' log peaks (ln of the component's weight times its density at its mean),
 * means and inverse scales. The density is summed relative to its largest term, e^peak, to avoid underflow. */
static float surprisal_at(const float *mixture, size_t C, float value) {
    const float *log_peaks = mixture, *means = mixture + C, *inverse_scales = mixture + 2 * C;
    float_vector largest = splat(-INFINITY), total = splat(0);
    for (size_t j = 0; j < C; j += LANES) {
        float_vector z = (value - load(means + j)) * load(inverse_scales + j);
        largest = vector_max(largest, load(log_peaks + j) - 0.5f * z * z);
    }
    float peak = reduce_max(largest);
    for (size_t j = 0; j < C; j += LANES) {
        float_vector z = (value - load(means + j)) * load(inverse_scales + j);
        total += exponential(load(log_peaks + j) - 0.5f * z * z - peak);
    }
    return -peak - logarithm(splat(reduce_sum(total)))[0];
}

/* Compute -ln p at the three Gauss-Hermite nodes of each component: out (3, C).
 *
 * mixture: (3, C) rows as in `surprisal_at`. The density at a node is summed relative to that of the node's own
 * component (log_own), to avoid overflow. log_own is at least the highest peak minus 80: nodes with a smaller density
 * have practically no weight in the moments. */
static void surprisal_at_nodes(const float *mixture, size_t C, size_t num_components, float *out) {
    static const float node[3] = {-1.7320508f, 0, 1.7320508f}; /* in scales from the component's mean */
    const float *log_peaks = mixture, *means = mixture + C, *inverse_scales = mixture + 2 * C;
    float highest = -INFINITY;
    for (size_t j = 0; j < num_components; j++) highest = log_peaks[j] > highest ? log_peaks[j] : highest;
    /* Nodes are numbered like `out`: n = C * (index in `node`) + component. */
    for (size_t from = 0; from < 3 * C; from += NODE_VECTORS * LANES) {
        float_vector x[NODE_VECTORS], log_own[NODE_VECTORS], sums[NODE_VECTORS];
        for (int v = 0; v < NODE_VECTORS; v++) {
            size_t n = from + v * LANES < 3 * C ? from + v * LANES : 0, j = n % C; /* 0: not used after the last node */
            x[v] = load(means + j) + node[n / C] / load(inverse_scales + j);
            log_own[v] = vector_max(load(log_peaks + j) - 0.5f * node[n / C] * node[n / C], splat(highest - 80.0f));
            sums[v] = splat(0);
        }
        for (size_t j = 0; j < num_components; j++)
            for (int v = 0; v < NODE_VECTORS; v++) {
                float_vector z = (x[v] - means[j]) * inverse_scales[j];
                sums[v] += exponential(log_peaks[j] - log_own[v] - 0.5f * z * z);
            }
        for (int v = 0; v < NODE_VECTORS; v++)
            if (from + v * LANES < 3 * C)
                store(out + from + v * LANES, -log_own[v] - logarithm(vector_max(sums[v], splat(1e-37f))));
    }
}

/* Return the surprisal of a value under a mixture, and the moments of the surprisal.
 *
 * mixture: (SURPRISAL_ROWS, C), where C is the number of components rounded up to whole vectors. Its first three rows
 * hold log weights, means and scales; the other rows are scratch memory. All rows are overwritten: in place of log
 * weights and scales they then hold log peaks and inverse scales, as `surprisal_at` needs them. The padding up to C
 * repeats the first component, with the weight 0. */
static Surprisal compute_surprisal(float *mixture, size_t num_components, float value) {
    size_t C = round_up(num_components, LANES);
    float *log_weights = mixture, *log_peaks = mixture; /* the same row, before and after the conversion */
    float *scales = mixture + 2 * C, *inverse_scales = scales;
    float *weights = mixture + 3 * C, *at_nodes = mixture + 4 * C;
    for (size_t row = 0; row < 3; row++)
        for (size_t j = num_components; j < C; j++) mixture[row * C + j] = mixture[row * C];
    for (size_t j = 0; j < C; j += LANES) {
        float_vector scale = load(scales + j), log_weight = load(log_weights + j);
        store(weights + j, exponential(log_weight));
        store(log_peaks + j, log_weight - logarithm(scale) - LOG_SQRT_2PI);
        store(inverse_scales + j, 1.0f / scale);
    }
    surprisal_at_nodes(mixture, C, num_components, at_nodes);
    for (size_t j = num_components; j < C; j++) log_peaks[j] = -INFINITY, weights[j] = 0;
    float_vector minimum = splat(INFINITY), mean_sums = splat(0), variance = splat(0);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        /* weight of the component times the quadrature weight of the node: 1/6, 2/3, 1/6 */
        float_vector share = load(weights + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6);
        minimum = vector_min(minimum, load(at_nodes + n));
        mean_sums += share * load(at_nodes + n);
    }
    float mean = reduce_sum(mean_sums);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        float_vector share = load(weights + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6);
        float_vector deviation = load(at_nodes + n) - mean;
        variance += share * deviation * deviation;
    }
    /* -reduce_max(-v) is the minimum of all lanes */
    return (Surprisal){surprisal_at(mixture, C, value), -reduce_max(-minimum), mean, reduce_sum(variance)};
}
#endif
