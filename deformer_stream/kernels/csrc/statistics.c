/* Running statistics of records, from reading to reading: `advance` of conformal.py, which is the definition, without
 * padding. */
#include "gamma.h"

#define TEMPER 0.8   /* as in conformal.py */
#define EXACT 1e-15

/* What a record carries, `RUNNING` in records.py. */
typedef struct {
    int64_t scored;
    double total, least, peak, log_likelihood, excess, p_value;
} Running;

typedef struct {
    const int64_t *slot, *first;    /* (R), (R + 1) where a record's readings begin */
    const double *surprises;        /* (3, M) ln p, ln of the p-value, excess */
    const char *scored, *decided;   /* (M) or NULL, where all are */
    Running *running;               /* of all slots */
    double *out;                    /* (3, M) ln p, NaN where it is not scored; its sum; running statistic */
    int64_t records;
} Readings;

/* B_k, by series where 1 - (1 - p)^k would cancel. */
static double sidak(int64_t count, double least) {
    if (least < -25) return -least - log(count);
    return -log(-expm1(count * log1p(-exp(fmin(least, -1e-12)))));
}

void advance(const Readings *all) {
    int64_t M = all->first[all->records];
    for (int64_t i = 0; i < all->records; i++) {
        Running r = all->running[all->slot[i]];
        for (int64_t m = all->first[i]; m < all->first[i + 1]; m++) {
            const double *said = all->surprises + m;
            int scored = !all->scored || all->scored[m];
            if (scored) {
                double log_p = TEMPER * fmin(said[M], 0);
                r.scored++;
                r.total -= log_p, r.least = fmin(r.least, log_p);
                r.log_likelihood += said[0], r.excess += said[2 * M];
            }
            if (r.scored && (!all->decided || all->decided[m]))
                r.peak = fmax(r.peak, fmax(-log_gamma_sf(r.scored, r.total, EXACT), sidak(r.scored, r.least)));
            all->out[m] = scored ? said[0] : NAN;
            all->out[M + m] = r.log_likelihood, all->out[2 * M + m] = r.peak;
        }
        all->running[all->slot[i]] = r;
    }
}
