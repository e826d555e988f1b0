/* Matrix products of a few rows, with weights packed column block by column block.
 *
 * ROUNDED: factors are rounded to bfloat16, sums are float32. Where the processor multiplies pairs of bfloat16, and that
 * is quick (not SINGLY), they are stored so; elsewhere the rounded numbers are kept as floats. What stays in a cache is in
 * pairs either way. */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include "lanes.h"

#if defined(ROUNDED) && defined(__AVX512BF16__) && !defined(SINGLY)
#define PAIR 2
typedef uint16_t num;
#else
#define PAIR 1
typedef float num;
#endif

#ifdef __AVX512F__
#define ROWS 12 /* 24 sums, 2 columns of weights: most of the 32 registers */
#else
#define ROWS 3
#ifdef __AVX__
enum { REGISTER = 8 }; /* floats */
#else
enum { REGISTER = 4 };
#endif
typedef float part __attribute__((vector_size(4 * REGISTER)));
#endif
#define COLUMNS 32

#ifdef ROUNDED
typedef uint16_t cached; /* a number in a cache */
#define CACHED_PAIR 2
/* The nearest bfloat16s, as the lower halves of words. */
INLINE i16 nearest(v16 v) {
#ifdef __AVX512BF16__
    return __builtin_convertvector((h16)_mm512_cvtneps_pbh((__m512)v), i16);
#else
    i16 bits = (i16)v;
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
#endif
}
#else
typedef float cached;
#define CACHED_PAIR 1
#endif

INLINE void put_cached(cached *p, v16 v) {
#ifdef ROUNDED
    h16 halves = __builtin_convertvector(nearest(v), h16);
    memcpy(p, &halves, sizeof halves);
#else
    store(p, v);
#endif
}
INLINE void put(num *p, v16 v) {
#if PAIR == CACHED_PAIR
    put_cached(p, v);
#else
    store(p, (v16)(nearest(v) << 16));
#endif
}
INLINE v16 get(const num *p) {
#if PAIR == 2
    h16 h;
    memcpy(&h, p, sizeof h);
    return (v16)(__builtin_convertvector(h, i16) << 16);
#else
    return load(p);
#endif
}
/* Two vectors side by side, and back: as pairs of halves where these are halves, so that each is one operation away. */
INLINE void put_both(cached *p, v16 low, v16 high) {
#ifdef ROUNDED
    i16 both = nearest(low) | nearest(high) << 16;
    memcpy(p, &both, sizeof both);
#else
    store(p, low), store(p + LANES, high);
#endif
}
INLINE void get_both(const cached *p, v16 *low, v16 *high) {
#ifdef ROUNDED
    i16 both;
    memcpy(&both, p, sizeof both);
    *low = (v16)(both << 16), *high = (v16)(both & (int32_t)0xffff0000);
#else
    *low = load(p), *high = load(p + LANES);
#endif
}
/* sum + a * b, or that of two factors each: a is one number (pair) for all lanes. */
INLINE v16 dot(v16 total, const num *a, const num *b) {
#if PAIR == 2
    int32_t both;
    __m512i factors;
    memcpy(&both, a, 4);
    memcpy(&factors, b, 64);
    return (v16)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(both), (__m512bh)factors);
#else
    return total + *a * load(b);
#endif
}

/* The same with factors from a cache, CACHED_PAIR of a lane beside each other. */
INLINE v16 dot_cached(v16 total, const num *a, const cached *b) {
#if PAIR == CACHED_PAIR
    return dot(total, a, b);
#else
    v16 low, high;
    get_both(b, &low, &high);
    return total + a[0] * low + a[1] * high;
#endif
}

static void rounded(const float *x, size_t n, num *out) {
    for (size_t i = 0; i < n; i += LANES) put(out + i, load(x + i));
}
/* What a row is multiplied by, once its mean is taken away, to have variance 1. */
INLINE float moments(const float *x, size_t d, float *mean) {
    v16 total = all(0), squares = all(0);
    for (size_t i = 0; i < d; i += LANES) total += load(x + i);
    *mean = sum(total) / d;
    for (size_t i = 0; i < d; i += LANES) {
        v16 y = load(x + i) - *mean;
        squares += y * y;
    }
    return 1.0f / sqrtf(sum(squares) / d + 1e-5f);
}

/* Zeros, or NULL where memory is short. */
static void *room(size_t bytes) {
    void *p = aligned_alloc(64, whole(bytes, 64));
    if (p) memset(p, 0, bytes);
    return p;
}

/* sums[r] = row r of a times 32 columns of weights. a: ROWS rows, `stride` apart, and `step` from one number (pair) of a
 * row to the next; b: (inputs / PAIR, 32, PAIR). */
INLINE void product_of(const num *a, size_t stride, size_t step, size_t inputs, const num *b, v16 sums[ROWS][2]) {
#ifdef __AVX512F__
    v16 c[ROWS][2];
    for (int r = 0; r < ROWS; r++) c[r][0] = c[r][1] = all(0);
    for (size_t k = 0; k < inputs; k += PAIR, a += step, b += COLUMNS * PAIR) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            c[r][0] = dot(c[r][0], a + r * stride, b);
            c[r][1] = dot(c[r][1], a + r * stride, b + LANES * PAIR);
        }
    }
    for (int r = 0; r < ROWS; r++) sums[r][0] = c[r][0], sums[r][1] = c[r][1];
#else /* vectors longer than the processor's would not stay in its registers */
    enum { PARTS = COLUMNS / REGISTER };
    part c[ROWS][PARTS], weights;
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) c[r][p] = (part){0};
    for (size_t k = 0; k < inputs; k++, a += step, b += COLUMNS)
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) {
            memcpy(&weights, b + p * REGISTER, sizeof weights);
#pragma GCC unroll 3
            for (int r = 0; r < ROWS; r++) c[r][p] += a[r * stride] * weights;
        }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) memcpy((float *)sums[r] + p * REGISTER, &c[r][p], sizeof(part));
#endif
}
INLINE void product(const num *a, size_t stride, size_t inputs, const num *b, v16 sums[ROWS][2]) {
    product_of(a, stride, PAIR, inputs, b, sums);
}

/* Φ(x), bell being e to the -x^2 / 2. Before it is rounded to bfloat16 a minimax polynomial of (Φ(x) - 1/2) / x in x^2 on
 * |x| <= 4.2 will do (error of x Φ(x) 8e-5); otherwise erf by Abramowitz and Stegun 7.1.26 (1.5e-7). */
INLINE v16 bell(v16 x) { return exponential(-0.5f * x * x); }
INLINE v16 normal(v16 x, v16 bell) {
#ifdef ROUNDED
    v16 u = larger(smaller(x, all(4.2f)), all(-4.2f)), s = u * u;
    v16 q = all(-9.01753448e-10f) * s + 7.94134181e-8f;
    q = q * s - 3.03793277e-6f;
    q = q * s + 6.68907292e-5f;
    q = q * s - 9.5065805e-4f;
    q = q * s + 9.29823374e-3f;
    q = q * s - 6.55282194e-2f;
    q = q * s + 0.398465895f;
    (void)bell;
    return u * q + 0.5f;
#else
    v16 size = (v16)((i16)x & 0x7fffffff);
    v16 t = 1.0f / (1.0f + 0.23164190f * size);
    v16 p = all(0.5307027145f) * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.1274147960f;
    v16 tail = p * t * bell;
    return chosen(x > 0, 1.0f - tail, tail);
#endif
}
INLINE v16 gelu(v16 x) { return x * normal(x, bell(x)); }

/* Lines of keys and values that the next attention will read, asked for a few at a time while products keep the
 * processor busy: they come from memory meanwhile. */
typedef struct {
    const char **block; /* (blocks) a page's keys and values of one layer */
    size_t blocks, bytes, offset, at, line, share;
} Errand;

INLINE void run_errand(Errand *e) {
    for (size_t n = 0; n < e->share && e->at < e->blocks; n++) {
        __builtin_prefetch(e->block[e->at] + e->offset + e->line, 0, 2);
        if ((e->line += 64) >= e->bytes) e->line = 0, e->at++;
    }
}

enum { LINEAR, ADD, GELU, RELU };

/* A product's rows: so many, how far apart those of the factor and of the result. */
typedef struct {
    size_t count, from, to;
} Rows;

/* out = a weights + bias (float), out += that (float), or its activation (num). a: rows up to a multiple of ROWS. */
INLINE void linear(int kind, const num *a, Rows rows, size_t inputs, const num *weights, const float *bias,
                   size_t columns, void *out, Errand *errand) {
    for (size_t n = 0; n < columns; n += COLUMNS, weights += COLUMNS * inputs)
        for (size_t m = 0; m < rows.count; m += ROWS) {
            v16 sums[ROWS][2];
            run_errand(errand);
            product(a + m * rows.from, rows.from, inputs, weights, sums);
            size_t end = rows.count - m < ROWS ? rows.count - m : ROWS;
            for (size_t r = 0; r < end; r++)
                for (int half = 0; half < 2; half++) {
                    size_t column = n + half * LANES, place = (m + r) * rows.to + column;
                    v16 v = sums[r][half] + load(bias + column);
                    if (kind == LINEAR) store((float *)out + place, v);
                    if (kind == ADD) store((float *)out + place, load((float *)out + place) + v);
                    if (kind == GELU) put((num *)out + place, gelu(v));
                    if (kind == RELU) put((num *)out + place, larger(v, all(0)));
                }
        }
}
static void project(const num *a, Rows rows, size_t inputs, const num *w, const float *b, size_t n, float *out,
                    Errand *e) {
    linear(LINEAR, a, rows, inputs, w, b, n, out, e);
}
static void add(const num *a, size_t rows, size_t inputs, const num *w, const float *b, size_t n, float *out,
                Errand *e) {
    linear(ADD, a, (Rows){rows, inputs, n}, inputs, w, b, n, out, e);
}
static void activate(int relu, const num *a, size_t rows, size_t inputs, const num *w, const float *b, size_t n,
                     num *out, Errand *e) {
    if (relu) linear(RELU, a, (Rows){rows, inputs, n}, inputs, w, b, n, out, e);
    else linear(GELU, a, (Rows){rows, inputs, n}, inputs, w, b, n, out, e);
}
#endif
