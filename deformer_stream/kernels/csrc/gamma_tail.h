/* Upper tails of Gamma distributions. */
#ifndef GAMMA_TAIL_H
#define GAMMA_TAIL_H
#include "simd.h"

/* Return ln Q(a, x), where Q is the probability that a Gamma(a, 1) variable exceeds x. The relative error of Q is about
 * `tolerance`.
 *
 * Formulas are those of the Digital Library of Mathematical Functions. For x < a + 1 the series 8.11.4 of 1 - Q is
 * summed. Otherwise the continued fraction 8.9.2 is evaluated by Lentz's algorithm; it is finite if a is an integer. */
INLINE double log_gamma_sf(double a, double x, double tolerance) {
    if (!(x > 0)) return 0;
    int sign;
    double log_factor = a * log(x) - x - lgamma_r(a, &sign); /* ln of the factor before the series and the fraction */
    if (x < a + 1) {
        double term = 1 / a, total = term;
        for (double n = a + 1; term > tolerance * total; n++) total += term *= x / n;
        return log1p(-fmin(exp(log_factor) * total, 1 - 1e-16)); /* rounding must not make Q 0 */
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
