/* Readings as tokens: z asks for a feature, u tells its value. */
#ifndef TOKENS_H
#define TOKENS_H
#include "readings.h"

#define VALUE_REACH 20.0f /* scales, as in gaussians.py */
#define LINEAR_REACH 8.0f /* scales, as in schema.py */
#define TOLD 96           /* readings that are encoded together */

/* The first hidden layer of u is linear in all that is known of a reading: a sum of shares. */
typedef struct {
    int64_t width, maps;      /* of that layer; how many maps follow */
    const float *identity;    /* (F, d) tokens z but for what a guide tells */
    const float *feature;     /* (F, width) */
    const float *number;      /* (3, width) of the value, or of the sine and the cosine of a place on a cycle */
    const float *cycle;       /* (F, 2) angle of the value 0 and of a scale, 0 where there is no cycle */
    const float *label;       /* (rows, width) */
    const int64_t *row, *labels; /* (F) the row of a feature's first label; how many labels it has, then comes "unseen" */
    const Map *map, *guidance;   /* (maps), (1) or NULL */
} Encoders;

/* Label codes beyond a feature's own mean "unseen". */
INLINE int64_t label_of(float value, int64_t labels) {
    int64_t code = value > 0 ? (value < labels ? (int64_t)value : labels) : 0;
    return code;
}

static void share(const Encoders *e, int64_t code, float value, float *out) {
    size_t width = e->width;
    const float *feature = e->feature + code * width;
    float number = fminf(fmaxf(value, -VALUE_REACH), VALUE_REACH), turn = e->cycle[2 * code + 1];
    if (e->labels[code]) {
        const float *label = e->label + (e->row[code] + label_of(value, e->labels[code])) * width;
        for (size_t i = 0; i < width; i += LANES) store(out + i, load(feature + i) + load(label + i));
    } else if (turn != 0) {
        float size = fabsf(number), far = copysignf(LINEAR_REACH + expm1f(size - LINEAR_REACH), number);
        float angle = e->cycle[2 * code] + turn * (size > LINEAR_REACH ? far : number), y = sinf(angle), x = cosf(angle);
        const float *sine = e->number + width, *cosine = sine + width;
        for (size_t i = 0; i < width; i += LANES)
            store(out + i, load(feature + i) + y * load(sine + i) + x * load(cosine + i));
    } else
        for (size_t i = 0; i < width; i += LANES) store(out + i, load(feature + i) + number * load(e->number + i));
}

/* Floats that `tell` works in, for each of `TOLD` readings. */
static size_t widest(const Encoders *e) {
    size_t most = e->width;
    for (int64_t m = 0; m + 1 < e->maps; m++) most = (size_t)e->map[m].columns > most ? (size_t)e->map[m].columns : most;
    return most;
}

/* Tokens u, (count, d). room: (2, TOLD, widest). */
static void tell(const Encoders *e, size_t d, const int64_t *code, const float *value, size_t count, float *room,
                 float *u) {
    for (size_t from = 0; from < count; from += TOLD, u += TOLD * d) {
        size_t rows = count - from < TOLD ? count - from : TOLD, width = e->width;
        float *now = room, *then = room + TOLD * widest(e);
        for (size_t r = 0; r < rows; r++) share(e, code[from + r], value[from + r], (e->maps ? now : u) + r * width);
        for (int64_t m = 0; m < e->maps; m++) {
            int last = m + 1 == e->maps;
            for (size_t i = 0; i < rows * width; i += LANES) store(now + i, larger(load(now + i), all(0)));
            mapped(e->map + m, now, width, rows, 0, last ? u : then, e->map[m].columns);
            float *spare = now;
            now = then, then = spare, width = e->map[m].columns;
        }
    }
}

/* Tokens z, (asked, d), of some records. told: (asked, guidance's inputs), where there is a guide. */
static void ask(const Encoders *e, size_t d, const Work *work, int64_t from, int64_t to, const float *told, float *z) {
    float *out = z;
    for (int64_t i = from; i < to; i++)
        for (int64_t r = 0; r < work->asked[i + 1] - work->asked[i]; r++, out += d)
            memcpy(out, e->identity + work->code[reading_of(work, i, r)] * d, d * sizeof *out);
    if (told) mapped(e->guidance, told, e->guidance->inputs, (out - z) / d, 1, z, d);
}
#endif
