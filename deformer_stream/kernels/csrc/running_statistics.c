/* The running statistics of records, updated with each scored reading. `advance_prefix_state` of
 * calibration/conformal.py computes the same, and is the reference. */
#include "abi.h"
#include "gamma_tail.h"

#define TOLERANCE 1e-15   /* relative error of Fisher's statistic */
#define SENSOR_EVIDENCE 6 /* kinds of evidence of each sensor: three sums, the reading, and the sums "level", "step" */

/* Return Sidak's statistic -ln(1 - (1 - p)^count), where p is the smallest of `count` p-values. min_log_p: ln(p).
 *
 * 1 - (1 - p)^count is the probability that the smallest of so many uniform p-values is at most p. If p is tiny, this
 * expression would lose its digits, and is approximated by count p. */
static double sidak(int64_t count, double min_log_p) {
    if (min_log_p < -25) return -min_log_p - log(count);
    return -log(-expm1(count * log1p(-exp(fmin(min_log_p, -1e-12)))));
}

/* Return Fisher's statistic of `count` p-values. neg_log_p_sum: the sum of their -ln p.
 *
 * It is -ln of the probability that uniform p-values have a larger sum, which has a Gamma(count, 1) distribution. */
static double fisher(int64_t count, double neg_log_p_sum) { return -log_gamma_sf(count, neg_log_p_sum, TOLERANCE); }

/* Return the larger one of Fisher's and Sidak's statistic of `count` p-values. */
static double combine(int64_t count, double neg_log_p_sum, double min_log_p) {
    return fmax(fisher(count, neg_log_p_sum), sidak(count, min_log_p));
}

/* Add the p-value of a reading under the Gaussian prior alone to the statistics of its record. */
static void add_prior(const AdvanceTask *task, int64_t m, RunningState *state) {
    double log_p = fmin(fmax(task->log_p_prior[m], -task->max_neg_log_p_prior), 0) * task->p_value_exponent;
    state->prior_neg_log_p_sum -= log_p, state->prior_min_log_p = fmin(state->prior_min_log_p, log_p);
}

/* Return the term of the statistic for a combination of `count` p-values, at least one (`AlertPrior.compute_terms` of
 * model/alert_prior.py). source: 0 for p-values of the network, 1 for those under the prior alone. */
static double line_term(const AdvanceTask *task, int64_t source, int64_t count, double combined) {
    int64_t line = source * task->num_lines + (count < task->num_lines ? count : task->num_lines) - 1;
    return task->line_slopes[line] * fmax(combined - task->line_starts[line], 0);
}

/* Return the statistic of the p-values of the readings so far, at least one, without the term of the distance. */
static double combine_sources(const AdvanceTask *task, const RunningState *state) {
    int64_t count = state->num_scored;
    double of_network = combine(count, state->neg_log_p_sum, state->min_log_p);
    if (!task->log_p_prior) return of_network;
    double of_prior = combine(count, state->prior_neg_log_p_sum, state->prior_min_log_p);
    return line_term(task, 0, count, of_network) + line_term(task, 1, count, of_prior);
}

/* Return the increment ln(kappa) + (1 - kappa) min(-ln p, limit) of a cumulative sum. */
static double bet(double log_p, double kappa, double limit) {
    return log(kappa) + (1 - kappa) * fmin(fmax(-log_p, 0), limit); /* rounding can make a p-value > 1 */
}

/* Return the entry of a table with an entry below num_cells cells, one in each of them, and one above them.
 *
 * edges: (num_cells + 1) ascending. */
static double find_cell(const double *edges, int64_t num_cells, const double *log_p, double value) {
    int64_t low = 0, high = num_cells + 1; /* the number of edges that are at most the value */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (edges[middle] <= value) low = middle + 1;
        else high = middle;
    }
    return log_p[low];
}

/* Return ln of the p-value of a reading among all normal readings of its sensor, 0 if their distribution is not known.
 *
 * It is that of the cell with the value (`Marginals.compute_log_p` of calibration/marginals.py). */
static double log_p_level(const AdvanceTask *task, int64_t code, double value) {
    if (!task->level_edges) return 0;
    int64_t K = task->num_cells;
    return find_cell(task->level_edges + code * (K + 1), K, task->level_log_p + code * (K + 2), value);
}

/* Return ln of the p-value of the step from a sensor's previous value, 0 if there is none or no distribution of steps.
 *
 * It is that of the cell with the step (`find_step_log_p` of calibration/sensor_steps.py). */
static double log_p_step(const AdvanceTask *task, int64_t code, double value, double previous) {
    if (!task->step_edges || !isfinite(previous)) return 0;
    int64_t K = task->num_step_cells;
    double step = value - task->step_slopes[code] * previous;
    return find_cell(task->step_edges + code * (K + 1), K, task->step_log_p + code * (K + 2), step);
}

/* Add a reading to the cumulative sums of its record, and return its statistic. `advance_sums`, `compute_statistics` and
 * `find_largest_kinds` of calibration/cusum.py compute the same, and are the reference.
 *
 * m: the reading's index among the M readings. kind: receives the code of the evidence with the largest statistic. */
static double advance_cusums(const AdvanceTask *task, int64_t record_index, int64_t m, double log_prob, double log_p,
                             int8_t *kind) {
    int64_t F = task->num_sensors, code = task->codes[m];
    float *state = task->cusum_states + record_index * (6 * F + 1);
    float *improbable = state + code, *offset = state + F + code, *repeated = state + 2 * F + code;
    float *last_value = state + 3 * F + code, *record = state + 4 * F, *level = record + 1 + code;
    float *step = record + 1 + F + code;
    double log_p_others = task->log_p_others ? task->log_p_others[m] : 0;
    double repetition = fmin(fmax(-(log_prob + task->log_resolutions[code]), 0), task->max_repetition);
    *improbable = (float)fmax(*improbable + bet(log_p, task->sensor_kappa, task->max_surprise), 0);
    *offset = (float)fmax(*offset + bet(log_p_others, task->offset_kappa, task->max_surprise), 0);
    *repeated = *last_value == task->values[m] ? (float)(*repeated + repetition) : 0;
    double unusual_step = log_p_step(task, code, task->values[m], *last_value);
    *step = (float)fmax(*step + bet(unusual_step, task->step_kappa, task->max_surprise), 0);
    *last_value = task->values[m];
    *record = (float)fmax(*record + bet(log_p, task->record_kappa, task->max_surprise), 0);
    double extreme = fmin(fmax(-log_p, 0), task->max_extreme);
    double unusual = bet(log_p_level(task, code, task->values[m]), task->sensor_kappa, task->max_surprise);
    *level = (float)fmax(*level + unusual, 0);
    const double evidence[SENSOR_EVIDENCE] = {*improbable, *offset, *repeated, extreme, *level, *step};
    double statistics[SENSOR_EVIDENCE + 1], largest = task->record_intercept + task->record_slope * *record;
    statistics[SENSOR_EVIDENCE] = largest;
    for (int64_t i = 0; i < SENSOR_EVIDENCE; i++) {
        int64_t line = i * F + code;
        statistics[i] = task->intercepts[line] + task->slopes[line] * evidence[i];
        largest = fmax(largest, statistics[i]);
    }
    *kind = 0;
    while (*kind < SENSOR_EVIDENCE && statistics[*kind] < largest - task->tie_tolerance) (*kind)++;
    return largest;
}

/* Update the running statistics of R records with their new readings; AdvanceTask (abi.h) describes all arrays. */
void advance_statistics(const AdvanceTask *task) {
    int64_t M = task->offsets[task->num_records];
    for (int64_t i = 0; i < task->num_records; i++) {
        RunningState state = task->running[task->record_index[i]];
        for (int64_t m = task->offsets[i]; m < task->offsets[i + 1]; m++) {
            double log_prob = task->score_terms[m], log_p_value = task->score_terms[M + m];
            double centered_nll = task->score_terms[2 * M + m];
            int is_scored = !task->is_scored || task->is_scored[m]; /* else a reading that conditions others only */
            int8_t kind = -1;
            if (is_scored) {
                double log_p = task->p_value_exponent * fmin(log_p_value, 0); /* rounding can make a p-value > 1 */
                state.num_scored++;
                state.neg_log_p_sum -= log_p, state.min_log_p = fmin(state.min_log_p, log_p);
                state.log_likelihood += log_prob, state.centered_nll += centered_nll;
                if (task->log_p_prior) add_prior(task, m, &state);
            }
            if (is_scored && task->cusum_states) {
                double statistic = advance_cusums(task, task->record_index[i], m, log_prob, log_p_value, &kind);
                if (statistic <= state.max_statistic) kind = -1;
                state.max_statistic = fmax(state.max_statistic, statistic);
            }
            if (task->largest_kinds) task->largest_kinds[m] = kind;
            /* Not after readings that are followed by others with the same event time, whose order means nothing. */
            if (!task->cusum_states && state.num_scored && (!task->is_decision_point || task->is_decision_point[m])) {
                double statistic = combine_sources(task, &state);
                if (task->distance_terms) statistic += task->distance_terms[m];
                state.max_statistic = fmax(state.max_statistic, statistic);
            }
            task->score_rows[m] = is_scored ? log_prob : NAN;
            task->score_rows[M + m] = state.log_likelihood, task->score_rows[2 * M + m] = state.max_statistic;
        }
        task->running[task->record_index[i]] = state;
    }
}
