/* Computation of score terms from the outputs of the network.
 *
 * The score terms of a reading are ln p of its value, ln of the p-value (probability of a value at most as likely), and
 * the centered NLL (-ln p minus its expected value). */
#ifndef OUTPUT_HEAD_H
#define OUTPUT_HEAD_H
#include "gamma_tail.h"
#include "gaussian_process.h"
#include "surprisal.h"

/* Return ln(1 + e^x).
 *
 * With y = e^x, 1 + y would lose the digits of a small y. There, ln(1 + y) = 2 atanh(s) with s = y / (y + 2) is used.
 * For x > 20, the result is x to the last digit. */
INLINE float_vector softplus(float_vector x) {
    float_vector y = exponential(vector_min(x, splat(20.0f))), s = y / (y + 2.0f), t = s * s;
    float_vector p = log_ratio_series(t);
    return select_lanes(x > 20.0f, x, select_lanes(y < 0.4f, p * s, logarithm(1.0f + y)));
}

/* Return ln of the sum of e^x over the n numbers x. Whole vectors are read; numbers after the first n are ignored. */
static float log_sum_exp(const float *x, size_t n) {
    float_vector lanes = lane_numbers(), largest = splat(-INFINITY), total = splat(0);
    for (size_t j = 0; j < n; j += LANES)
        largest = vector_max(largest, select_lanes(lanes + (float)j < (float)n, load(x + j), largest));
    float peak = reduce_max(largest);
    for (size_t j = 0; j < n; j += LANES) {
        float_vector e = exponential(vector_min(load(x + j) - peak, splat(0)));
        total += select_lanes(lanes + (float)j < (float)n, e, splat(0));
    }
    return peak + logarithm(splat(reduce_sum(total)))[0];
}

/* Compute the score terms of a continuous value: out[0] = ln p, out[stride] = ln of the p-value, out[2 stride] =
 * centered NLL.
 *
 * s: surprisal (-ln p) of the value, and minimum, mean and variance of the surprisal of values drawn from the mixture.
 * The p-value is the probability that a drawn value has a surprisal at least as large. It is computed from a Gamma
 * distribution, shifted by the minimum, with this mean and variance. Its parameters are limited as in
 * model/distributions.py, which gives the reasons. */
static void score_continuous(Surprisal s, float *out, size_t stride) {
    float minimum = fminf(s.minimum, s.value), gap = fmaxf(s.mean - minimum, 0.1f);
    float scale = fminf(fmaxf(s.variance / gap, 1), 100), shape = fminf(fmaxf(gap / scale, 0.01f), 50);
    out[0] = -s.value;
    out[stride] = (float)log_gamma_sf(shape, (s.value - minimum) / scale, 1e-9);
    out[2 * stride] = s.value - s.mean;
}

/* Compute the mixture of a continuous reading: J components of the network, then K of the Gaussian prior.
 *
 * outputs: outputs of mixture_map for the reading: J log weights, J numbers from which scales are computed, J means.
 * adjustments: outputs of adjust_map, the changes of the prior's K log weights, means and log scales. prior_...: the
 * prior's conditional. mixture: output, (3, C) rows with normalised log weights, means and scales; C is the number of
 * components, rounded up to whole vectors. */
static void build_mixture(const Head *head, float scale_floor, const float *outputs, const float *adjustments,
                          const float *prior_log_weights, const float *prior_means, const float *prior_scales,
                          float *mixture, size_t C) {
    size_t J = head->num_components, K = head->num_prior_components;
    float *log_weights = mixture, *means = mixture + C, *scales = mixture + 2 * C;
    memcpy(log_weights, outputs, J * sizeof *mixture);
    memcpy(means, outputs + 2 * J, J * sizeof *mixture);
    for (size_t j = 0; j < J; j += LANES) {
        float part[LANES]; /* the last vector has numbers after the first J, which must not be stored */
        store(part, scale_floor + softplus(load(outputs + J + j)));
        memcpy(scales + j, part, min_size(J - j, LANES) * sizeof *mixture);
    }
    for (size_t k = 0; k < K; k++) {
        float widening = expf(fminf(fmaxf(adjustments[2 * K + k], -MAX_LOG_SCALE_CHANGE), MAX_LOG_SCALE_CHANGE));
        float scale = prior_scales[k] * widening;
        log_weights[J + k] = prior_log_weights[k] + adjustments[k];
        means[J + k] = prior_means[k] + prior_scales[k] * adjustments[K + k];
        scales[J + k] = sqrtf(scale * scale + scale_floor * scale_floor / 3.0f);
    }
    float total = log_sum_exp(log_weights, J + K);
    for (size_t j = 0; j < J + K; j++) log_weights[j] -= total;
}

/* Return ln of the p-value of a value under the mixture of the Gaussian prior alone, as `score_continuous` computes it.
 *
 * prior_...: the prior's conditional, with K components. mixture: scratch, (SURPRISAL_ROWS, K rounded up to whole
 * vectors). */
static float log_p_under_prior(const float *prior_log_weights, const float *prior_means, const float *prior_scales,
                               size_t K, float value, float *mixture) {
    size_t C = round_up(K, LANES), bytes = K * sizeof *mixture;
    float terms[3];
    memcpy(mixture, prior_log_weights, bytes);
    memcpy(mixture + C, prior_means, bytes);
    memcpy(mixture + 2 * C, prior_scales, bytes);
    score_continuous(compute_surprisal(mixture, K, value), terms, 1);
    return terms[1];
}

/* Compute the score terms of a label: out[0] = ln p, out[stride] = ln of the p-value, out[2 stride] = centered NLL.
 *
 * The p-value is the probability of all labels that are at most as likely. logits: (labels of the feature). value: the
 * label code. log_mass: scratch, (labels + 1), for ln p of each label, and at the end of all labels together that
 * training has not seen. relative_tail: the p-value divided by p, so that a small p does not underflow. */
static void score_label(const Head *head, int64_t feature, const float *logits, float value, float *log_mass,
                        float *out, size_t stride) {
    int64_t count = head->label_counts[feature];
    float total = log_sum_exp(logits, count), relative_tail = 0, entropy = 0;
    for (int64_t k = 0; k < count; k++) log_mass[k] = logits[k] - total + head->unseen_log_mass[2 * feature];
    log_mass[count] = head->unseen_log_mass[2 * feature + 1];
    float own = log_mass[label_code(value, count)];
    for (int64_t k = 0; k <= count; k++) {
        /* The tolerance makes labels count as equally likely if rounding alone distinguishes them. */
        if (log_mass[k] <= own + 1e-6f) relative_tail += expf(log_mass[k] - own);
        entropy -= expf(log_mass[k]) * log_mass[k];
    }
    out[0] = own;
    out[stride] = fminf(own + logf(relative_tail), 0);
    out[2 * stride] = -own - entropy;
}

/* Return the number of floats that `score_queries` needs as scratch memory. */
static size_t head_scratch_size(const Head *head) {
    size_t columns = head->mixture_map->columns + (head->adjust_map ? head->adjust_map->columns : 0);
    size_t mixture = SURPRISAL_ROWS * round_up(head->num_components + head->num_prior_components, LANES);
    return ROWS_TOGETHER * columns + mixture + head->num_labels + 1 + 2 * LANES;
}

/* Write the score terms of the scored readings of the records from `from` to before `to` into batch->score_terms.
 *
 * x: (scored readings, d) the network's outputs at query tokens z, after the final normalisation. scratch:
 * `head_scratch_size` floats. The linear maps are applied to ROWS_TOGETHER readings at once. */
static void score_queries(const Network *net, const Batch *batch, int64_t from, int64_t to, const float *x,
                          float *scratch) {
    const Head *head = net->head;
    size_t d = net->d;
    size_t num_queries = batch->query_offsets[to] - batch->query_offsets[from];
    size_t components = head->num_components + head->num_prior_components, C = round_up(components, LANES);
    size_t columns = head->mixture_map->columns, stride = batch->query_offsets[batch->num_records];
    size_t adjust_columns = head->adjust_map ? head->adjust_map->columns : 0;
    float *outputs = scratch, *adjustments = outputs + ROWS_TOGETHER * columns + LANES;
    float *mixture = adjustments + ROWS_TOGETHER * adjust_columns, *log_mass = mixture + SURPRISAL_ROWS * C;
    int64_t record = from, r = 0; /* the next scored reading is number r of this record */
    for (size_t at = 0; at < num_queries; at++) {
        size_t row = at % ROWS_TOGETHER, num_rows = min_size(num_queries - at, ROWS_TOGETHER);
        if (!row) apply_map(head->mixture_map, x + at * d, d, num_rows, 0, outputs, columns);
        if (!row && adjust_columns)
            apply_map(head->adjust_map, x + at * d, d, num_rows, 0, adjustments, adjust_columns);
        /* Go on to the next record with scored readings. */
        for (; r == batch->query_offsets[record + 1] - batch->query_offsets[record]; r = 0) record++;
        int64_t m = query_place(batch, record, r++), feature = batch->features[m];
        size_t query = batch->query_offsets[from] + at;
        float *out = batch->score_terms + query;
        const float *own = outputs + row * columns;
        size_t at_prior = query * prior_stride(net);
        const float *prior_log_weights = batch->prior_log_weights + at_prior;
        const float *prior_means = batch->prior_means + at_prior, *prior_scales = batch->prior_scales + at_prior;
        if (batch->log_p_prior && !net->times) /* that of irregular readings is given those of other sensors only */
            batch->log_p_prior[query] =
                !is_in_prior(net, feature) ? 0 : log_p_under_prior(prior_log_weights, prior_means, prior_scales,
                                                                   head->num_prior_components, batch->values[m], mixture);
        if (head->label_counts[feature]) {
            const float *logits = own + 3 * head->num_components;
            score_label(head, feature, logits, batch->values[m], log_mass, out, stride);
            continue;
        }
        build_mixture(head, head->scale_floor[feature], own, adjustments + row * adjust_columns, prior_log_weights,
                      prior_means, prior_scales, mixture, C);
        score_continuous(compute_surprisal(mixture, components, batch->values[m]), out, stride);
    }
}
#endif
