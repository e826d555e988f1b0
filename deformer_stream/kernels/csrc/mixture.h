/* How surprising a mixture of Gaussians is: at a value, and on the whole. */
#ifndef MIXTURE_H
#define MIXTURE_H
#include "lanes.h"

#define TOGETHER 4 /* vectors of nodes summed side by side */
#define LOG_SQRT_2PI 0.91893853f

/* Of one mixture: −ln p at the value; least value, mean and variance of −ln p(V), V drawn from it. */
typedef struct {
    float value, least, mean, variance;
} Surprisal;

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

/* w: (7, C), its first rows, (C, components), what is known of it: logarithms of weights, means, scales. Lanes beyond the
 * last component repeat the first, with no weight. */
static Surprisal surprisal(float *w, size_t components, float value) {
    size_t C = whole(components, LANES);
    float *at = w + 4 * C;
    for (size_t row = 0; row < 3; row++)
        for (size_t j = components; j < C; j++) w[row * C + j] = w[row * C];
    for (size_t j = 0; j < C; j += LANES) {
        v16 scale = load(w + 2 * C + j), weight = load(w + j);
        store(w + 3 * C + j, exponential(weight));
        store(w + j, weight - logarithm(scale) - LOG_SQRT_2PI);
        store(w + 2 * C + j, 1.0f / scale);
    }
    at_nodes(w, C, components, at);
    for (size_t j = components; j < C; j++) w[j] = -INFINITY, w[3 * C + j] = 0;
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
    return (Surprisal){at_value(w, C, value), -largest(-least), centre, sum(variance)};
}
#endif
