/* The distances of prefixes of records to stored training records. `measure_distances` of model/alert_distance.py
 * computes the same bits, and is the reference. */
#include "abi.h"

#define NUM_NEAREST 3 /* number of stored records over which a distance is averaged */

enum { NUMBER, LABEL, CYCLIC, IGNORED }; /* kinds of features, as in model/alert_distance.py */

/* Add the differences of one reading to all stored records to their sums.
 *
 * stored: (num_stored) positions of the records' readings of the same feature, NaN if a record lacks it. extent: the
 * difference of two labels, or the length of the cycle. */
static void add_differences(float *restrict sums, const float *restrict stored, int64_t num_stored, float position,
                            int8_t kind, float extent, float missing) {
    if (kind == NUMBER)
        for (int64_t e = 0; e < num_stored; e++) {
            float difference = fabsf(position - stored[e]);
            sums[e] += difference == difference ? difference : missing;
        }
    else if (kind == LABEL)
        for (int64_t e = 0; e < num_stored; e++) {
            float difference = fabsf(position - stored[e]);
            sums[e] += difference == difference ? (difference > 0 ? extent : 0) : missing;
        }
    else if (kind == CYCLIC)
        for (int64_t e = 0; e < num_stored; e++) {
            float remainder = fmodf(fabsf(position - stored[e]), extent);
            float difference = remainder < extent - remainder ? remainder : extent - remainder;
            sums[e] += difference == difference ? difference : missing;
        }
}

/* Return the mean of the smallest sums. excluded: index of a stored record that is left out, -1 for none. */
static double average_nearest(const float *sums, int64_t num_stored, int64_t excluded) {
    float nearest[NUM_NEAREST] = {INFINITY, INFINITY, INFINITY}; /* ascending */
    for (int64_t e = 0; e < num_stored; e++) {
        if (!(sums[e] < nearest[NUM_NEAREST - 1]) || e == excluded) continue;
        int64_t i = NUM_NEAREST - 1;
        for (; i > 0 && nearest[i - 1] > sums[e]; i--) nearest[i] = nearest[i - 1];
        nearest[i] = sums[e];
    }
    int64_t num_candidates = num_stored - (excluded >= 0), num_nearest = NUM_NEAREST;
    if (num_candidates < num_nearest) num_nearest = num_candidates;
    double sum = 0;
    for (int64_t i = 0; i < num_nearest; i++) sum += nearest[i];
    return sum / num_nearest;
}

/* Measure the distances of the prefixes of one record to the first `count` stored records.
 *
 * first, end: its readings. first_needed: the first one whose distance is needed. only_above_bounds: whether distances that
 * are known already, and not above their bounds, are left as they are. */
static void measure_record(const DistanceTask *task, int64_t count, int64_t first, int64_t first_needed, int64_t end,
                           int64_t excluded, int only_above_bounds) {
    memset(task->sums, 0, count * sizeof *task->sums);
    for (int64_t m = first; m < end; m++) {
        int64_t code = task->codes[m];
        add_differences(task->sums, task->stored + code * task->num_stored, count, task->positions[m],
                        task->feature_kinds[code], task->extents[code], (float)task->missing_difference);
        if (m >= first_needed && !(only_above_bounds && task->out[m] <= task->bounds[m]))
            task->out[m] = average_nearest(task->sums, count, excluded);
    }
}

/* Compute the distance of each prefix; DistanceTask (abi.h) describes all arrays. */
void measure_distances(const DistanceTask *task) {
    int64_t E = task->num_stored, few = task->num_first < E ? task->num_first : E;
    for (int64_t i = 0; i < task->num_records; i++) {
        int64_t first = task->offsets[i], end = task->offsets[i + 1], first_needed = first + task->num_before[i];
        if (first_needed == end) continue;
        int64_t excluded = task->excluded[i], is_above = 1;
        if (task->bounds) {
            measure_record(task, few, first, first_needed, end, excluded < few ? excluded : -1, 0);
            is_above = 0;
            for (int64_t m = first_needed; m < end; m++) is_above |= task->out[m] > task->bounds[m];
        }
        if (is_above) measure_record(task, E, first, first_needed, end, excluded, task->bounds != NULL);
    }
}
