/* Conditionals of the Gaussian process prior of irregular readings and of wide records, by Vecchia's approximation.
 *
 * A reading is conditioned on its neighbors: K earlier readings of its context. model/gaussian_process.py describes the
 * process and the choice of the neighbors, and is the reference. The choice costs time that is linear in the number of
 * readings of the context. The rest is cubic in K.
 *
 * Letters: F is the number of features of the schema, Q that of the time scales, K that of the neighbors. */
#ifndef GAUSSIAN_PROCESS_H
#define GAUSSIAN_PROCESS_H
#include "gaussian_prior.h"
#include "reading_context.h"

#define MIN_P_VALUE 1e-300 /* smallest p-value, so that its logarithm is finite */
#define FACTOR_ROWS (MAX_NEIGHBORS + PRIOR_LANES) /* rows of the matrix of `condition` */

/* Return e^x for x <= 0, with a relative error of about 1e-15, also if the result is a denormal number or 0.
 *
 * e^x = 2^n e^r, where n is x / ln(2) rounded to an integer, and r = x - n ln(2), so that |r| <= ln(2) / 2. e^r is the
 * sum of the first terms of its series. */
INLINE double_vector exponential_doubles(double_vector x) {
    const double_vector zero = {0}, lowest = zero - 746; /* e^-746 is rounded to 0 */
    long_vector is_low = x < lowest;
    x = (double_vector)((is_low & (long_vector)lowest) | (~is_low & (long_vector)x));
    double_vector shifted = x * 1.4426950408889634 + 0x1.8p52; /* adding 1.5 * 2^52 rounds to an integer */
    double_vector n = shifted - 0x1.8p52;
    /* ln(2) is the sum of the two constants. The product with the first one, which has few bits, is exact. */
    double_vector r = x - n * 0x1.62e42fefp-1 - n * 0x1.473de6af278edp-34;
    double_vector p = r * (1 / 479001600.0) + 1 / 39916800.0;
    p = p * r + 1 / 3628800.0;
    p = p * r + 1 / 362880.0;
    p = p * r + 1 / 40320.0;
    p = p * r + 1 / 5040.0;
    p = p * r + 1 / 720.0;
    p = p * r + 1 / 120.0;
    p = p * r + 1 / 24.0;
    p = p * r + 1 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
#ifdef __AVX512F__
    return (double_vector)_mm512_scalef_pd((__m512d)p, (__m512d)n);
#else
    /* The last bits of `shifted` are the integer n. Two factors, because 2^n alone can be too small for a double. */
    long_vector exponent = (long_vector)shifted - (long_vector)(zero + 0x1.8p52), half = exponent >> 1;
    double_vector first = (double_vector)((half + 1023) << 52);
    return p * first * (double_vector)((exponent - half + 1023) << 52);
#endif
}

/* Return a vector of the numbers of `row` with these indexes. */
INLINE double_vector gather_doubles(const double *row, const int32_t *indexes) {
#ifdef __AVX512F__
    return (double_vector)_mm512_i32gather_pd(_mm256_loadu_si256((const __m256i *)indexes), row, 8);
#else
    double_vector v;
    for (int64_t j = 0; j < DOUBLE_LANES; j++) v[j] = row[indexes[j]];
    return v;
#endif
}

/* Return the covariances of a reading with the others of a vector.
 *
 * They are the sum over q of A_q[code, codes] e^(-|age - ages| / scale_q), where A_q[code] is a row of the matrix A_q.
 * A reading has the variance of its noise in addition, which is not part of its covariance with other readings. */
INLINE double_vector compute_covariances(const Process *process, int64_t code, double age, const int32_t *codes,
                                         const double *ages) {
    const double *row = process->covariances + code * process->num_scales * process->num_features;
    double_vector difference = age - load_doubles(ages), total = {0};
    double_vector lag = (double_vector)((long_vector)difference & INT64_MAX); /* |difference| */
    for (int64_t q = 0; q < process->num_scales; q++, row += process->num_features) {
        total += gather_doubles(row, codes) * exponential_doubles(lag * process->negative_rates[q]);
    }
    return total;
}

/* The neighbors of a reading, padded with any valid readings. */
typedef struct {
    int64_t count;
    double ages[MAX_NEIGHBORS], residuals[MAX_NEIGHBORS];
    double covariances[MAX_NEIGHBORS]; /* with the reading */
    int32_t codes[MAX_NEIGHBORS];
} Neighbors;

/* The scratch memory for the contexts of records. */
typedef struct {
    ReadingContext readings;
    double *covariances, *correlations; /* (capacity of the context) */
    double *weights;                    /* (F) factors of the correlations; 1 while no neighbors are chosen */
} ContextScratch;

/* Compute the covariances and the absolute correlations of a reading with the first `count` readings of a context.
 * Correlations with readings that the process lacks become negative. */
static void correlate(const Process *process, ContextScratch *s, int64_t count, int64_t code, double age) {
    const double_vector zero = {0}, negative = zero - 1;
    const ReadingContext *context = &s->readings;
    for (int64_t b = 0; b < count; b += DOUBLE_LANES) {
        double_vector covariance = compute_covariances(process, code, age, context->codes + b, context->ages + b);
        double_vector inverse_deviation = load_doubles(context->inverse_deviations + b);
        /* The standard deviation of the reading itself is the same for all candidates and need not be divided by. */
        long_vector correlation = (long_vector)((double_vector)((long_vector)covariance & INT64_MAX) * inverse_deviation);
        long_vector is_candidate = inverse_deviation > 0;
        store_doubles(s->covariances + b, covariance);
        store_doubles(s->correlations + b, (double_vector)(correlation | (~is_candidate & (long_vector)negative)));
    }
}

/* Choose the neighbors of a reading among the first `count` readings of a context, after `correlate`.
 *
 * The correlation of a reading is multiplied by `decay` for each later reading of its sensor. Of equal products, that of
 * the later reading counts as larger. excluded: a sensor whose readings are no neighbors, or -1. */
static void choose_neighbors(const Process *process, ContextScratch *s, int64_t count, int64_t excluded,
                             Neighbors *neighbors) {
    const ReadingContext *context = &s->readings;
    /* The best candidates so far, in descending order; candidates are visited from the latest to the first one. */
    double best[MAX_NEIGHBORS + 1];
    int64_t index[MAX_NEIGHBORS + 1], num_best = 0, K = process->num_neighbors;
    for (int64_t k = count - 1; k >= 0; k--) {
        double *weight = s->weights + context->codes[k], correlation = s->correlations[k] * *weight;
        *weight *= process->decay;
        if (context->codes[k] == excluded || !(correlation >= 0) || (num_best == K && !(correlation > best[K - 1]))) continue;
        int64_t place = num_best < K ? num_best++ : K - 1;
        for (; place && best[place - 1] < correlation; place--)
            best[place] = best[place - 1], index[place] = index[place - 1];
        best[place] = correlation, index[place] = k;
    }
    for (int64_t k = 0; k < count; k++) s->weights[context->codes[k]] = 1;
    neighbors->count = num_best;
    for (int64_t j = 0; j < (int64_t)round_up(num_best, PRIOR_LANES); j++) {
        int64_t k = index[j < num_best ? j : 0];
        neighbors->ages[j] = context->ages[k], neighbors->residuals[j] = context->residuals[k];
        neighbors->covariances[j] = s->covariances[k], neighbors->codes[j] = context->codes[k];
    }
}

/* Compute mean and variance of a reading of the feature `code` given its neighbors.
 *
 * The matrix below has a row for each neighbor, one for the reading and one for the residuals r of the neighbors. Its
 * first rows become the Cholesky factor C of the neighbors' covariances. The two other rows become w and z, with C w =
 * covariances of the reading with the neighbors, and C z = r. The mean is the feature's mean plus w z, and the variance
 * that of the feature minus w w. Columns are stored one after the other, so that vectors hold numbers of one column. */
static void condition(const Process *process, int64_t code, const Neighbors *neighbors, double *mean,
                      double *variance) {
    int64_t n = neighbors->count;
    double matrix[MAX_NEIGHBORS][FACTOR_ROWS] __attribute__((aligned(64)));
    *mean = process->means[code], *variance = process->variances[code];
    for (int64_t j = 0; j < n; j++) {
        double *column = matrix[j];
        const double_vector zero = {0};
        for (int64_t b = n / DOUBLE_LANES * DOUBLE_LANES; b < n + 2; b += DOUBLE_LANES) store_doubles(column + b, zero);
        for (int64_t b = j / DOUBLE_LANES * DOUBLE_LANES; b < n; b += DOUBLE_LANES)
            store_doubles(column + b, compute_covariances(process, neighbors->codes[j], neighbors->ages[j],
                                                          neighbors->codes + b, neighbors->ages + b));
        column[j] = process->variances[neighbors->codes[j]];
        column[n] = neighbors->covariances[j], column[n + 1] = neighbors->residuals[j];
    }
    for (int64_t j = 0; j < n; j++) {
        double *column = matrix[j];
        /* Each reading has noise of its own, so its conditional variance is not smaller. If it is, due to rounding, the
         * numbers of the column are rounding errors, and the neighbor is left out. */
        int is_regular = column[j] > 0.5 * process->noise_variances[neighbors->codes[j]];
        double inverse = is_regular ? 1 / sqrt(column[j]) : 0;
        for (int64_t b = j / DOUBLE_LANES * DOUBLE_LANES; b < n + 2; b += DOUBLE_LANES)
            store_doubles(column + b, load_doubles(column + b) * inverse);
        for (int64_t i = j + 1; i < n; i++)
            for (int64_t b = i / DOUBLE_LANES * DOUBLE_LANES; b < n + 2; b += DOUBLE_LANES)
                store_doubles(matrix[i] + b, load_doubles(matrix[i] + b) - column[i] * load_doubles(column + b));
        *mean += column[n] * column[n + 1], *variance -= column[n] * column[n];
    }
    *variance = fmax(*variance, process->noise_variances[code]);
}

/* Allocate scratch memory for contexts of at most `longest` readings. process: NULL if the model has none. Return 1, or
 * 0 if there is not enough memory. */
static int allocate_context(const Process *process, size_t longest, ContextScratch *s) {
    size_t capacity = round_up(longest, PRIOR_LANES) + PRIOR_LANES, bytes = capacity * sizeof(double);
    s->readings.ages = allocate_zeroed(bytes);
    s->readings.residuals = allocate_zeroed(bytes);
    s->readings.inverse_deviations = allocate_zeroed(bytes);
    s->readings.codes = allocate_zeroed(capacity * sizeof(int32_t));
    s->covariances = allocate_zeroed(bytes);
    s->correlations = allocate_zeroed(bytes);
    int64_t num_features = process ? process->num_features : 0;
    s->weights = allocate_zeroed((num_features + 1) * sizeof(double));
    for (int64_t f = 0; s->weights && f < num_features; f++) s->weights[f] = 1;
    return s->readings.ages && s->readings.residuals && s->readings.inverse_deviations && s->readings.codes &&
           s->covariances && s->correlations && s->weights;
}

/* Free the memory that `allocate_context` has allocated; pointers may be NULL. */
static void free_context(ContextScratch *s) {
    free(s->readings.ages), free(s->readings.residuals), free(s->readings.inverse_deviations);
    free(s->readings.codes), free(s->covariances), free(s->correlations), free(s->weights);
}

/* Return ln of the p-value of a reading given the earlier readings of other sensors, after `correlate`.
 *
 * The p-value is the probability, under a mixture of two Gaussians with the same mean, of a value that is at least as far
 * from it. `GaussianProcessPrior.compute_log_p_others` is the reference. */
static double log_p_given_others(const Process *process, ContextScratch *s, int64_t count, int64_t code, double value) {
    Neighbors neighbors;
    double mean, variance;
    choose_neighbors(process, s, count, code, &neighbors);
    condition(process, code, &neighbors, &mean, &variance);
    double distance = fabs(value - mean) / sqrt(2 * variance), share = exp(process->log_weights[2 * code + 1]);
    double p = (1 - share) * erfc(distance) + share * erfc(distance / process->outlier_factors[code]);
    return log(fmax(p, MIN_P_VALUE));
}

/* Compute the conditional of reading m of the batch under the process, and write it as number `query` into the batch.
 *
 * log_p_prior: receives ln of the p-value given the readings of other sensors; NULL: not computed. */
static void write_process_conditional(const Process *process, const Batch *batch, int64_t query, int64_t m,
                                      int64_t count, ContextScratch *s, float *log_p_prior) {
    int64_t code = batch->features[m];
    double mean = 0, variance = 1, outlier_factor = 1, log_p = 0;
    if (process->inverse_deviations[code] > 0) {
        Neighbors neighbors;
        correlate(process, s, count, code, batch->ages[m]);
        choose_neighbors(process, s, count, -1, &neighbors);
        condition(process, code, &neighbors, &mean, &variance);
        outlier_factor = process->outlier_factors[code];
        if (log_p_prior) log_p = log_p_given_others(process, s, count, code, batch->values[m]);
    }
    double scale = sqrt(variance);
    for (int64_t c = 0; c < 2; c++) {
        batch->prior_log_weights[2 * query + c] = process->log_weights[2 * code + c];
        batch->prior_means[2 * query + c] = (float)mean;
        batch->prior_scales[2 * query + c] = (float)(c ? outlier_factor * scale : scale);
    }
    if (log_p_prior) *log_p_prior = (float)log_p;
}

/* Return whether the cache holds the readings of records: irregular ones, and those on which a process is conditioned. */
INLINE int has_contexts(const Network *net) { return net->times || net->process; }

/* Go through the readings of the records from `from` to before `to`, in order of arrival: compute the time
 * inputs of all of them, and the conditionals of the scored ones under the process; write them into the pages.
 *
 * time_inputs: (readings of the records, T) output. */
static void compute_contexts(const Network *net, const Batch *batch, int64_t from, int64_t to, ContextScratch *s,
                             float *time_inputs) {
    for (int64_t i = from; i < to; i++) {
        int64_t begin = batch->offsets[i], end = batch->offsets[i + 1], num_loaded = 0;
        if (i + 1 < to) prefetch_readings(net, batch, i + 1);
        for (int64_t m = begin; m < end; m++) {
            int64_t code = batch->features[m], query = batch->query_offsets[i] + m - query_place(batch, i, 0);
            /* The first k readings of the context are the earlier ones of this reading. */
            int64_t k = batch->depths ? batch->depths[m] : batch->num_cached[i] + m - begin;
            for (; num_loaded < k && num_loaded < batch->num_cached[i]; num_loaded++)
                load_reading(net, batch, i, num_loaded, &s->readings);
            if (net->times) {
                encode_time(net->times, &s->readings, k, code, batch->ages[m], time_inputs);
                time_inputs += net->times->num_inputs;
            }
            if (net->process && query >= batch->query_offsets[i])
                write_process_conditional(net->process, batch, query, m, k, s,
                                          net->times && batch->log_p_prior ? batch->log_p_prior + query : NULL);
            put_reading(net->process, &s->readings, k, code, batch->ages[m], batch->values[m]);
            write_reading(net, batch, i, k, code, batch->ages[m], batch->values[m]);
        }
    }
}

/* Return the number of Gaussians in a conditional of the model's prior; 0 without a prior. */
INLINE int64_t num_prior_components(const Network *net) {
    return net->prior ? net->prior->num_components : net->process ? 2 : 0;
}

/* Return the distance of two conditionals of the model's prior in the arrays of the batch. */
INLINE int64_t prior_stride(const Network *net) {
    return net->prior ? net->prior->padded_components : num_prior_components(net);
}

/* Return whether the model's prior contains a feature. */
INLINE int is_in_prior(const Network *net, int64_t feature) {
    return net->prior ? net->prior->column_by_code[feature] >= 0
                      : net->process && net->process->inverse_deviations[feature] > 0;
}

/* Return the number of inputs of the query token of each reading, besides its feature. */
INLINE int64_t num_query_inputs(const Network *net) {
    return 3 * num_prior_components(net) + (net->times ? net->times->num_inputs : 0);
}

/* Write the inputs of the query tokens, besides their features, for the scored readings of the records from `from` to
 * before `to`: the prior's conditionals, then the time inputs.
 *
 * The numbers of a conditional are clipped and scaled to the order of magnitude of 1, as in the method
 * `PriorConditional.to_network_input` of model/gaussian_prior.py. time_inputs: (readings of the records, T); ignored if
 * readings are not irregular. inputs: (scored readings, `num_query_inputs`) output: log weights, means, log scales (0
 * if the prior lacks the feature), time inputs. */
static void build_query_inputs(const Network *net, const Batch *batch, int64_t from, int64_t to,
                               const float *time_inputs, float *inputs) {
    int64_t C = num_prior_components(net), T = net->times ? net->times->num_inputs : 0;
    for (int64_t i = from; i < to; i++)
        for (int64_t r = 0; r < batch->query_offsets[i + 1] - batch->query_offsets[i]; r++, inputs += 3 * C + T) {
            int64_t at = (batch->query_offsets[i] + r) * prior_stride(net), m = query_place(batch, i, r);
            int has_prior = is_in_prior(net, batch->features[m]);
            for (int64_t c = 0; c < C; c++) {
                inputs[c] = has_prior ? 0.25f * fmaxf(batch->prior_log_weights[at + c], -8) : 0;
                inputs[C + c] = has_prior ? 0.5f * fminf(fmaxf(batch->prior_means[at + c], -8), 8) : 0;
                inputs[2 * C + c] = has_prior ? 0.5f * logf(batch->prior_scales[at + c]) : 0;
            }
            if (T) memcpy(inputs + 3 * C, time_inputs + (m - batch->offsets[from]) * T, T * sizeof *inputs);
        }
}
#endif
