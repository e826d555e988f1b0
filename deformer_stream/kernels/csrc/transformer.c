/* The Transformer over new readings of many records, with keys and values in the pages of the KV cache.
 *
 * A scored reading has two tokens: the query token z (which feature is next) and the observation token u (feature and
 * value). A reading that was scored before and is only written to the cache again has u alone. In the last layer only
 * outputs at z are used, so u needs neither attention nor the feed-forward part there. A model caches either u alone or
 * both tokens of a reading (tokens_per_reading is 1 or 2).
 *
 * A unit of work consists of a few records, whose tokens go through the layers together. Units are independent: each
 * thread takes the next unit when it has finished one. The order of each sum does not depend on the rest of the unit.
 * Thus a reading has the same score to the last bit, however its record is split into batches.
 *
 * A page holds the keys and values of KV_PAGE_TOKENS tokens of all layers. Per layer: keys as columns, (d / KV_WIDTH,
 * KV_PAGE_TOKENS, KV_WIDTH), so that a vector holds one number of LANES keys. Then values as rows, (KV_PAGE_TOKENS,
 * d), in interleaved pairs of vectors (`store_kv_pair`). If readings are irregular, the readings themselves follow
 * (reading_context.h). */
#include "output_head.h"

#define FEEDFORWARD_ROWS 96          /* rows whose hidden layer stays in the second-level cache */
#define MAX_PREFETCH_BYTES (1 << 20) /* keys and values that are prefetched for a unit: half of a cache of 2 MiB */
#define VALUE_VECTORS 4              /* vectors of attended values that are summed side by side */

/* The scratch memory of one thread. "rows" is the number of tokens of the largest unit: first all z, then all u. */
typedef struct {
    float *x;               /* (rows, d) tokens */
    factor_t *a;            /* (rows, d) factor of the next product */
    float *qkv;             /* (rows, 3 d) queries, keys, values; before the first layer: inputs of the query tokens */
    factor_t *hidden;       /* (FEEDFORWARD_ROWS, feedforward) */
    factor_t *query;        /* (2, d) scaled queries of one reading */
    float *weights;         /* (2, heads, max_tokens) attention weights of one reading */
    float *floats;          /* scratch of the encoder and of the head */
    float *time_inputs;     /* (rows, T) inputs that express the times of irregular readings */
    ContextScratch context;
    const kv_t **pages;     /* (max_tokens / KV_PAGE_TOKENS + 1) for each page of a record, where one layer begins */
    size_t max_tokens;      /* most tokens of a record, rounded up to whole pages */
    PagePrefetch prefetch;
} Scratch;

/* Return the number of pages that hold `tokens` tokens. */
INLINE size_t pages_of(size_t tokens) { return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; }

/* Return 1 / standard deviation of d numbers, and write their mean to `mean`. As in PyTorch, 1e-5 is added to the
 * variance, so that equal numbers cause no division by 0. */
INLINE float inverse_deviation(const float *x, size_t d, float *mean) {
    float_vector total = splat(0), squares = splat(0);
    for (size_t i = 0; i < d; i += LANES) total += load(x + i);
    *mean = reduce_sum(total) / d;
    for (size_t i = 0; i < d; i += LANES) {
        float_vector y = load(x + i) - *mean;
        squares += y * y;
    }
    return 1.0f / sqrtf(reduce_sum(squares) / d + 1e-5f);
}

/* Apply layer normalisation to a token x, (d), and write the result as floats, as factors of the next product, or both.
 *
 * One of the two outputs may be NULL. floats may be x itself. */
static void layer_norm(const float *x, size_t d, const float *weight, const float *bias, float *floats,
                       factor_t *factors) {
    float mean, scale = inverse_deviation(x, d, &mean);
    for (size_t i = 0; i < d; i += LANES) {
        float_vector y = (load(x + i) - mean) * scale * load(weight + i) + load(bias + i);
        if (floats) store(floats + i, y);
        if (factors) store_factors(factors + i, y);
    }
}

/* Write the key and the value of a token into a page, in the layout that the beginning of this file describes.
 *
 * qkv: (3 d) the token's query, key and value. place: the index of the token in the page. */
static void write_key_value(const float *qkv, size_t d, kv_t *page, size_t place) {
    kv_t key[LANES];
    for (size_t i = 0; i < d; i += LANES) {
        store_kv(key, load(qkv + d + i));
        for (size_t j = 0; j < LANES; j += KV_WIDTH) {
            kv_t *column = page + ((i + j) / KV_WIDTH * KV_PAGE_TOKENS + place) * KV_WIDTH; /* numbers i + j and on */
            memcpy(column, key + j, sizeof(kv_t) * KV_WIDTH);
        }
    }
    kv_t *row = page + KV_PAGE_TOKENS * d + place * d;
    for (size_t i = 0; i < d; i += 2 * LANES)
        store_kv_pair(row + i, load(qkv + 2 * d + i), load(qkv + 2 * d + i + LANES));
}

/* The attention of one reading over the tokens in its record's pages. It has one or two queries: those of the tokens z,
 * u, or both in this order. */
typedef struct {
    size_t d, num_heads, d_head;
    const float *const *qkv;  /* (queries) for each query, the 3 d numbers of its token: query, key and value */
    const kv_t *const *pages; /* for each page of the record, the keys and values of this layer */
    const size_t *num_seen;   /* (queries) how many tokens of the pages each query sees; never fewer for the second */
    int sees_itself;          /* whether the first query also sees its own token, which is in no page */
    factor_t *query;          /* (2, d) scratch: the scaled queries */
    float *weights;           /* (2, heads, max_tokens) scratch: attention scores, later attention weights */
    size_t max_tokens;        /* row length of `weights` */
} Attention;

/* Compute the attention scores (query times key) of one head for the tokens in the pages, and write them to a->weights.
 *
 * The last vector may have tokens that a query does not see; their scores are -infinity. queries: the number of queries,
 * 1 or 2, a compile-time constant. largest: output, for each query a vector whose largest lane is the largest score. */
INLINE void score_keys(int queries, const Attention *a, size_t head, float_vector largest[2]) {
    for (int q = 0; q < queries; q++) largest[q] = splat(-INFINITY);
    for (size_t t = 0; t < a->num_seen[queries - 1]; t += LANES) { /* the last query sees the most tokens */
        float_vector c[2][4]; /* four partial sums, so that additions do not wait for each other */
        for (int q = 0; q < queries; q++)
            for (int j = 0; j < 4; j++) c[q][j] = splat(0);
        const kv_t *keys = a->pages[t / KV_PAGE_TOKENS] + head * a->d_head * KV_PAGE_TOKENS;
        keys += t % KV_PAGE_TOKENS * KV_WIDTH;
        const factor_t *query = a->query + head * a->d_head;
        for (size_t i = 0; i < a->d_head; i += 4 * KV_WIDTH)
            for (int j = 0; j < 4; j++)
                for (int q = 0; q < queries; q++)
                    c[q][j] = multiply_add_kv(c[q][j], query + q * a->d + i + j * KV_WIDTH,
                                              keys + (i + j * KV_WIDTH) * KV_PAGE_TOKENS);
        for (int q = 0; q < queries; q++) {
            float_vector score = (c[q][0] + c[q][1]) + (c[q][2] + c[q][3]);
            float_vector position = lane_numbers() + (float)t;
            score = select_lanes(position < (float)a->num_seen[q], score, splat(-INFINITY));
            largest[q] = vector_max(largest[q], score);
            store(a->weights + (q * a->num_heads + head) * a->max_tokens + t, score);
        }
    }
}

/* Return one head's attention score of the first query for the key of its own token.
 *
 * The key is rounded like the keys in pages, so that it does not matter for the score where a key comes from. */
INLINE float score_own_key(const Attention *a, size_t head) {
    factor_t key[LANES];
    float_vector product = splat(0);
    for (size_t i = head * a->d_head; i < (head + 1) * a->d_head; i += LANES) {
        store_factors(key, load(a->qkv[0] + a->d + i));
        product += load_factors(a->query + i) * load_factors(key);
    }
    return reduce_sum(product);
}

/* Replace the attention scores of one query and head by e^(score - peak), and return the sum of the results.
 *
 * peak: the largest score, which is subtracted so that nothing overflows. num_tokens: the number of scores. Those of
 * tokens that the query does not see, after the first num_seen, become 0. */
INLINE float exponentiate(float *scores, size_t num_tokens, size_t num_seen, float peak) {
    float_vector total = splat(0);
    for (size_t t = 0; t < num_tokens; t += LANES) {
        float_vector e = exponential(load(scores + t) - peak), position = lane_numbers() + (float)t;
        e = select_lanes(position < (float)num_seen, e, splat(0));
        total += e;
        store(scores + t, e);
    }
    return reduce_sum(total);
}

/* Sum the values in the pages, weighted by a->weights, for VALUE_VECTORS vectors of each query's output: out.
 *
 * queries: the number of queries, 1 or 2. from: the index of the first number of these vectors among the d numbers of a
 * value, which are those of all heads, one head after the other. */
INLINE void sum_values(int queries, const Attention *a, size_t from, float_vector out[2][VALUE_VECTORS]) {
    const float *w[2][VALUE_VECTORS]; /* the weights of the head to which each vector belongs */
    float_vector c[2][VALUE_VECTORS];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < VALUE_VECTORS; v++) {
            c[q][v] = splat(0);
            w[q][v] = a->weights + (q * a->num_heads + (from + v * LANES) / a->d_head) * a->max_tokens;
        }
    /* The last query sees the most tokens; the weights of tokens that the first one does not see are 0. */
    for (size_t t = 0, num_tokens = a->num_seen[queries - 1]; t < num_tokens; t++) {
        const kv_t *values = a->pages[t / KV_PAGE_TOKENS] + KV_PAGE_TOKENS * a->d;
        const kv_t *row = values + t % KV_PAGE_TOKENS * a->d + from;
        for (int v = 0; v < VALUE_VECTORS; v += 2) {
            float_vector low, high;
            load_kv_pair(row + v * LANES, &low, &high);
            for (int q = 0; q < queries; q++) c[q][v] += w[q][v][t] * low, c[q][v + 1] += w[q][v + 1][t] * high;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < VALUE_VECTORS; v++) out[q][v] = c[q][v];
}

/* Compute the attention of one reading's queries: softmax of the scores, then the weighted sum of the values.
 *
 * queries: the number of queries, 1 or 2, a compile-time constant. out: for each query the d numbers of its output, as
 * factors of the next product. The sum of a softmax (norm) divides the output instead of each weight. */
INLINE void attend(int queries, const Attention *a, factor_t *const *out) {
    size_t d = a->d;
    float query_scale = 1.0f / sqrtf((float)a->d_head);
    float own_weight[MAX_HEADS] = {0}, norm[2][MAX_HEADS] = {{0}};
    for (int q = 0; q < queries; q++)
        for (size_t i = 0; i < d; i += LANES) store_factors(a->query + q * d + i, load(a->qkv[q] + i) * query_scale);
    for (size_t h = 0; h < a->num_heads; h++) {
        float_vector largest[2];
        score_keys(queries, a, h, largest);
        for (int q = 0; q < queries; q++) {
            float peak = reduce_max(largest[q]);
            if (a->sees_itself && q == 0) {
                float own = score_own_key(a, h);
                peak = own > peak ? own : peak;
                own_weight[h] = own - peak;
            }
            float *scores = a->weights + (q * a->num_heads + h) * a->max_tokens;
            norm[q][h] = exponentiate(scores, a->num_seen[queries - 1], a->num_seen[q], peak);
        }
    }
    for (size_t h = 0; h < a->num_heads; h += LANES) { /* from here on, norm is 1 / sum */
        if (a->sees_itself) {
            float_vector e = exponential(load(own_weight + h));
            store(own_weight + h, e);
            store(norm[0] + h, load(norm[0] + h) + e);
        }
        for (int q = 0; q < queries; q++) store(norm[q] + h, 1.0f / load(norm[q] + h));
    }
    for (size_t from = 0; from < d; from += VALUE_VECTORS * LANES) {
        float_vector c[2][VALUE_VECTORS];
        sum_values(queries, a, from, c);
        for (int v = 0; v < VALUE_VECTORS; v++) {
            size_t i = from + v * LANES, h = i / a->d_head;
            for (int q = 0; q < queries; q++) {
                if (a->sees_itself && q == 0) {
                    factor_t value[LANES];
                    store_factors(value, load(a->qkv[0] + 2 * d + i));
                    c[q][v] += own_weight[h] * load_factors(value);
                }
                store_factors(out[q] + i, c[q][v] * norm[q][h]);
            }
        }
    }
}

/* Call `attend` for one query (attend_one) or for two (attend_both), so that it is compiled once for each.
 *
 * The structure is passed by value, so that its fields can stay in registers. For a structure behind a pointer, the
 * compiler would have to assume that each write to another array can change the fields. */
static void attend_one(Attention a, factor_t *const *out) { attend(1, &a, out); }
static void attend_both(Attention a, factor_t *const *out) { attend(2, &a, out); }

/* Return the number of readings that a record's pages hold after its new readings have been written.
 *
 * A reading with a depth k is written as reading number k, so the largest depth determines the number. */
static size_t final_length(const Batch *batch, int64_t record) {
    size_t longest = 0, count = batch->offsets[record + 1] - batch->offsets[record];
    if (!batch->depths) return batch->num_cached[record] + count;
    for (size_t r = 0; r < count; r++) longest = max_size(longest, batch->depths[batch->offsets[record] + r] + 1);
    return longest;
}

/* Compute the attention of one record's new readings in a layer, and write their keys and values into its pages.
 *
 * z: (scored readings, 3 d) query, key and value of each query token. u: (new readings, 3 d) those of each observation
 * token. attended_z, attended_u: outputs, (scored readings, d) and (new readings, d). The readings are processed in
 * their order, so that each of them finds the keys and values of the earlier ones in the pages. */
static void attend_record(const Network *net, const Batch *batch, int64_t record, size_t layer, const float *z,
                          const float *u, Scratch *s, factor_t *attended_z, factor_t *attended_u) {
    size_t d = net->d, begin = batch->offsets[record], count = batch->offsets[record + 1] - begin;
    size_t num_unscored = count - (batch->query_offsets[record + 1] - batch->query_offsets[record]);
    int is_last = layer + 1 == (size_t)net->num_layers, are_both_cached = net->tokens_per_reading == 2;
    for (size_t p = 0; p < pages_of(final_length(batch, record) * net->tokens_per_reading); p++)
        s->pages[p] = (kv_t *)page_address(batch, record, p) + layer * 2 * KV_PAGE_TOKENS * d;
    for (size_t r = 0; r < count; r++, u += 3 * d, attended_u += d) {
        size_t depth = batch->depths ? (size_t)batch->depths[begin + r] : batch->num_cached[record] + r;
        /* z sees the tokens before its reading (and itself), u sees its own reading's too */
        size_t num_seen[2] = {are_both_cached ? 2 * depth + 1 : depth, are_both_cached ? 2 * depth + 2 : depth + 1};
        const float *rows[2] = {z, u};
        factor_t *out[2] = {attended_z, attended_u};
        /* Write u as the last token that it sees itself, and z before it if both are cached. */
        for (size_t t = num_seen[1] - net->tokens_per_reading; t < num_seen[1]; t++) {
            kv_t *page = (kv_t *)s->pages[t / KV_PAGE_TOKENS];
            write_key_value(t + 1 < num_seen[1] ? z : u, d, page, t % KV_PAGE_TOKENS);
        }
        Attention a = {
            .d = d, .num_heads = net->num_heads, .d_head = d / net->num_heads, .qkv = rows, .pages = s->pages,
            .num_seen = num_seen, .sees_itself = !are_both_cached, .query = s->query, .weights = s->weights,
            .max_tokens = s->max_tokens,
        };
        if (r < num_unscored) { /* the reading has no z: u is the only query */
            a.qkv = rows + 1, a.num_seen = num_seen + 1, a.sees_itself = 0;
            if (!is_last) attend_one(a, out + 1);
            continue;
        }
        if (is_last) attend_one(a, out);
        else attend_both(a, out);
        z += 3 * d, attended_z += d;
    }
}

/* Apply the rest of a layer after attention: the output map, the feed-forward part, and both residual connections.
 *
 * x: (num_rows, d) tokens, updated. attended: (num_rows, d) outputs of attention, overwritten. Only FEEDFORWARD_ROWS
 * tokens are computed at once, so that their hidden layer stays in the processor's cache. A pre-norm model normalises
 * the input of the feed-forward part. Other models normalise the tokens after each of the two residual connections. */
static void finish_layer(const Network *net, const Layer *layer, float *x, factor_t *attended, size_t num_rows,
                         Scratch *s) {
    size_t d = net->d, wide = net->feedforward;
    for (size_t from = 0; from < num_rows; from += FEEDFORWARD_ROWS) {
        size_t n = min_size(num_rows - from, FEEDFORWARD_ROWS);
        Rows narrow = {n, d, d}, up = {n, d, wide}, down = {n, wide, d};
        float *tokens = x + from * d;
        factor_t *a = attended + from * d;
        gemm(ADD, a, narrow, d, layer->out, layer->out_bias, d, tokens, &s->prefetch);
        for (size_t r = 0; r < n; r++) {
            float *token = tokens + r * d;
            if (net->is_pre_norm) layer_norm(token, d, layer->norm2_weight, layer->norm2_bias, NULL, a + r * d);
            else layer_norm(token, d, layer->norm1_weight, layer->norm1_bias, token, a + r * d);
        }
        if (net->activation == ACTIVATION_RELU)
            gemm(STORE_RELU, a, up, d, layer->up, layer->up_bias, wide, s->hidden, &s->prefetch);
        else gemm(STORE_GELU, a, up, d, layer->up, layer->up_bias, wide, s->hidden, &s->prefetch);
        gemm(ADD, s->hidden, down, wide, layer->down, layer->down_bias, d, tokens, &s->prefetch);
        for (size_t r = 0; r < n && !net->is_pre_norm; r++)
            layer_norm(tokens + r * d, d, layer->norm2_weight, layer->norm2_bias, tokens + r * d, NULL);
    }
}

/* List the pages that hold cached tokens of the records from `from` to before `to`, so that they can be prefetched. */
static void list_pages(const Network *net, const Batch *batch, int64_t from, int64_t to, PagePrefetch *p) {
    p->num_pages = 0;
    for (int64_t i = from; i < to; i++)
        for (size_t column = 0; column < pages_of(batch->num_cached[i] * net->tokens_per_reading); column++)
            p->pages[p->num_pages++] = page_address(batch, i, column);
}

/* Start to prefetch the keys and values of a layer in the listed pages.
 *
 * num_tiles: the number of tiles of matrix products that are computed before the keys and values are needed. Each of
 * them prefetches an equal part. Nothing is prefetched after the last layer, and nothing if there is more than the
 * processor's cache can keep until it is needed: long contexts would be loaded twice. */
static void start_prefetch(const Network *net, size_t layer, size_t num_tiles, PagePrefetch *p) {
    p->bytes = 2 * KV_PAGE_TOKENS * net->d * sizeof(kv_t);
    p->offset = layer * p->bytes;
    p->page_index = p->line = 0;
    int is_used = layer < (size_t)net->num_layers && p->num_pages * p->bytes <= MAX_PREFETCH_BYTES;
    p->lines_per_tile = is_used ? p->num_pages * (p->bytes / 64) / num_tiles + 1 : 0;
}

/* Compute the input tokens of the records from `from` to before `to` into s->x: z of the scored readings, then u of all
 * new readings. */
static void encode_unit(const Network *net, const Batch *batch, int64_t from, int64_t to, Scratch *s) {
    int64_t begin = batch->offsets[from], num_queries = batch->query_offsets[to] - batch->query_offsets[from];
    const float *time_inputs = NULL;
    if (net->prior) compute_prior(net->prior, batch, from, to);
    if (has_contexts(net)) compute_contexts(net, batch, from, to, &s->context, s->time_inputs);
    if (net->times) time_inputs = s->time_inputs;
    build_query_inputs(net, batch, from, to, time_inputs, s->qkv);
    encode_queries(net->encoder, net->d, batch, from, to, s->qkv, s->x);
    encode_observations(net->encoder, net->d, batch->features + begin, batch->values + begin, time_inputs,
                        batch->offsets[to] - begin, s->floats, s->x + num_queries * net->d);
}

/* Score the records from `from` to before `to`: encode their readings, apply all layers, and write batch->hidden or
 * batch->score_terms. */
static void run_unit(const Network *net, const Batch *batch, int64_t from, int64_t to, Scratch *s) {
    int64_t begin = batch->offsets[from], first_query = batch->query_offsets[from];
    size_t d = net->d, wide = net->feedforward, num_queries = batch->query_offsets[to] - first_query;
    size_t num_rows = num_queries + batch->offsets[to] - begin, tiles = (num_rows + ROWS - 1) / ROWS;
    float *x = s->x; /* (num_rows, d) all tokens: first z of the scored readings, then u of all readings */
    encode_unit(net, batch, from, to, s);
    list_pages(net, batch, from, to, &s->prefetch);
    start_prefetch(net, 0, tiles * 3 * d / COLUMNS, &s->prefetch);
    for (size_t l = 0; l < (size_t)net->num_layers; l++) {
        const Layer *layer = net->layers + l;
        for (size_t r = 0; r < num_rows; r++)
            if (net->is_pre_norm) layer_norm(x + r * d, d, layer->norm1_weight, layer->norm1_bias, NULL, s->a + r * d);
            else convert_to_factors(x + r * d, d, s->a + r * d);
        /* After the last attention only the query tokens z are used, so there the observation tokens have no query. */
        size_t num_attending = l + 1 == (size_t)net->num_layers ? num_queries : num_rows;
        Rows query_rows = {num_attending, d, 3 * d}, all_rows = {num_rows, d, 3 * d};
        /* Queries of the tokens that attend, then keys and values of all tokens. */
        gemm(STORE, s->a, query_rows, d, layer->qkv, layer->qkv_bias, d, s->qkv, &s->prefetch);
        gemm(STORE, s->a, all_rows, d, layer->qkv + d * d, layer->qkv_bias + d, 2 * d, s->qkv + d, &s->prefetch);
        for (int64_t i = from; i < to; i++) {
            size_t row_z = batch->query_offsets[i] - first_query, row_u = num_queries + batch->offsets[i] - begin;
            attend_record(net, batch, i, l, s->qkv + row_z * 3 * d, s->qkv + row_u * 3 * d, s, s->a + row_z * d,
                          s->a + row_u * d);
        }
        start_prefetch(net, l + 1, tiles * (2 * d + wide) / COLUMNS, &s->prefetch);
        finish_layer(net, layer, x, s->a, num_attending, s);
    }
    if (batch->hidden) {
        memcpy(batch->hidden + first_query * d, x, num_queries * d * sizeof *x);
        return;
    }
    for (size_t r = 0; r < num_queries && net->head->norm_weight; r++)
        layer_norm(x + r * d, d, net->head->norm_weight, net->head->norm_bias, x + r * d, NULL);
    score_queries(net, batch, from, to, x, s->floats);
}

/* Return the first record of a unit of work, by bisection.
 *
 * The tokens of the batch are numbered from 0, record after record. Unit i has the records whose first token has a
 * number from i * tokens_per_unit to before (i + 1) * tokens_per_unit, so a record is never split. */
static int64_t first_record(const Batch *batch, int64_t unit) {
    int64_t low = 0, high = batch->num_records;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (batch->offsets[middle] + batch->query_offsets[middle] < unit * batch->tokens_per_unit) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Allocate a thread's scratch memory, enough for the largest unit. Return 1, or 0 if there is not enough memory. */
static int allocate_scratch(const Network *net, const Batch *batch, int64_t num_units, Scratch *s) {
    size_t num_rows = 0, longest = 0, num_pages = 0, d = net->d;
    for (int64_t unit = 0; unit < num_units; unit++) {
        int64_t from = first_record(batch, unit), to = first_record(batch, unit + 1);
        size_t readings = batch->offsets[to] - batch->offsets[from], unit_pages = 0;
        num_rows = max_size(num_rows, readings + batch->query_offsets[to] - batch->query_offsets[from]);
        for (int64_t i = from; i < to; i++) unit_pages += pages_of(batch->num_cached[i] * net->tokens_per_reading);
        num_pages = max_size(num_pages, unit_pages);
    }
    for (int64_t i = 0; i < batch->num_records; i++) longest = max_size(longest, final_length(batch, i));
    num_rows = round_up(num_rows, ROWS);
    size_t encoder_floats = 2 * ROWS_TOGETHER * widest_layer(net->encoder);
    s->max_tokens = (longest * net->tokens_per_reading + KV_PAGE_TOKENS) / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    s->x = allocate_zeroed(num_rows * d * sizeof(float));
    s->a = allocate_zeroed(num_rows * d * sizeof(factor_t));
    s->qkv = allocate_zeroed(num_rows * max_size(num_query_inputs(net), 3 * d) * sizeof(float));
    s->hidden = allocate_zeroed(round_up(FEEDFORWARD_ROWS, ROWS) * net->feedforward * sizeof(factor_t));
    s->query = allocate_zeroed(2 * d * sizeof(factor_t));
    s->weights = allocate_zeroed(2 * net->num_heads * s->max_tokens * sizeof(float));
    s->floats = allocate_zeroed(max_size(encoder_floats, head_scratch_size(net->head)) * sizeof(float));
    size_t num_time_inputs = net->times ? net->times->num_inputs : 0;
    s->time_inputs = allocate_zeroed((num_rows * num_time_inputs + 1) * sizeof(float));
    s->pages = allocate_zeroed((s->max_tokens / KV_PAGE_TOKENS + 1) * sizeof *s->pages);
    s->prefetch.pages = allocate_zeroed((num_pages + 1) * sizeof *s->prefetch.pages);
    return s->x && s->a && s->qkv && s->hidden && s->query && s->weights && s->floats && s->pages &&
           s->prefetch.pages && s->time_inputs && (!has_contexts(net) || allocate_context(net->process, longest, &s->context));
}

/* Free the memory that `allocate_scratch` has allocated; pointers may be NULL. */
static void free_scratch(Scratch *s) {
    free(s->x), free(s->a), free(s->qkv), free(s->hidden), free(s->query), free(s->weights), free(s->floats);
    free(s->pages), free(s->prefetch.pages), free(s->time_inputs);
    free_context(&s->context);
}

/* Score units of the batch until none is left; each thread calls this once. Return 0, or -1 if memory cannot be
 * allocated. */
int64_t score_batch(const Batch *batch) {
    const Network *net = batch->network;
    int64_t num_tokens = batch->offsets[batch->num_records] + batch->query_offsets[batch->num_records];
    int64_t num_units = num_tokens / batch->tokens_per_unit + 1;
    Scratch s = {0};
    int has_memory = allocate_scratch(net, batch, num_units, &s);
    if (has_memory)
        for (int64_t unit; (unit = __atomic_fetch_add(batch->next_unit, 1, __ATOMIC_RELAXED)) < num_units;) {
            int64_t from = first_record(batch, unit), to = first_record(batch, unit + 1);
            if (from < to) run_unit(net, batch, from, to, &s);
        }
    free_scratch(&s);
    return has_memory ? 0 : -1;
}
