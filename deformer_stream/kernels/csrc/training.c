/* The Transformer's layers over whole records, forward and back, weights' gradients included.
 *
 * Norms stand in front of the maps, so their weights become part of those of the maps, W (w n + b) + c = (W w) n + (W b + c),
 * and all that is left of them is to standardise. A record has identity tokens z and, after them, value tokens u. A unit
 * of work is some whole records, which go through all layers, forward or back, while they are in the processor's cache. */
#include "attention.h"

enum { QKV, OUT, UP, DOWN, MAPS };
enum { LINE = 64 / sizeof(num) }; /* numbers that come from memory at once */
enum { LEFT = 48 }; /* columns side by side in a left factor: whole vectors and whole ROWS */
enum { NORMS = 2, PARAMETERS = 2 * (NORMS + MAPS) }; /* weights and bias of each */

typedef struct {
    int64_t d, heads, feedforward, layers, relu;
    const float *const *own; /* (layers, PARAMETERS) the network's own weights, of norms and then of maps */
    num *on[MAPS], *back[MAPS]; /* (layers, columns / 32, inputs / PAIR, 32, PAIR), and the same of the transposed */
    float *bias[MAPS]; /* (layers, columns) */
} Network;

typedef struct {
    const Network *network;
    /* back: from gradients in `hidden` to those in z and u. unit: records of one. rows: room for a layer's tokens. z, u:
     * tokens (records, identities, d) and (records, values, d). hidden: what leaves at z */
    int64_t back, records, identities, values, unit, rows;
    float *z, *u, *hidden;
    num *n1, *qkv, *paired, *attended, *n2, *up, *slope; /* by layer: what the way back needs */
    float *own, *scale1, *scale2;
    float *by[MAPS], *by_bias; /* (shares, layers, …) gradients of folded weights and biases */
    float *const *learned;     /* (layers, PARAMETERS) gradients of the network's own */
    int64_t shares; /* of the records: always the same ones in each, so that sums run in the same order */
    int64_t *next;  /* the share to be taken next */
} Work;

typedef struct {
    num *a, *wide[4];
    float *x, *g;
    Attention attention;
} Scratch;

/* What nobody reads soon goes to memory past the cache, where a vector is a whole line. */
#if PAIR == 1 && defined(__AVX512F__)
#define PAST_CACHE 1
INLINE void put_away(num *p, v16 v) { _mm512_stream_ps(p, (__m512)v); }
#else
#define PAST_CACHE 0
INLINE void put_away(num *p, v16 v) { put(p, v); }
#endif

static float standardise(const float *x, size_t d, num *out) {
    float mean, scale = moments(x, d, &mean);
    for (size_t i = 0; i < d; i += LANES) put(out + i, (load(x + i) - mean) * scale);
    return scale;
}
/* Add to g_x what g, the gradient of a standardised row, means for the row. */
static void standardise_back(const float *g, const num *row, float scale, size_t d, float *g_x) {
    v16 total = all(0), along = all(0);
    for (size_t i = 0; i < d; i += LANES) total += load(g + i), along += load(g + i) * get(row + i);
    float mean = sum(total) / d, slope = sum(along) / d;
    for (size_t i = 0; i < d; i += LANES)
        store(g_x + i, load(g_x + i) + scale * (load(g + i) - mean - slope * get(row + i)));
}
/* Add up rows, and lay them as the left factor of a product that sums over them: (columns / LEFT, rows / PAIR, LEFT,
 * PAIR). */
static void pack_left(const num *g, size_t rows, size_t columns, num *to, float *total, int anew) {
    for (size_t n = 0; n < columns; n += LEFT, to += LEFT * whole(rows, 2))
        for (size_t i = n; i < less(n + LEFT, columns); i += LANES) {
            v16 even = all(0), odd = all(0);
            num *place = to + (i - n) * PAIR;
            for (size_t r = 0; r < rows; r += 2, place += 2 * LEFT) {
                const num *low = g + r * columns + i, *high = r + 1 < rows ? low + columns : NULL;
                copy_rows(low, high, place, LEFT);
                even += get(low), odd += high ? get(high) : all(0);
            }
            store(total + i, even + odd + (anew ? all(0) : load(total + i)));
        }
}
/* What a map's weights (columns, inputs) and its bias get from the gradients g of what it put out for rows of `a`.
 * anew: they have nothing yet. */
static void learn(const num *g, const num *a, size_t rows, size_t columns, size_t inputs, float *weights, float *bias,
                  int anew, Scratch *t) {
    size_t pairs = whole(rows, 2);
    pack_left(g, rows, columns, t->wide[3], bias, anew);
    pack_along(a, inputs, rows, inputs, t->wide[2]);
    for (size_t m = 0; m < columns; m += ROWS)
        for (size_t n = 0; n < inputs; n += COLUMNS) {
            v16 sums[ROWS][2];
            for (size_t r = m, end = less(m + ROWS, columns); r < end; r++) { /* from afar, meanwhile */
                __builtin_prefetch(weights + r * inputs + n, 1);
                __builtin_prefetch(weights + r * inputs + n + LANES, 1);
            }
            const num *left = t->wide[3] + m / LEFT * LEFT * pairs + m % LEFT * PAIR;
            product_of(left, PAIR, LEFT * PAIR, pairs, t->wide[2] + n * pairs, sums);
            for (size_t r = m, end = less(m + ROWS, columns); r < end; r++)
                for (int half = 0; half < 2; half++) {
                    float *out = weights + r * inputs + n + half * LANES;
                    store(out, sums[r - m][half] + (anew ? all(0) : load(out)));
                }
        }
}

/* What becomes of a times weights, plus bias if any: it is KEPT (num) or written WIDE (float), ADDED (float), ACTIVATED
 * with the slope beside it, or made SLOPED by that. */
enum { KEPT, WIDE, ADDED, ACTIVATED, SLOPED };
INLINE void multiply(int kind, const Network *net, const num *a, size_t rows, size_t inputs, const num *weights,
                     const float *bias, size_t columns, void *out, num *slope) {
    for (size_t n = 0; n < columns; n += COLUMNS, weights += COLUMNS * inputs)
        for (size_t m = 0; m < rows; m += ROWS) {
            v16 sums[ROWS][2];
            for (size_t r = m, end = less(m + ROWS, rows); r < end; r++) /* from afar, meanwhile */
                for (size_t i = n; i < n + COLUMNS; i += LINE) {
                    if (kind == ACTIVATED || kind == KEPT) __builtin_prefetch((num *)out + r * columns + i, 1);
                    if (kind == ACTIVATED && !PAST_CACHE) __builtin_prefetch(slope + r * columns + i, 1);
                    if (kind == SLOPED) __builtin_prefetch(slope + r * columns + i);
                }
            product(a + m * inputs, inputs, inputs, weights, sums);
            for (size_t r = m, end = less(m + ROWS, rows); r < end; r++)
                for (int half = 0; half < 2; half++) {
                    size_t column = n + half * LANES, place = r * columns + column;
                    float *wide = (float *)out + place;
                    num *narrow = (num *)out + place;
                    v16 v = sums[r - m][half] + (bias ? load(bias + column) : all(0));
                    if (kind == KEPT) put(narrow, v);
                    if (kind == WIDE) store(wide, v);
                    if (kind == ADDED) store(wide, load(wide) + v);
                    if (kind == SLOPED) put(narrow, v * get(slope + place));
                    if (kind == ACTIVATED) {
                        v16 e = net->relu ? all(0) : bell(v);
                        v16 share = net->relu ? chosen(v > 0, all(1), all(0)) : normal(v, e);
                        put(narrow, v * share);
                        share += v * 0.39894228f * e;
                        put_away(slope + place, share);
                    }
                }
        }
}

static void forward(const Network *net, const Work *work, size_t from, size_t to, Scratch *t) {
    size_t d = net->d, wide = net->feedforward, identities = work->identities, keys = work->values;
    size_t tokens = identities + keys, rows = (to - from) * tokens, first = from * tokens;
    float *x = t->x;
    for (size_t i = from; i < to; i++) {
        float *one = x + (i - from) * tokens * d;
        memcpy(one, work->z + i * identities * d, 4 * identities * d);
        memcpy(one + identities * d, work->u + i * keys * d, 4 * keys * d);
    }
    for (size_t l = 0; l < (size_t)net->layers; l++) {
        size_t begin = l * work->rows + first, last = l + 1 == (size_t)net->layers;
        size_t queries = last ? identities : tokens;
        Shape s = {identities, queries, keys, whole(keys + !keys, COLUMNS), whole(queries, 2)};
        num *n1 = work->n1 + begin * d, *qkv = work->qkv + begin * 3 * d;
        for (size_t r = 0; r < rows; r++) work->scale1[begin + r] = standardise(x + r * d, d, n1 + r * d);
        multiply(KEPT, net, n1, rows, d, net->on[QKV] + l * 3 * d * d, net->bias[QKV] + l * 3 * d, 3 * d, qkv, NULL);
        if (last) { /* from here on only identity tokens are asked for anything */
            float *hidden = work->hidden + from * identities * d;
            for (size_t i = 0; i < to - from; i++)
                memcpy(hidden + i * identities * d, x + i * tokens * d, 4 * identities * d);
            x = hidden, first = from * identities, rows = (to - from) * identities, begin = l * work->rows + first;
        }
        num *attended = work->attended + begin * d, *n2 = work->n2 + begin * d;
        num *up = work->up + begin * wide, *slope = work->slope + begin * wide;
        for (size_t i = 0; i < to - from; i++) {
            size_t place = (l * work->records + from + i) * net->heads;
            num *paired = work->paired + place * s.width * whole(tokens, 2);
            attend(d, net->heads, s, qkv + i * tokens * 3 * d, paired, work->own + place * identities,
                   attended + i * queries * d, &t->attention);
        }
        multiply(ADDED, net, attended, rows, d, net->on[OUT] + l * d * d, net->bias[OUT] + l * d, d, x, NULL);
        for (size_t r = 0; r < rows; r++) work->scale2[begin + r] = standardise(x + r * d, d, n2 + r * d);
        multiply(ACTIVATED, net, n2, rows, d, net->on[UP] + l * wide * d, net->bias[UP] + l * wide, wide, up, slope);
        multiply(ADDED, net, up, rows, wide, net->on[DOWN] + l * wide * d, net->bias[DOWN] + l * d, d, x, NULL);
    }
}

static void backward(const Network *net, const Work *work, size_t from, size_t to, size_t share, int anew,
                     Scratch *t) {
    size_t d = net->d, wide = net->feedforward, identities = work->identities, keys = work->values;
    size_t tokens = identities + keys, records = to - from;
    float *x = t->x;
    num *g_x = t->a, *g_up = t->wide[0], *g_qkv = t->wide[1];
    memcpy(x, work->hidden + from * identities * d, 4 * records * identities * d);
    for (size_t l = net->layers; l--;) {
        size_t last = l + 1 == (size_t)net->layers, queries = last ? identities : tokens, rows = records * queries;
        size_t begin = l * work->rows + from * queries, mine = share * net->layers + l;
        Shape s = {identities, queries, keys, whole(keys + !keys, COLUMNS), whole(queries, 2)};
        const num *n2 = work->n2 + begin * d, *up = work->up + begin * wide, *slope = work->slope + begin * wide;
        float *bias = work->by_bias + mine * (5 * d + wide);
        rounded(x, rows * d, g_x);
        learn(g_x, up, rows, d, wide, work->by[DOWN] + mine * wide * d, bias + 4 * d + wide, anew, t);
        multiply(SLOPED, net, g_x, rows, d, net->back[DOWN] + l * wide * d, NULL, wide, g_up, (num *)slope);
        learn(g_up, n2, rows, wide, d, work->by[UP] + mine * wide * d, bias + 4 * d, anew, t);
        multiply(WIDE, net, g_up, rows, wide, net->back[UP] + l * wide * d, NULL, d, t->g, NULL);
        for (size_t r = 0; r < rows; r++)
            standardise_back(t->g + r * d, n2 + r * d, work->scale2[begin + r], d, x + r * d);
        rounded(x, rows * d, g_x);
        learn(g_x, work->attended + begin * d, rows, d, d, work->by[OUT] + mine * d * d, bias + 3 * d, anew, t);
        multiply(KEPT, net, g_x, rows, d, net->back[OUT] + l * d * d, NULL, d, g_up, NULL);
        begin = l * work->rows + from * tokens, rows = records * tokens;
        for (size_t i = records; i--;) {
            size_t place = (l * work->records + from + i) * net->heads;
            const num *paired = work->paired + place * s.width * whole(tokens, 2);
            num *to = g_qkv + i * tokens * 3 * d;
            if (i) /* what the next one looks at comes from afar */
                for (size_t at = 0; at < tokens * 3 * d; at += 64 / sizeof(num))
                    __builtin_prefetch(work->qkv + (begin + (i - 1) * tokens) * 3 * d + at, 0, 2);
            if (last) { /* values have no queries there */
                memmove(x + i * tokens * d, x + i * identities * d, 4 * identities * d);
                memset(x + (i * tokens + identities) * d, 0, 4 * keys * d);
                for (size_t r = identities; r < tokens; r++) memset(to + r * 3 * d, 0, sizeof(num) * d);
            }
            attend_back(d, net->heads, s, work->qkv + (begin + i * tokens) * 3 * d, paired, work->own + place * identities,
                        g_up + i * queries * d, to, &t->attention);
        }
        const num *n1 = work->n1 + begin * d;
        learn(g_qkv, n1, rows, 3 * d, d, work->by[QKV] + mine * 3 * d * d, bias, anew, t);
        multiply(WIDE, net, g_qkv, rows, 3 * d, net->back[QKV] + l * 3 * d * d, NULL, d, t->g, NULL);
        for (size_t r = 0; r < rows; r++)
            standardise_back(t->g + r * d, n1 + r * d, work->scale1[begin + r], d, x + r * d);
    }
    for (size_t i = from; i < to; i++, x += tokens * d) {
        memcpy(work->z + i * identities * d, x, 4 * identities * d);
        memcpy(work->u + i * keys * d, x + identities * d, 4 * keys * d);
    }
}

/* One map of one layer. first: where its columns begin among those of all maps of the layer. weights: where its own are,
 * the bias after them. norm: where those of the norm before it are, negative where there is none. */
typedef struct {
    size_t layer, kind, columns, inputs, size, first, weights;
    int64_t norm;
} Map;
static Map map_of(const Network *net, int64_t unit) {
    size_t d = net->d, wide = net->feedforward, kind = unit % MAPS, at = unit / MAPS * PARAMETERS;
    size_t columns[] = {3 * d, d, wide, d}, first[] = {0, 3 * d, 4 * d, 4 * d + wide};
    size_t inputs = kind == DOWN ? wide : d, size = columns[kind] * inputs;
    int64_t norm = kind == QKV ? (int64_t)at : kind == UP ? (int64_t)at + 2 : -1;
    return (Map){unit / MAPS, kind, columns[kind], inputs, size, first[kind], at + 2 * (NORMS + kind), norm};
}

/* Take maps until none is left: from the network's own weights to right factors of products, forward and back. */
int64_t fold_weights(const Work *work) {
    const Network *net = work->network;
    num *folded = room(sizeof(num) * net->d * (net->feedforward + 3 * net->d));
    if (!folded) return -1;
    for (int64_t unit; (unit = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < net->layers * MAPS;) {
        Map m = map_of(net, unit);
        const float *own = net->own[m.weights], *bias = net->own[m.weights + 1];
        const float *const *norm = m.norm < 0 ? NULL : net->own + m.norm;
        for (size_t r = 0; r < m.columns; r++) {
            v16 shift = all(0);
            for (size_t i = 0; i < m.inputs; i += LANES) {
                v16 w = load(own + r * m.inputs + i);
                put(folded + r * m.inputs + i, norm ? w * load(norm[0] + i) : w);
                if (norm) shift += w * load(norm[1] + i);
            }
            net->bias[m.kind][m.layer * m.columns + r] = bias[r] + sum(shift);
        }
        pack_across(folded, m.inputs, m.columns, m.inputs, net->on[m.kind] + m.layer * m.size);
        pack_along(folded, m.inputs, m.columns, m.inputs, net->back[m.kind] + m.layer * m.size);
    }
    free(folded);
    return 0;
}

/* Take maps until none is left: from gradients of all shares to those of the network's own weights. */
int64_t unfold_gradients(const Work *work) {
    const Network *net = work->network;
    for (int64_t unit; (unit = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < net->layers * MAPS;) {
        Map m = map_of(net, unit);
        float *const *norm = m.norm < 0 ? NULL : work->learned + m.norm;
        const float *own = net->own[m.weights], *by = work->by[m.kind] + m.layer * m.size;
        for (size_t r = 0; r < m.columns; r++) {
            float shift = 0;
            for (int64_t s = 0; s < work->shares; s++)
                shift += work->by_bias[(s * net->layers + m.layer) * (5 * net->d + net->feedforward) + m.first + r];
            work->learned[m.weights + 1][r] = shift;
            for (size_t i = 0, at = r * m.inputs; i < m.inputs; i += LANES, at += LANES) {
                v16 w = load(own + at), g = all(0);
                for (int64_t s = 0; s < work->shares; s++) g += load(by + s * net->layers * m.size + at);
                if (norm) {
                    store(norm[0] + i, (r ? load(norm[0] + i) : all(0)) + g * w);
                    store(norm[1] + i, (r ? load(norm[1] + i) : all(0)) + shift * w);
                    g = g * load(net->own[m.norm] + i) + shift * load(net->own[m.norm + 1] + i);
                }
                store(work->learned[m.weights] + at, g);
            }
        }
    }
    return 0;
}

/* Take shares until none is left; several threads may. Returns 0, or -1 where memory is short. */
int64_t train_layers(const Work *work) {
    const Network *net = work->network;
    size_t d = net->d, tokens = work->identities + work->values, rows = work->unit * tokens + ROWS;
    size_t way_back = work->back ? rows : 1; /* rows that only the way back needs */
    size_t width = whole(work->values + 1, COLUMNS), one = whole(tokens, ROWS) + ROWS, square = one * width;
    size_t widest = 3 * d < (size_t)net->feedforward ? net->feedforward : 3 * d;
    size_t packed = whole(d / net->heads, COLUMNS) * (one + COLUMNS);
    Scratch t;
    Attention *a = &t.attention;
    num **halves[] = {&t.a,          &a->plain,     &a->turned, &a->packed[0], &a->packed[1], &a->packed[2],
                      &a->packed[3], &t.wide[0],    &t.wide[1], &t.wide[2],    &t.wide[3]};
    size_t wide = way_back * widest, sizes[] = {way_back * d, square, whole(width, ROWS) * one, packed, packed, packed,
                                                square, wide, wide, wide, (way_back + 2) * (widest + LEFT)};
    float **floats[] = {&t.x, &t.g, &a->scores, &a->own};
    size_t lengths[] = {rows * d, way_back * d, square, tokens};
    int fine = 1;
    for (int i = 0; i < 11; i++) fine &= (*halves[i] = room(sizeof(num) * sizes[i])) != NULL;
    for (int i = 0; i < 4; i++) fine &= (*floats[i] = room(4 * lengths[i])) != NULL;
    for (int64_t share; fine && (share = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < work->shares;) {
        size_t first = share * work->records / work->shares, end = (share + 1) * work->records / work->shares;
        for (size_t at = first; at < end; at += work->unit)
            if (work->back) backward(net, work, at, less(at + work->unit, end), share, at == first, &t);
            else forward(net, work, at, less(at + work->unit, end), &t);
    }
    for (int i = 0; i < 11; i++) free(*halves[i]);
    for (int i = 0; i < 4; i++) free(*floats[i]);
    return fine ? 0 : -1;
}
