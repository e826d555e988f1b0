/* Conditionals of the Gaussian process for whole sequences of irregular readings, as training needs them. Threads take
 * sequences from a shared counter. model/gaussian_process.py is the reference. */
#include "gaussian_process.h"

/* Compute the conditionals of the readings of one sequence from `first` on.
 *
 * Padding is left out of the context, so a reading has as many earlier ones as there are readings before it. */
static void condition_sequence(const ProcessTask *task, int64_t sequence, ContextScratch *s) {
    const Process *process = task->process;
    int64_t L = task->num_readings, count = 0;
    const int64_t *features = task->features + sequence * L;
    const float *values = task->values + sequence * L;
    const double *ages = task->ages + sequence * L;
    double *means = task->means + sequence * (L - task->first), *deviations = task->deviations + sequence * (L - task->first);
    for (int64_t k = 0; k < L; k++) {
        int64_t code = features[k];
        int has_prior = code >= 0 && process->inverse_deviations[code] > 0;
        if (k >= task->first) {
            double mean = 0, variance = 1;
            if (has_prior) {
                Neighbors neighbors;
                correlate(process, s, count, code, ages[k]);
                choose_neighbors(process, s, count, task->is_own_excluded ? code : -1, &neighbors);
                condition(process, code, &neighbors, &mean, &variance);
            }
            means[k - task->first] = mean, deviations[k - task->first] = sqrt(variance);
        }
        if (has_prior) put_reading(process, &s->readings, count++, code, ages[k], values[k]);
    }
}

/* Compute conditionals until no sequence of the task is left; each thread calls this once. Return 0, or -1 if memory
 * cannot be allocated. */
int64_t condition_sequences(const ProcessTask *task) {
    ContextScratch s = {0};
    int is_allocated = allocate_context(task->process, task->num_readings, &s);
    for (int64_t i; is_allocated && (i = __atomic_fetch_add(task->next_sequence, 1, __ATOMIC_RELAXED)) < task->num_sequences;)
        condition_sequence(task, i, &s);
    free_context(&s);
    return is_allocated ? 0 : -1;
}
