/* The surprisal -ln p of a value under a mixture of Gaussians, and the moments of -ln p(V) for V drawn from it.
 *
 * The moments are computed by Gauss-Hermite quadrature with three nodes (values V) per component. C is the number of
 * components, rounded up to whole vectors. */
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

/* Return -ln p(value).
 *
 * w: (4, C) for each component: ln of the density at its mean times its weight, mean, inverse scale, weight. */
static float surprisal_at(const float *w, size_t C, float value) {
    f32x16 largest = splat(-INFINITY), total = splat(0);
    for (size_t j = 0; j < C; j += LANES) {
        f32x16 z = (value - load(w + C + j)) * load(w + 2 * C + j);
        largest = vector_max(largest, load(w + j) - 0.5f * z * z);
    }
    float peak = reduce_max(largest);
    for (size_t j = 0; j < C; j += LANES) {
        f32x16 z = (value - load(w + C + j)) * load(w + 2 * C + j);
        total += exponential(load(w + j) - 0.5f * z * z - peak);
    }
    return -peak - logarithm(splat(reduce_sum(total)))[0];
}

/* Compute -ln p at the three Gauss-Hermite nodes of each component: out (3, C). w: as in `surprisal_at`.
 *
 * The density at a node is summed relative to that of the node's own component, to avoid overflow. Nodes whose density
 * is e^80 times smaller than the highest peak have practically no weight in the moments. */
static void surprisal_at_nodes(const float *w, size_t C, size_t num_components, float *out) {
    static const float node[3] = {-1.7320508f, 0, 1.7320508f};
    float highest = -INFINITY;
    for (size_t j = 0; j < num_components; j++) highest = w[j] > highest ? w[j] : highest;
    for (size_t from = 0; from < 3 * C; from += NODE_VECTORS * LANES) {
        f32x16 x[NODE_VECTORS], own[NODE_VECTORS], s[NODE_VECTORS];
        for (int v = 0; v < NODE_VECTORS; v++) {
            size_t n = from + v * LANES < 3 * C ? from + v * LANES : 0, j = n % C;
            x[v] = load(w + C + j) + node[n / C] / load(w + 2 * C + j);
            own[v] = vector_max(load(w + j) - 0.5f * node[n / C] * node[n / C], splat(highest - 80.0f));
            s[v] = splat(0);
        }
        for (size_t j = 0; j < num_components; j++)
            for (int v = 0; v < NODE_VECTORS; v++) {
                f32x16 z = (x[v] - w[C + j]) * w[2 * C + j];
                s[v] += exponential(w[j] - own[v] - 0.5f * z * z);
            }
        for (int v = 0; v < NODE_VECTORS; v++)
            if (from + v * LANES < 3 * C)
                store(out + from + v * LANES, -own[v] - logarithm(vector_max(s[v], splat(1e-37f))));
    }
}

/* Return the surprisal of a value under a mixture, and the moments of the surprisal.
 *
 * w: (SURPRISAL_ROWS, C), C being the number of components rounded up to whole vectors. Its first three rows hold log
 * weights, means and scales; the other rows are scratch. All rows are overwritten. The padding of C repeats the first
 * component with no weight. */
static Surprisal compute_surprisal(float *w, size_t num_components, float value) {
    size_t C = round_up(num_components, LANES);
    float *at_nodes = w + 4 * C;
    for (size_t row = 0; row < 3; row++)
        for (size_t j = num_components; j < C; j++) w[row * C + j] = w[row * C];
    for (size_t j = 0; j < C; j += LANES) {
        f32x16 scale = load(w + 2 * C + j), log_weight = load(w + j);
        store(w + 3 * C + j, exponential(log_weight));
        store(w + j, log_weight - logarithm(scale) - LOG_SQRT_2PI);
        store(w + 2 * C + j, 1.0f / scale);
    }
    surprisal_at_nodes(w, C, num_components, at_nodes);
    for (size_t j = num_components; j < C; j++) w[j] = -INFINITY, w[3 * C + j] = 0;
    f32x16 minimum = splat(INFINITY), mean_sums = splat(0), variance = splat(0);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        /* weight of the component times the quadrature weight of the node: 1/6, 2/3, 1/6 */
        f32x16 share = load(w + 3 * C + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6);
        minimum = vector_min(minimum, load(at_nodes + n));
        mean_sums += share * load(at_nodes + n);
    }
    float mean = reduce_sum(mean_sums);
    for (size_t n = 0; n < 3 * C; n += LANES) {
        f32x16 share = load(w + 3 * C + n % C) * (n / C == 1 ? 2.0f / 3 : 1.0f / 6);
        f32x16 deviation = load(at_nodes + n) - mean;
        variance += share * deviation * deviation;
    }
    return (Surprisal){surprisal_at(w, C, value), -reduce_max(-minimum), mean, reduce_sum(variance)};
}
#endif
