/* Attention over whole records, forward and back, one head of one record after the other: z_k sees itself and u_<k, u_k
 * sees u_<=k.
 *
 * Factors of products lie as `product` takes them: the left one by rows, the right one by pairs of rows, 32 columns after
 * 32. What is by rows is turned or laid in pairs for that; weights are kept in pairs, and turned on the way back. */
#ifndef ATTENTION_H
#define ATTENTION_H
#include "products.h"

typedef struct {
    size_t identities, queries, keys, width, pairs; /* width: keys up to whole columns. pairs: queries, or one more */
} Shape;

typedef struct {
    num *plain, *turned, *packed[4];
    float *scores, *own;
} Attention;

INLINE size_t less(size_t a, size_t b) { return a < b ? a : b; }

/* How many values a query sees, and the most that any of some queries does. */
INLINE size_t reach(size_t row, size_t identities) { return row < identities ? row : row - identities + 1; }
INLINE size_t farthest(size_t from, size_t to, size_t identities) {
    size_t last = reach(to - 1, identities);
    return from < identities && to > identities && identities - 1 > last ? identities - 1 : last;
}

/* Numbers of two rows side by side, as factors of products lie. */
INLINE void put_rows(num *p, v16 low, v16 high) {
#if PAIR == 2
    put_both(p, low, high);
#else
    put(p, low), put(p + COLUMNS, high);
#endif
}
INLINE void get_rows(const num *p, v16 *low, v16 *high) {
#if PAIR == 2
    get_both(p, low, high);
#else
    *low = get(p), *high = get(p + COLUMNS);
#endif
}

/* The same of numbers that lie in rows already, the second of zeros where there is none; `apart` without pairs. */
INLINE void copy_rows(const num *low, const num *high, num *to, size_t apart) {
#if PAIR == 2
    h16 words[2] = {{0}};
    memcpy(words, low, sizeof *words);
    if (high) memcpy(words + 1, high, sizeof *words);
    i16 both = __builtin_convertvector(words[0], i16) | __builtin_convertvector(words[1], i16) << 16;
    memcpy(to, &both, sizeof both);
    (void)apart;
#else
    store(to, load(low)), store(to + apart, high ? load(high) : all(0));
#endif
}

/* Rows into columns, pair by pair: word c of row r becomes word r of row c. */
#ifdef __AVX512F__
INLINE void turn_square(const num *from, size_t stride, size_t rows, size_t words, num *to, size_t apart) {
    __m512i v[LANES];
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 16
    for (size_t i = 0; i < LANES; i++)
        v[i] = _mm512_maskz_loadu_epi32(i < rows ? (1u << words) - 1 : 0, from + (i < rows ? i * stride : 0));
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) { /* what is `step` off the diagonal changes sides */
        i16 odd = (lane & step) != 0, even = ~odd;
        i16 first = (even & lane) | (odd & (LANES + lane - step));
        i16 second = (even & (lane + step)) | (odd & (LANES + lane));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                __m512i a = v[i], b = v[i + step];
                v[i] = _mm512_permutex2var_epi32(a, (__m512i)first, b);
                v[i + step] = _mm512_permutex2var_epi32(a, (__m512i)second, b);
            }
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < LANES; i++)
        if (i < words) _mm512_mask_storeu_epi32(to + i * apart, (1u << rows) - 1, v[i]);
}
static void turn(const num *from, size_t stride, size_t rows, size_t words, num *to, size_t apart) {
    for (size_t r = 0; r < rows; r += LANES)
        for (size_t c = 0; c < words; c += LANES)
            turn_square(from + r * stride + c * PAIR, stride, less(rows - r, LANES), less(words - c, LANES),
                        to + c * apart + r * PAIR, apart);
}
#else
static void turn(const num *from, size_t stride, size_t rows, size_t words, num *to, size_t apart) {
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < words; c++) memcpy(to + c * apart + r * PAIR, from + r * stride + c * PAIR, 4);
}
#endif
/* Rows as the right factor of a product that sums over what is within a row, 32 rows after 32. */
static void pack_across(const num *from, size_t stride, size_t rows, size_t inputs, num *to) {
    for (size_t n = 0; n < rows; n += COLUMNS)
        turn(from + n * stride, stride, less(rows - n, COLUMNS), inputs / PAIR, to + n * inputs, COLUMNS * PAIR);
}
/* The same for a product that sums over rows. */
static void pack_along(const num *from, size_t stride, size_t rows, size_t width, num *to) {
    size_t block = whole(rows, 2) * COLUMNS;
    for (size_t r = 0; r < rows; r += 2, from += 2 * stride, to += 2 * COLUMNS)
        for (size_t i = 0; i < width; i += LANES) {
            __builtin_prefetch(from + 8 * stride + i); /* often from afar */
            copy_rows(from + i, r + 1 < rows ? from + stride + i : NULL, to + i / COLUMNS * block + i % COLUMNS * PAIR,
                      COLUMNS);
        }
}

/* out (queries, width) = a (queries, inputs) times keys: no more than a query may see need be right. */
static void scores(const num *a, size_t stride, size_t inputs, const num *keys, Shape s, float *out) {
    for (size_t n = 0; n < s.width; n += COLUMNS, keys += COLUMNS * inputs)
        for (size_t m = 0; m < s.queries; m += ROWS) {
            v16 sums[ROWS][2];
            if (farthest(m, less(m + ROWS, s.queries), s.identities) <= n) continue;
            product(a + m * stride, stride, inputs, keys, sums);
            for (size_t r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++) store(out + (m + r) * s.width + n + half * LANES, sums[r][half]);
        }
}

/* What rows of `a` make of packed rows, and of one's own, if any: (rows, width). With `seen` rows are queries and end
 * where they see no more. */
typedef struct {
    const float *own;
    const num *other;
    size_t stride;
} Own;
static void gather(const num *a, size_t stride, size_t rows, size_t inputs, const num *packed, size_t width,
                   const Shape *seen, const Own *own, num *to, size_t apart) {
    for (size_t n = 0; n < width; n += COLUMNS, packed += COLUMNS * inputs)
        for (size_t m = 0; m < rows; m += ROWS) {
            v16 sums[ROWS][2];
            size_t end = less(m + ROWS, rows), most = inputs;
            if (seen) most = whole(farthest(m, end, seen->identities), 2);
            product(a + m * stride, stride, most, packed, sums);
            for (size_t r = m; r < end; r++)
                for (size_t i = n; i < n + COLUMNS && i < width; i += LANES) {
                    v16 v = sums[r - m][(i - n) / LANES];
                    if (own && r < seen->identities) v += own->own[r] * get(own->other + r * own->stride + i);
                    put(to + r * apart + i, v);
                }
        }
}

INLINE float inner(const num *a, const num *b, size_t n) {
    v16 total = all(0);
    for (size_t i = 0; i < n; i += LANES) total += get(a + i) * get(b + i);
    return sum(total);
}

static const v16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
INLINE v16 within(size_t seen, size_t from, v16 v, float otherwise) {
    return chosen(LANE + (float)from < (float)seen, v, all(otherwise));
}

/* A query's scores, to be scaled, into weights, zero where it sees nothing; its own one besides, where it has one. */
static void soften(float *row, size_t seen, size_t used, float *own, float scale) {
    v16 top = all(own ? *own : -INFINITY), total = all(0);
    for (size_t i = 0; i < seen; i += LANES) top = larger(top, within(seen, i, load(row + i), -INFINITY));
    float peak = largest(top);
    v16 self = own ? exponential(all(scale * (*own - peak))) : all(0);
    for (size_t i = 0; i < seen; i += LANES) {
        v16 e = within(seen, i, exponential(scale * (load(row + i) - peak)), 0);
        total += e;
        store(row + i, e);
    }
    float norm = 1.0f / (sum(total) + self[0]);
    for (size_t i = 0; i < used; i += LANES) store(row + i, i < seen ? load(row + i) * norm : all(0));
    if (own) *own = self[0] * norm;
}

/* Of one record: qkv (T, 3 d) → attended (queries, d); keeps weights in pairs of rows, and own ones. */
static void attend(size_t d, size_t heads, Shape s, const num *qkv, num *paired, float *own, num *attended,
                   Attention *t) {
    size_t d_head = d / heads, stride = 3 * d, identities = s.identities, used = whole(s.keys, LANES);
    float scale = 1.0f / sqrtf((float)d_head);
    for (size_t h = 0; h < heads; h++, qkv += d_head, attended += d_head, own += identities) {
        const num *k = qkv + d, *v = k + d, *keys = k + identities * stride, *values = v + identities * stride;
        pack_across(keys, stride, s.keys, d_head, t->packed[0]);
        pack_along(values, stride, s.keys, d_head, t->packed[1]);
        scores(qkv, stride, d_head, t->packed[0], s, t->scores);
        for (size_t r = 0; r < s.pairs; r += 2, paired += 2 * COLUMNS) {
            for (size_t i = r; i < r + 2; i++) {
                float *row = t->scores + i * s.width;
                if (i < identities) own[i] = inner(qkv + i * stride, k + i * stride, d_head);
                soften(row, i < s.queries ? reach(i, identities) : 0, used, i < identities ? own + i : NULL, scale);
            }
            for (size_t i = 0; i < used; i += LANES) {
                v16 low = load(t->scores + r * s.width + i), high = load(t->scores + (r + 1) * s.width + i);
                put(t->plain + r * s.width + i, low), put(t->plain + (r + 1) * s.width + i, high);
                put_rows(paired + i / COLUMNS * COLUMNS * s.pairs + i % COLUMNS * PAIR, low, high);
            }
        }
        paired += (s.width - COLUMNS) * s.pairs;
        Own self = {own, v, stride};
        gather(t->plain, s.width, s.queries, whole(s.keys, 2), t->packed[1], d_head, &s, &self, attended, d);
    }
}

/* The way back: g (queries, d) of what was attended → g_qkv (T, 3 d). */
static void attend_back(size_t d, size_t heads, Shape s, const num *qkv, const num *paired, const float *own,
                        const num *g, num *g_qkv, Attention *t) {
    size_t d_head = d / heads, stride = 3 * d, identities = s.identities, used = whole(s.keys, LANES);
    float scale = 1.0f / sqrtf((float)d_head);
    for (size_t h = 0; h < heads; h++, qkv += d_head, g += d_head, g_qkv += d_head, own += identities) {
        const num *k = qkv + d, *v = k + d, *weights = paired;
        num *g_k = g_qkv + d, *g_v = g_k + d, *both = t->packed[3];
        pack_across(v + identities * stride, stride, s.keys, d_head, t->packed[0]);
        pack_along(k + identities * stride, stride, s.keys, d_head, t->packed[1]);
        scores(g, d, d_head, t->packed[0], s, t->scores);
        for (size_t r = 0; r < s.pairs; r += 2, weights += 2 * COLUMNS, both += 2 * COLUMNS) {
            float *row[2] = {t->scores + r * s.width, t->scores + (r + 1) * s.width};
            size_t seen[2] = {reach(r, identities), r + 1 < s.queries ? reach(r + 1, identities) : 0};
            v16 total[2] = {all(0), all(0)}, w[2], by[2];
            float self[2] = {0}, mean[2];
            for (size_t i = 0; i < seen[0] || i < seen[1]; i += LANES) {
                get_rows(weights + i / COLUMNS * COLUMNS * s.pairs + i % COLUMNS * PAIR, w, w + 1);
                for (int q = 0; q < 2; q++) total[q] += w[q] * within(seen[q], i, load(row[q] + i), 0);
            }
            for (int q = 0; q < 2; q++) {
                if (r + q < identities) self[q] = inner(g + (r + q) * d, v + (r + q) * stride, d_head);
                mean[q] = sum(total[q]) + (r + q < identities ? self[q] * own[r + q] : 0);
                if (r + q < identities) t->own[r + q] = scale * own[r + q] * (self[q] - mean[q]);
            }
            for (size_t i = 0; i < used; i += LANES) {
                size_t place = i / COLUMNS * COLUMNS * s.pairs + i % COLUMNS * PAIR;
                get_rows(weights + place, w, w + 1);
                for (int q = 0; q < 2; q++) {
                    by[q] = scale * w[q] * (within(seen[q], i, load(row[q] + i), 0) - mean[q]);
                    put(t->plain + (r + q) * s.width + i, by[q]);
                }
                put_rows(both + place, by[0], by[1]);
            }
        }
        Own self = {t->own, k, stride};
        gather(t->plain, s.width, s.queries, whole(s.keys, 2), t->packed[1], d_head, &s, &self, g_qkv, stride);
        for (size_t r = 0; r < identities; r++)
            for (size_t i = 0; i < d_head; i += LANES) {
                put(g_k + r * stride + i, t->own[r] * get(qkv + r * stride + i));
                put(g_v + r * stride + i, own[r] * get(g + r * d + i));
            }
        for (int value = 0; value < 2; value++) {
            const num *from = value ? paired : t->packed[3];
            if (value) pack_along(g, d, s.queries, d_head, t->packed[2]);
            else pack_along(qkv, stride, s.queries, d_head, t->packed[2]);
            for (size_t n = 0; n < s.keys; n += COLUMNS)
                turn(from + n * s.pairs, COLUMNS * PAIR, s.pairs / PAIR, less(s.keys - n, COLUMNS),
                     t->turned + n * s.pairs, s.pairs);
            gather(t->turned, s.pairs, s.keys, s.pairs, t->packed[2], d_head, NULL, NULL,
                   (value ? g_v : g_k) + identities * stride, stride);
        }
        paired += s.width * s.pairs;
    }
}
#endif
