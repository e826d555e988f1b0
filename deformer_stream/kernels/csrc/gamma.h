/* The tail of Gamma laws. */
#ifndef GAMMA_H
#define GAMMA_H
#include "lanes.h"

/* ln Q(a, x) of a Gamma(a, 1) law, relative error about `exact`: by the series of 1 − Q or by Lentz's continued fraction,
 * whichever is the quicker (DLMF 8.11.4, 8.9.2). The fraction ends by itself for a whole number a. */
INLINE double log_gamma_sf(double a, double x, double exact) {
    if (!(x > 0)) return 0;
    int sign;
    double factor = a * log(x) - x - lgamma_r(a, &sign);
    if (x < a + 1) {
        double term = 1 / a, total = term;
        for (double n = a + 1; term > exact * total; n++) total += term *= x / n;
        return log1p(-fmin(exp(factor) * total, 1 - 1e-16));
    }
    double b = x + 1 - a, c = 1e300, d = 1 / b, h = d, step = 0;
    for (int i = 1; fabs(step - 1) > exact && i < 1000; i++) {
        double t = i * (a - i);
        b += 2;
        d = 1 / (t * d + b);
        c = b + t / c;
        h *= step = c * d;
    }
    return factor + log(h);
}
#endif
