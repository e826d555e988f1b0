/* The network over a ragged list of readings, keys and values in the pages of their records.
 *
 * A reading that is asked for has two tokens, z and u; one that only goes into the pages again has u alone, which in the
 * last layer needs neither attention nor what follows it.
 *
 * A unit of work is some whole records: each layer takes all their tokens, so units need nothing of each other, and a
 * thread takes the next one when it is done. Sums run in an order that does not depend on what else is in the unit, so
 * a reading's numbers are the same bits however its record is cut and whatever stands beside it. */
#include "head.h"

#define PAGE 16
#define CHUNK 96 /* rows whose hidden layer stays in the second cache */
#define BLOCK 4  /* vectors of attended values summed side by side */
#define MOST_HEADS 64

typedef struct {
    const float *norm1, *norm1_bias, *norm2, *norm2_bias, *qkv_bias, *out_bias, *up_bias, *down_bias;
    const num *qkv, *out, *up, *down; /* (columns / 32, inputs / PAIR, 32, PAIR) */
} Layer;

typedef struct Network {
    int64_t d, heads, feedforward, layers, kept, pre, relu;
    const Layer *layer;
    const Encoders *encoders;
    const Gaussians *gaussians; /* or NULL */
    const Head *head;
} Network;

int64_t pair(void) { return PAIR; }
int64_t cached_bytes(void) { return sizeof(cached); }

/* Layer normalisation of a row, into float and num where given. */
static void normalise(const float *x, size_t d, const float *weight, const float *bias, float *out, num *half) {
    float mean, scale = moments(x, d, &mean);
    for (size_t i = 0; i < d; i += LANES) {
        v16 y = (load(x + i) - mean) * scale * load(weight + i) + load(bias + i);
        if (out) store(out + i, y);
        if (half) put(half + i, y);
    }
}

typedef struct {
    num *a, *hidden, *query; /* (rows, d), (CHUNK, feedforward), (2, d) */
    float *x, *qkv, *weights; /* (rows, d) a unit's tokens z, then its u; (rows, 3 d), (2, heads, most tokens + PAGE) */
    float *room;             /* of encoders and head */
    double *expected;        /* (most readings of a record, components) */
    size_t most;
    Errand errand;
} Scratch;

/* Keys go into a page column by column, (d / CACHED_PAIR, PAGE, CACHED_PAIR); values row by row, (PAGE, d), vectors in
 * pairs. */
static void keep(const float *qkv, size_t d, cached *page, size_t place) {
    cached key[LANES];
    for (size_t i = 0; i < d; i += LANES) {
        put_cached(key, load(qkv + d + i));
        for (size_t j = 0; j < LANES; j += CACHED_PAIR)
            memcpy(page + ((i + j) / CACHED_PAIR * PAGE + place) * CACHED_PAIR, key + j, sizeof(cached) * CACHED_PAIR);
    }
    for (size_t i = 0; i < d; i += 2 * LANES)
        put_both(page + PAGE * d + place * d + i, load(qkv + 2 * d + i), load(qkv + 2 * d + i + LANES));
}

/* Weighted sums of values for BLOCK vectors of the output from vector `from` on; weight(q, vector) is w[q][head]. */
INLINE void gather(int queries, int blocks, const cached *const *page, const size_t *seen, size_t d, size_t d_head,
                   size_t from, const float *weights, size_t stride, size_t heads, v16 out[2][BLOCK]) {
    const float *w[2][BLOCK];
    v16 c[2][BLOCK];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < blocks; v++) {
            c[q][v] = all(0);
            w[q][v] = weights + (q * heads + (from + v * LANES) / d_head) * stride;
        }
    for (size_t t = 0, most = seen[queries - 1]; t < most; t++) {
        const cached *row = page[t / PAGE] + PAGE * d + t % PAGE * d + from;
        for (int v = 0; v < blocks; v += 2) {
            v16 low, high;
            get_both(row + v * LANES, &low, &high);
            for (int q = 0; q < queries; q++) c[q][v] += w[q][v][t] * low, c[q][v + 1] += w[q][v + 1][t] * high;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < blocks; v++) out[q][v] = c[q][v];
}

/* One reading's queries (z, u, or both) over the first seen[q] tokens of its pages; with `own` the first of them, the
 * identity token z, sees itself besides. qkv: (queries) rows of 3 d; out: (queries) rows of d. */
INLINE void attend(int queries, const Network *net, const float *const *qkv, const cached *const *page, const size_t *seen,
                   int own, Scratch *s, num *const *out) {
    size_t d = net->d, heads = net->heads, d_head = d / heads;
    size_t most = seen[queries - 1], pages = (most + PAGE - 1) / PAGE, stride = s->most;
    float scale = 1.0f / sqrtf((float)d_head), self[MOST_HEADS] = {0}, norm[2][MOST_HEADS] = {{0}};
    v16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int q = 0; q < queries; q++)
        for (size_t i = 0; i < d; i += LANES) put(s->query + q * d + i, load(qkv[q] + i) * scale);
    for (size_t h = 0; h < heads; h++) {
        v16 top[2] = {all(-INFINITY), all(-INFINITY)};
        for (size_t p = 0; p < pages; p++) {
            v16 c[2][4];
            for (int q = 0; q < queries; q++)
                for (int j = 0; j < 4; j++) c[q][j] = all(0);
            const cached *keys = page[p] + h * d_head * PAGE;
            const num *query = s->query + h * d_head;
            for (size_t i = 0; i < d_head; i += 4 * CACHED_PAIR)
                for (int j = 0; j < 4; j++)
                    for (int q = 0; q < queries; q++)
                        c[q][j] = dot_cached(c[q][j], query + q * d + i + j * CACHED_PAIR,
                                             keys + (i + j * CACHED_PAIR) * PAGE);
            for (int q = 0; q < queries; q++) {
                v16 score = (c[q][0] + c[q][1]) + (c[q][2] + c[q][3]);
                score = chosen(lanes + (float)(p * PAGE) < (float)seen[q], score, all(-INFINITY));
                top[q] = larger(top[q], score);
                store(s->weights + (q * heads + h) * stride + p * PAGE, score);
            }
        }
        for (int q = 0; q < queries; q++) {
            float *w = s->weights + (q * heads + h) * stride, peak = largest(top[q]);
            if (own && q == 0) { /* the key in the precision of those in pages */
                num key[LANES];
                v16 product = all(0);
                for (size_t i = 0; i < d_head; i += LANES) {
                    put(key, load(qkv[0] + d + h * d_head + i));
                    product += get(s->query + h * d_head + i) * get(key);
                }
                self[h] = sum(product);
                peak = self[h] > peak ? self[h] : peak;
                self[h] -= peak;
            }
            v16 total = all(0);
            for (size_t p = 0; p < pages; p++) {
                v16 e = exponential(load(w + p * PAGE) - peak);
                e = chosen(lanes + (float)(p * PAGE) < (float)seen[q], e, all(0));
                total += e;
                store(w + p * PAGE, e);
            }
            norm[q][h] = sum(total);
        }
    }
    for (size_t h = 0; h < heads; h += LANES) {
        if (own) {
            v16 e = exponential(load(self + h));
            store(self + h, e);
            store(norm[0] + h, load(norm[0] + h) + e);
        }
        for (int q = 0; q < queries; q++) store(norm[q] + h, 1.0f / load(norm[q] + h));
    }
    for (size_t from = 0; from < d; from += BLOCK * LANES) {
        v16 c[2][BLOCK];
        gather(queries, BLOCK, page, seen, d, d_head, from, s->weights, stride, heads, c);
        for (int v = 0; v < BLOCK; v++) {
            size_t i = from + v * LANES, h = i / d_head;
            for (int q = 0; q < queries; q++) {
                if (own && q == 0) {
                    num value[LANES];
                    put(value, load(qkv[0] + 2 * d + i));
                    c[q][v] += self[h] * get(value);
                }
                put(out[q] + i, c[q][v] * norm[q][h]);
            }
        }
    }
}
static void attend_both(const Network *net, const float *const *qkv, const cached *const *page, const size_t *seen, int own,
                        Scratch *s, num *const *out) {
    attend(2, net, qkv, page, seen, own, s, out);
}
static void attend_one(const Network *net, const float *const *qkv, const cached *const *page, const size_t *seen, int own,
                       Scratch *s, num *const *out) {
    attend(1, net, qkv, page, seen, own, s, out);
}

/* The residual branches after attention. x: (rows, d) floats, attended: (rows, d). */
static void finish(const Network *net, const Layer *layer, float *x, num *attended, size_t rows, Scratch *s) {
    size_t d = net->d, wide = net->feedforward;
    for (size_t from = 0; from < rows; from += CHUNK) {
        size_t n = rows - from < CHUNK ? rows - from : CHUNK;
        float *part = x + from * d;
        num *a = attended + from * d;
        add(a, n, d, layer->out, layer->out_bias, d, part, &s->errand);
        for (size_t r = 0; r < n; r++)
            if (net->pre) normalise(part + r * d, d, layer->norm2, layer->norm2_bias, NULL, a + r * d);
            else normalise(part + r * d, d, layer->norm1, layer->norm1_bias, part + r * d, a + r * d);
        activate(net->relu, a, n, d, layer->up, layer->up_bias, wide, s->hidden, &s->errand);
        add(s->hidden, n, wide, layer->down, layer->down_bias, d, part, &s->errand);
        for (size_t r = 0; r < n && !net->pre; r++)
            normalise(part + r * d, d, layer->norm2, layer->norm2_bias, part + r * d, NULL);
    }
}

/* Places of a record's pages that are in use when all its new readings are in. */
static size_t held(const Work *work, int64_t record) {
    size_t most = 0, count = work->first[record + 1] - work->first[record];
    if (!work->place) return work->start[record] + count;
    for (size_t r = 0; r < count; r++) {
        size_t end = work->place[work->first[record] + r] + 1;
        most = end > most ? end : most;
    }
    return most;
}

/* z, u: rows of queries, keys and values of what is asked for and of all; the results go to `attended`, in that order. */
static void attend_record(const Network *net, const Work *work, int64_t record, size_t l, const float *z,
                          const float *u, Scratch *s, num *attended_z, num *attended_u, const cached **page) {
    size_t d = net->d, begin = work->first[record], count = work->first[record + 1] - begin;
    size_t silent = count - (work->asked[record + 1] - work->asked[record]);
    int last = l + 1 == (size_t)net->layers, both = net->kept == 2;
    for (size_t p = 0; p < (held(work, record) * net->kept + PAGE - 1) / PAGE; p++)
        page[p] = (cached *)(work->pool + work->pages[record * work->columns + p] * work->page_bytes) + l * 2 * PAGE * d;
    for (size_t r = 0; r < count; r++, u += 3 * d, attended_u += d) {
        size_t before = work->place ? work->place[begin + r] : work->start[record] + r;
        size_t seen[2] = {both ? 2 * before + 1 : before, both ? 2 * before + 2 : before + 1};
        const float *rows[2] = {z, u};
        num *out[2] = {attended_z, attended_u};
        for (size_t t = seen[1] - net->kept; t < seen[1]; t++)
            keep(t + 1 < seen[1] ? z : u, d, (cached *)page[t / PAGE], t % PAGE);
        if (r < silent) {
            if (!last) attend_one(net, rows + 1, page, seen + 1, 0, s, out + 1);
            continue;
        }
        if (last) attend_one(net, rows, page, seen, !both, s, out);
        else attend_both(net, rows, page, seen, !both, s, out);
        z += 3 * d, attended_z += d;
    }
}

/* The blocks of a unit's records that attention of a layer will read, spread over so many products. */
static void send(const Network *net, size_t l, size_t products, Errand *e) {
    e->bytes = 2 * PAGE * net->d * sizeof(cached);
    e->offset = l * e->bytes;
    e->at = e->line = 0;
    e->share = l < (size_t)net->layers ? e->blocks * (e->bytes / 64) / products + 1 : 0;
}
static void list_blocks(const Network *net, const Work *work, int64_t from, int64_t to, Errand *e) {
    e->blocks = 0;
    for (int64_t i = from; i < to; i++)
        for (int64_t p = 0; p < (work->start[i] * net->kept + PAGE - 1) / PAGE; p++)
            e->block[e->blocks++] = work->pool + work->pages[i * work->columns + p] * work->page_bytes;
}

/* From readings to tokens, those of what is asked for before all others. */
static void enter(const Network *net, const Work *work, int64_t from, int64_t to, Scratch *s) {
    int64_t begin = work->first[from], asked = work->asked[to] - work->asked[from];
    const Gaussians *g = net->gaussians;
    if (g) {
        expect_all(g, work, from, to, s->expected);
        tell_guide(g, work, from, to, s->qkv);
    }
    ask(net->encoders, net->d, work, from, to, g ? s->qkv : NULL, s->x);
    tell(net->encoders, net->d, work->code + begin, work->value + begin, work->first[to] - begin, s->room,
         s->x + asked * net->d);
}

static void run_unit(const Network *net, const Work *work, int64_t from, int64_t to, Scratch *s, const cached **page) {
    int64_t begin = work->first[from], ask = work->asked[from];
    size_t d = net->d, asked = work->asked[to] - ask, rows = asked + work->first[to] - begin;
    float *x = s->x;
    enter(net, work, from, to, s);
    size_t tiles = (rows + ROWS - 1) / ROWS, wide = net->feedforward;
    list_blocks(net, work, from, to, &s->errand);
    send(net, 0, tiles * 3 * d / COLUMNS, &s->errand);
    for (size_t l = 0; l < (size_t)net->layers; l++) {
        const Layer *layer = net->layer + l;
        int last = l + 1 == (size_t)net->layers;
        for (size_t r = 0; r < rows; r++)
            if (net->pre) normalise(x + r * d, d, layer->norm1, layer->norm1_bias, NULL, s->a + r * d);
            else rounded(x + r * d, d, s->a + r * d);
        /* From the last layer on only identity tokens are asked for anything: values have no query there. */
        size_t queries = last ? asked : rows;
        project(s->a, (Rows){queries, d, 3 * d}, d, layer->qkv, layer->qkv_bias, d, s->qkv, &s->errand);
        project(s->a, (Rows){rows, d, 3 * d}, d, layer->qkv + d * d, layer->qkv_bias + d, 2 * d, s->qkv + d,
                &s->errand);
        for (int64_t i = from; i < to; i++) {
            size_t row_z = work->asked[i] - ask, row_u = asked + work->first[i] - begin;
            attend_record(net, work, i, l, s->qkv + row_z * 3 * d, s->qkv + row_u * 3 * d, s, s->a + row_z * d,
                          s->a + row_u * d, page);
        }
        send(net, l + 1, tiles * (2 * d + wide) / COLUMNS, &s->errand);
        finish(net, layer, x, s->a, queries, s);
    }
    if (work->hidden) {
        memcpy(work->hidden + ask * d, x, asked * d * sizeof *x);
        return;
    }
    for (size_t r = 0; r < asked && net->head->norm; r++)
        normalise(x + r * d, d, net->head->norm, net->head->norm_bias, x + r * d, NULL);
    judge(net->head, net->gaussians, work, from, to, d, x, s->room);
}

/* The record that a unit begins with: it has the records of which a token of its own `unit_tokens` is the first. */
static int64_t begin_of(const Work *work, int64_t unit) {
    int64_t low = 0, high = work->records;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (work->first[middle] + work->asked[middle] < unit * work->unit_tokens) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Take units until none is left; several threads may. Returns 0, or -1 where memory is short. */
int64_t score_readings(const Work *work) {
    const Network *net = work->network;
    size_t rows = 0, most = 0, blocks = 0, d = net->d, R = work->records;
    int64_t units = (work->first[R] + work->asked[R]) / work->unit_tokens + 1;
    for (int64_t u = 0, from, to; u < units; u++) {
        from = begin_of(work, u), to = begin_of(work, u + 1);
        size_t n = work->first[to] - work->first[from] + work->asked[to] - work->asked[from];
        rows = n > rows ? n : rows;
        size_t old = 0;
        for (int64_t i = from; i < to; i++)
            old += (work->start[i] * net->kept + PAGE - 1) / PAGE;
        blocks = old > blocks ? old : blocks;
    }
    for (size_t i = 0; i < R; i++) {
        size_t n = held(work, i);
        most = n > most ? n : most;
    }
    rows = whole(rows, ROWS);
    size_t encoded = 2 * TOLD * widest(net->encoders), judged = room_to_judge(net->head);
    size_t told = net->gaussians ? 3 * net->gaussians->components : 0;
    Scratch s = {.most = (most * net->kept + PAGE) / PAGE * PAGE};
    s.x = room(rows * d * sizeof(float));
    s.a = room(rows * d * sizeof(num));
    s.hidden = room(whole(CHUNK, ROWS) * net->feedforward * sizeof(num));
    s.query = room(2 * d * sizeof(num));
    s.qkv = room(rows * (told > 3 * d ? told : 3 * d) * sizeof(float));
    s.weights = room(2 * net->heads * s.most * sizeof(float));
    s.room = room((encoded > judged ? encoded : judged) * sizeof(float));
    s.expected = room(net->gaussians ? (most + 1) * net->gaussians->padded * sizeof(double) : 1);
    const cached **page = room((s.most / PAGE + 1) * sizeof *page);
    s.errand.block = room((blocks + 1) * sizeof *s.errand.block);
    int fine = s.errand.block && s.x && s.a && s.hidden && s.query && s.qkv && s.weights && s.room && s.expected && page;
    if (fine)
        for (int64_t u; (u = __atomic_fetch_add(work->next, 1, __ATOMIC_RELAXED)) < units;)
            if (begin_of(work, u) < begin_of(work, u + 1))
                run_unit(net, work, begin_of(work, u), begin_of(work, u + 1), &s, page);
    free(s.x), free(s.a), free(s.hidden), free(s.query), free(s.qkv), free(s.weights), free(s.room), free(s.expected);
    free(page), free(s.errand.block);
    return fine ? 0 : -1;
}
