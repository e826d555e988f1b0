/* Upper tails of Gamma distributions. */
#ifndef GAMMA_TAIL_H
#define GAMMA_TAIL_H
#include "simd.h"

/* Return ln Q(a, x), the log of the probability that a Gamma(a, 1) variable exceeds x, to a relative error of about
 * `tolerance`.
 *
 * For x < a + 1 it sums the series of 1 - Q (Digital Library of Mathematical Functions, 8.11.4). Otherwise it evaluates
 * the continued fraction 8.9.2 by Lentz's algorithm; the fraction is finite if a is an integer. */
INLINE double log_gamma_sf(double a, double x, double tolerance) {
    if (!(x > 0)) return 0;
    int sign;
    double log_factor = a * log(x) - x - lgamma_r(a, &sign);
    if (x < a + 1) {
        double term = 1 / a, total = term;
        for (double n = a + 1; term > tolerance * total; n++) total += term *= x / n;
        return log1p(-fmin(exp(log_factor) * total, 1 - 1e-16));
    }
    /* Names as in Lentz's algorithm: h is the value so far, which each step multiplies by c d. */
    double b = x + 1 - a, c = 1e300, d = 1 / b, h = d, step = 0;
    for (int i = 1; fabs(step - 1) > tolerance && i < 1000; i++) {
        double t = i * (a - i);
        b += 2;
        d = 1 / (t * d + b);
        c = b + t / c;
        h *= step = c * d;
    }
    return log_factor + log(h);
}
#endif
