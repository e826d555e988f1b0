/* From what comes out of the network to what scoring asks of readings. */
#ifndef HEAD_H
#define HEAD_H
#include "gamma.h"
#include "guide.h"
#include "mixture.h"

#define WIDEST 5.0f /* as in heads.py */

typedef struct {
    int64_t mixtures, guides, labels; /* outputs of `project`: 3 · mixtures, labels; of `adjust`: 3 · guides */
    const float *norm, *norm_bias;    /* (d) or NULL */
    const float *floor;               /* (F) smallest scales */
    const float *unseen;              /* (F, 2) ln of the mass of labels that were seen, and of others */
    const int64_t *count;             /* (F) labels of a feature, 0 where it is a number */
    const Map *project, *adjust;      /* adjust: NULL without a guide */
} Head;

/* ln(1 + e^x) */
INLINE v16 softplus(v16 x) {
    v16 y = exponential(smaller(x, all(20.0f))), s = y / (y + 2.0f), t = s * s;
    v16 p = all(2.0f / 9) * t + 2.0f / 7;
    p = p * t + 2.0f / 5;
    p = p * t + 2.0f / 3;
    p = p * t + 2.0f;
    return chosen(x > 20.0f, x, chosen(y < 0.4f, p * s, logarithm(1.0f + y)));
}

/* ln of the sum of e to each of n numbers, and as many that are read in vain up to whole vectors. */
static float log_sum(const float *x, size_t n) {
    v16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, top = all(-INFINITY), total = all(0);
    for (size_t j = 0; j < n; j += LANES) top = larger(top, chosen(lanes + (float)j < (float)n, load(x + j), top));
    float peak = largest(top);
    for (size_t j = 0; j < n; j += LANES)
        total += chosen(lanes + (float)j < (float)n, exponential(smaller(load(x + j) - peak, all(0))), all(0));
    return peak + logarithm(all(sum(total)))[0];
}

/* Of a number, see `Conditional.judge`. out: ln p, ln of the p-value, excess, each `apart`. */
static void judge_number(Surprisal s, float *out, size_t apart) {
    float least = fminf(s.least, s.value), gap = fmaxf(s.mean - least, 0.1f);
    float theta = fminf(fmaxf(s.variance / gap, 1), 100), shape = fminf(fmaxf(gap / theta, 0.01f), 50);
    out[0] = -s.value;
    out[apart] = (float)log_gamma_sf(shape, (s.value - least) / theta, 1e-9);
    out[2 * apart] = s.value - s.mean;
}

/* The mixture of a reading into w, (3, C): logarithms of weights, means, scales. raw: outputs of `project`; more: of
 * `adjust`, with what the guide expects. */
static void mixture_of(const Head *head, float floor, const float *raw, const float *more, const float *log_weight,
                       const float *mean, const float *scale, float *w, size_t C) {
    size_t J = head->mixtures, K = head->guides;
    memcpy(w, raw, J * sizeof *w);
    memcpy(w + C, raw + 2 * J, J * sizeof *w);
    for (size_t j = 0; j < J; j += LANES) { /* what lies beyond is written over */
        float part[LANES];
        store(part, floor + softplus(load(raw + J + j)));
        memcpy(w + 2 * C + j, part, (J - j < LANES ? J - j : LANES) * sizeof *w);
    }
    for (size_t k = 0; k < K; k++) {
        float widened = scale[k] * expf(fminf(fmaxf(more[2 * K + k], -WIDEST), WIDEST));
        w[J + k] = log_weight[k] + more[k];
        w[C + J + k] = mean[k] + scale[k] * more[K + k];
        w[2 * C + J + k] = sqrtf(widened * widened + floor * floor / 3.0f);
    }
    float total = log_sum(w, J + K);
    for (size_t j = 0; j < J + K; j++) w[j] -= total;
}

/* Of a label: the mass of its own code and of all at most as likely. logits: (count), of which more may be read. */
static void judge_label(const Head *head, int64_t feature, const float *logits, float value, float *mass, float *out,
                        size_t apart) {
    int64_t count = head->count[feature];
    float total = log_sum(logits, count), likely = 0, entropy = 0;
    for (int64_t k = 0; k < count; k++) mass[k] = logits[k] - total + head->unseen[2 * feature];
    mass[count] = head->unseen[2 * feature + 1];
    float own = mass[label_of(value, count)];
    for (int64_t k = 0; k <= count; k++) {
        if (mass[k] <= own + 1e-6f) likely += expf(mass[k] - own);
        entropy -= expf(mass[k]) * mass[k];
    }
    out[0] = own;
    out[apart] = fminf(own + logf(likely), 0);
    out[2 * apart] = -own - entropy;
}
/* Floats that `judge` works in. */
static size_t room_to_judge(const Head *head) {
    size_t rows = head->project->columns + (head->adjust ? head->adjust->columns : 0);
    return TOLD * rows + 7 * whole(head->mixtures + head->guides, LANES) + head->labels + 1 + 2 * LANES;
}

/* The readings that are asked for of some records, by what came out for them, x: (asked, d), normalised. */
static void judge(const Head *head, const Gaussians *g, const Work *work, int64_t from, int64_t to, size_t d,
                  const float *x, float *room) {
    size_t asked = work->asked[to] - work->asked[from], components = head->mixtures + head->guides;
    size_t C = whole(components, LANES), columns = head->project->columns, apart = work->asked[work->records];
    size_t more = head->adjust ? head->adjust->columns : 0;
    float *raw = room, *adjusted = raw + TOLD * columns + LANES, *w = adjusted + TOLD * more, *mass = w + 7 * C;
    int64_t record = from, r = 0;
    for (size_t at = 0; at < asked; at++) {
        size_t row = at % TOLD, rows = asked - at < TOLD ? asked - at : TOLD, z = work->asked[from] + at;
        if (!row) mapped(head->project, x + at * d, d, rows, 0, raw, columns);
        if (!row && more) mapped(head->adjust, x + at * d, d, rows, 0, adjusted, more);
        for (; r == work->asked[record + 1] - work->asked[record]; r = 0) record++;
        int64_t m = reading_of(work, record, r++), feature = work->code[m];
        float *out = work->judged + z, *said = raw + row * columns;
        if (head->count[feature]) {
            judge_label(head, feature, said + 3 * head->mixtures, work->value[m], mass, out, apart);
            continue;
        }
        size_t guide = g ? z * g->padded : 0;
        mixture_of(head, head->floor[feature], said, adjusted + row * more, work->log_weight + guide,
                   work->mean + guide, work->scale + guide, w, C);
        judge_number(surprisal(w, components, work->value[m]), out, apart);
    }
}
#endif
