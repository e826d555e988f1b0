/* Exact conditionals of the Gaussian prior, a mixture of Gaussians over the continuous features.
 *
 * A conditional is the distribution of a reading's value given the values before it: for each component the mean, the
 * scale, and the posterior weight. They follow from the Cholesky factor L of the covariance matrix of a record's
 * readings, in arrival order. Each reading adds one row to L. The rows stay in the KV cache, so a new reading costs one
 * triangular solve. All of this is done for each component; a vector holds one number per component.
 *
 * Letters: D is the number of features of the prior, C (or "padded") that of its components, rounded up to whole
 * vectors, and k the number of readings before the new one. The diagonal entry of a row of L is its pivot. */
#ifndef GAUSSIAN_PRIOR_H
#define GAUSSIAN_PRIOR_H
#include "token_encoder.h"

/* Vectors of doubles, as wide as those of floats. PRIOR_LANES is a multiple of their number of lanes. */
#define DOUBLE_LANES (LANES / 2)
typedef double double_vector __attribute__((vector_size(8 * DOUBLE_LANES)));
typedef int64_t long_vector __attribute__((vector_size(8 * DOUBLE_LANES)));

/* Read or write a vector of doubles at an address of any alignment. */
INLINE double_vector load_doubles(const double *p) { double_vector v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_doubles(double *p, double_vector v) { memcpy(p, &v, sizeof v); }

/* Return the address of the row of a record's reading k (from 0): k vectors of L, then ROW_EXTRA_VECTORS more.
 *
 * Rows are doubles. If a sensor nearly repeats another one, a variance of 10^-6 remains. Floats would change it by some
 * percent, and a reading of the other sensor that is 3 standard deviations off would change ln p by up to 10 nats.
 *
 * pages: the record's row of the page table. */
INLINE double *factor_row(const Prior *prior, const Batch *batch, const int64_t *pages, int64_t k) {
    char *page = batch->page_pool + pages[prior->row_page[k]] * batch->page_bytes;
    return (double *)page + prior->row_place[k] * prior->padded_components;
}

/* Solve L w = c by forward substitution, where c are the covariances of the new reading with the k earlier ones. The
 * solution w is the new row of L, without its pivot.
 *
 * covariance: (D, padded) covariances of the new feature with all features. w: output, (k, padded). The sum over j has
 * four parts, so that additions do not wait for each other. An earlier reading whose feature the prior lacks has no
 * covariance with others, so its entry of w is 0. */
static void solve_factor(const Prior *prior, const Batch *batch, const int64_t *pages, int64_t k,
                         const double *covariance, double *w) {
    int64_t C = prior->padded_components;
    for (int64_t i = 0; i < k; i++) {
        const double *row = factor_row(prior, batch, pages, i), *extra = row + i * C;
        int64_t feature = (int64_t)extra[ROW_FEATURE * C];
        for (int64_t b = 0; b < C; b += DOUBLE_LANES) {
            double_vector s[4] = {{0}, {0}, {0}, {0}};
            int64_t j = 0;
            if (feature >= 0) { /* s[0] becomes c_i minus the sum of L_ij w_j over j < i */
                for (; j + 4 <= i; j += 4)
                    for (int64_t u = 0; u < 4; u++)
                        s[u] += load_doubles(row + (j + u) * C + b) * load_doubles(w + (j + u) * C + b);
                for (; j < i; j++) s[0] += load_doubles(row + j * C + b) * load_doubles(w + j * C + b);
                s[0] = load_doubles(covariance + feature * C + b) - ((s[0] + s[1]) + (s[2] + s[3]));
            }
            store_doubles(w + i * C + b, s[0] * load_doubles(extra + ROW_INVERSE_PIVOT * C + b));
        }
    }
}

/* Subtract a constant from the logarithms of C weights, so that the weights sum to one, and write them to `out`. */
static void normalise_log_weights(int64_t C, const double *log_weights, float *out) {
    double largest = -INFINITY, total = 0;
    for (int64_t c = 0; c < C; c++) largest = log_weights[c] > largest ? log_weights[c] : largest;
    for (int64_t c = 0; c < C; c++) total += exp(log_weights[c] - largest);
    for (int64_t c = 0; c < C; c++) out[c] = (float)(log_weights[c] - largest - log(total));
}

/* Add the row of a reading to the Cholesky factor L, and compute the prior's conditional of its value.
 *
 * m: index of the reading in the batch. k: its index in the record. query: index of the conditional among the outputs,
 * negative if it is not requested. A feature that the prior lacks gets a row of zeros, and leaves the posterior weights
 * unchanged.
 *
 * For each component, let w be the new row of L, v the variance of the feature, and r_i the whitened residuals of the
 * earlier readings: (value - conditional mean) / conditional scale. Then the conditional mean is the feature's mean
 * plus the sum of w_i r_i, and the conditional variance is v minus the sum of w_i^2. Its root, the scale, is also the
 * pivot. The log-likelihood of the readings so far gives the posterior weights. */
static void add_reading(const Prior *prior, const Batch *batch, const int64_t *pages, int64_t k, int64_t m,
                        int64_t query) {
    int64_t C = prior->padded_components, feature = prior->column_by_code[batch->features[m]];
    double *w = factor_row(prior, batch, pages, k), *extra = w + k * C;
    float *log_weights = batch->prior_log_weights + query * C;
    float *means = batch->prior_means + query * C, *scales = batch->prior_scales + query * C;
    const double *covariance = prior->covariances + (feature < 0 ? 0 : feature) * prior->num_features * C;
    /* An extreme value must not distort the conditionals of the readings after it. */
    double value = fmin(fmax(batch->values[m], -MAX_CONDITIONING_VALUE), MAX_CONDITIONING_VALUE);
    double likelihood_before[C], likelihood[C];
    if (feature < 0) memset(w, 0, k * C * sizeof *w);
    else solve_factor(prior, batch, pages, k, covariance, w);
    if (k) {
        const double *last_row = factor_row(prior, batch, pages, k - 1);
        memcpy(likelihood_before, last_row + (k - 1 + ROW_LIKELIHOOD) * C, sizeof likelihood_before);
    } else memset(likelihood_before, 0, sizeof likelihood_before);
    for (int64_t b = 0; b < C; b += DOUBLE_LANES) {
        double_vector mean = {0}, variance = {0};
        for (int64_t i = 0; i < k; i++) {
            double_vector x = load_doubles(w + i * C + b);
            mean += x * load_doubles(factor_row(prior, batch, pages, i) + (i + ROW_RESIDUAL) * C + b);
            variance -= x * x;
        }
        if (feature >= 0) {
            mean += load_doubles(prior->means + feature * C + b);
            variance += load_doubles(covariance + feature * C + b);
        }
        for (int64_t c = b; c < b + DOUBLE_LANES; c++) {
            double scale = sqrt(fmax(variance[c - b], 1e-18)), residual = 0;
            likelihood[c] = likelihood_before[c];
            if (feature >= 0) {
                residual = (value - mean[c - b]) / scale;
                likelihood[c] -= 0.5 * residual * residual + log(scale);
            } else scale = 1; /* with the pivot 1 and the residual 0, the row has no effect on later readings */
            if (query >= 0) {
                means[c] = feature < 0 ? 0 : (float)mean[c - b];
                scales[c] = (float)scale;
            }
            extra[ROW_INVERSE_PIVOT * C + c] = 1 / scale;
            extra[ROW_RESIDUAL * C + c] = residual;
            extra[ROW_FEATURE * C + c] = (double)feature;
        }
    }
    memcpy(extra + ROW_LIKELIHOOD * C, likelihood, sizeof likelihood);
    /* The posterior weights given the readings before this one: ln(prior weight) + log-likelihood, up to a constant. */
    for (int64_t c = 0; c < C; c++) likelihood_before[c] += prior->log_weights[c];
    if (query >= 0) normalise_log_weights(C, likelihood_before, log_weights);
}

/* Prefetch the cached rows of L of a record, so that they are in the processor's cache when the record is computed. */
static void prefetch_rows(const Prior *prior, const Batch *batch, int64_t record) {
    const int64_t *pages = batch->page_table + record * batch->page_table_columns;
    for (int64_t k = 0; k < batch->num_cached[record]; k++) {
        const char *row = (const char *)factor_row(prior, batch, pages, k);
        int64_t bytes = (k + ROW_EXTRA_VECTORS) * prior->padded_components * (int64_t)sizeof(double);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Compute the prior's conditionals of the scored readings of the records from `from` to before `to`. */
static void compute_prior(const Prior *prior, const Batch *batch, int64_t from, int64_t to) {
    for (int64_t r = from; r < to; r++) {
        const int64_t *pages = batch->page_table + r * batch->page_table_columns;
        if (r + 1 < to) prefetch_rows(prior, batch, r + 1);
        for (int64_t m = batch->offsets[r]; m < batch->offsets[r + 1]; m++) {
            /* Readings before the first scored one extend the factor, but need no conditional. */
            int64_t query = batch->query_offsets[r] + m - query_place(batch, r, 0);
            int64_t k = batch->depths ? batch->depths[m] : batch->num_cached[r] + m - batch->offsets[r];
            add_reading(prior, batch, pages, k, m, query < batch->query_offsets[r] ? -1 : query);
        }
    }
}
#endif
