/* Matrix products of a few rows with packed weights, in float32 or bfloat16, and conversions of their factors.
 *
 * A product multiplies the rows of a matrix by weights; the columns of the result are the outputs of a linear map.
 * Weights are packed in blocks of 32 columns: (columns / 32, inputs / DOT_WIDTH, 32, DOT_WIDTH). Each sum adds the
 * inputs in one fixed order. The result of a row is thus the same to the last bit, whatever other rows are computed.
 *
 * BFLOAT16_FACTORS (compiler flag): factors are rounded to bfloat16 and sums are float32. If the processor has fast dot
 * products of bfloat16 pairs, factors are stored as bfloat16. Otherwise (no such instruction, or the flag
 * NO_BFLOAT16_DOT) the rounded numbers are stored as floats. The KV cache holds bfloat16 in both cases. */
#ifndef GEMM_H
#define GEMM_H
#include "simd.h"

/* factor_t: a factor of a product as it is stored. DOT_WIDTH: how many factors one instruction multiplies and adds. */
#if defined(BFLOAT16_FACTORS) && defined(__AVX512BF16__) && !defined(NO_BFLOAT16_DOT)
#define DOT_WIDTH 2
typedef uint16_t factor_t;
#else
#define DOT_WIDTH 1
typedef float factor_t;
#endif

/* ROWS: rows of a tile (a part of a product's result that is computed at once). There are as many as fit, with their
 * sums, into the processor's vector registers. */
#ifdef __AVX512F__
#define ROWS 12 /* 24 vectors of sums and 2 of weights, of 32 registers */
#else
#define ROWS 3
#ifdef __AVX__
enum { REGISTER_FLOATS = 8 };
#else
enum { REGISTER_FLOATS = 4 };
#endif
typedef float tile_vector __attribute__((vector_size(4 * REGISTER_FLOATS)));
#endif
#define COLUMNS 32 /* columns of a tile */

/* kv_t: a number in the KV cache. KV_WIDTH: how many neighbouring numbers of a key lie side by side in a page of the
 * cache. They are followed by those of the next token's key. */
#ifdef BFLOAT16_FACTORS
typedef uint16_t kv_t;
#define KV_WIDTH 2
/* Round to the nearest bfloat16, returned in the lower halves of 32-bit lanes. */
INLINE i32x16 to_bfloat16(f32x16 v) {
#ifdef __AVX512BF16__
    return __builtin_convertvector((u16x16)_mm512_cvtneps_pbh((__m512)v), i32x16);
#else
    i32x16 bits = (i32x16)v; /* rounded half to even, by an addition before the lower half is removed */
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
#endif
}
#else
typedef float kv_t;
#define KV_WIDTH 1
#endif

/* Write sixteen floats as numbers of the KV cache. */
INLINE void store_kv(kv_t *p, f32x16 v) {
#ifdef BFLOAT16_FACTORS
    u16x16 halves = __builtin_convertvector(to_bfloat16(v), u16x16);
    memcpy(p, &halves, sizeof halves);
#else
    store(p, v);
#endif
}

/* Write sixteen floats as factors (store_factors), or read sixteen factors as floats (load_factors). */
INLINE void store_factors(factor_t *p, f32x16 v) {
#if DOT_WIDTH == KV_WIDTH
    store_kv(p, v);
#else
    store(p, (f32x16)(to_bfloat16(v) << 16));
#endif
}
INLINE f32x16 load_factors(const factor_t *p) {
#if DOT_WIDTH == 2
    u16x16 halves;
    memcpy(&halves, p, sizeof halves);
    return (f32x16)(__builtin_convertvector(halves, i32x16) << 16);
#else
    return load(p);
#endif
}

/* Write two vectors as 32 numbers of the KV cache (store_kv_pair), or read them (load_kv_pair).
 *
 * In bfloat16 the numbers of the two vectors alternate, so that one shift or one mask separates them when they are
 * read. */
INLINE void store_kv_pair(kv_t *p, f32x16 low, f32x16 high) {
#ifdef BFLOAT16_FACTORS
    i32x16 both = to_bfloat16(low) | to_bfloat16(high) << 16;
    memcpy(p, &both, sizeof both);
#else
    store(p, low), store(p + LANES, high);
#endif
}
INLINE void load_kv_pair(const kv_t *p, f32x16 *low, f32x16 *high) {
#ifdef BFLOAT16_FACTORS
    i32x16 both;
    memcpy(&both, p, sizeof both);
    *low = (f32x16)(both << 16), *high = (f32x16)(both & (int32_t)0xffff0000);
#else
    *low = load(p), *high = load(p + LANES);
#endif
}

/* Return total + a b, where a is one factor that multiplies each of sixteen factors b.
 *
 * If DOT_WIDTH is 2, a is a pair of factors and b sixteen pairs. Both products of two pairs are added. */
INLINE f32x16 multiply_add(f32x16 total, const factor_t *a, const factor_t *b) {
#if DOT_WIDTH == 2
    int32_t both;
    __m512i factors;
    memcpy(&both, a, 4);
    memcpy(&factors, b, 64);
    return (f32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(both), (__m512bh)factors);
#else
    return total + *a * load(b);
#endif
}

/* Return total + a b as `multiply_add` does, but with b from the KV cache, where KV_WIDTH factors lie side by side. */
INLINE f32x16 multiply_add_kv(f32x16 total, const factor_t *a, const kv_t *b) {
#if DOT_WIDTH == KV_WIDTH
    return multiply_add(total, a, b);
#else
    f32x16 low, high;
    load_kv_pair(b, &low, &high);
    return total + a[0] * low + a[1] * high;
#endif
}

/* Convert n floats to factors; n is a multiple of 16. */
static void convert_to_factors(const float *x, size_t n, factor_t *out) {
    for (size_t i = 0; i < n; i += LANES) store_factors(out + i, load(x + i));
}

/* Allocate zeroed memory that begins at a cache line; return NULL if there is not enough memory. */
static void *allocate_zeroed(size_t bytes) {
    void *p = aligned_alloc(64, round_up(bytes, 64));
    if (p) memset(p, 0, bytes);
    return p;
}

/* Compute one tile of a product: ROWS rows of a matrix times 32 columns of packed weights.
 *
 * a: ROWS rows of `inputs` factors; a row begins `stride` factors after the one before it. weights: (inputs /
 * DOT_WIDTH, 32, DOT_WIDTH). sums: output, two vectors of 16 columns for each row. */
INLINE void gemm_tile(const factor_t *a, size_t stride, size_t inputs, const factor_t *weights, f32x16 sums[ROWS][2]) {
#ifdef __AVX512F__
    f32x16 c[ROWS][2];
    for (int r = 0; r < ROWS; r++) c[r][0] = c[r][1] = splat(0);
    for (size_t k = 0; k < inputs; k += DOT_WIDTH, a += DOT_WIDTH, weights += COLUMNS * DOT_WIDTH) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            c[r][0] = multiply_add(c[r][0], a + r * stride, weights);
            c[r][1] = multiply_add(c[r][1], a + r * stride, weights + LANES * DOT_WIDTH);
        }
    }
    for (int r = 0; r < ROWS; r++) sums[r][0] = c[r][0], sums[r][1] = c[r][1];
#else /* f32x16 is wider than the processor's registers here, and the compiler would store such sums in memory */
    enum { PARTS = COLUMNS / REGISTER_FLOATS };
    tile_vector c[ROWS][PARTS], w;
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) c[r][p] = (tile_vector){0};
    for (size_t k = 0; k < inputs; k++, a++, weights += COLUMNS)
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) {
            memcpy(&w, weights + p * REGISTER_FLOATS, sizeof w);
#pragma GCC unroll 3
            for (int r = 0; r < ROWS; r++) c[r][p] += a[r * stride] * w;
        }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PARTS; p++) memcpy((float *)sums[r] + p * REGISTER_FLOATS, &c[r][p], sizeof(tile_vector));
#endif
}

/* Return the standard normal distribution function Phi(x).
 *
 * In float32 this is formula 7.1.26 of Abramowitz and Stegun (error 1.5e-7). In bfloat16 a polynomial is exact enough:
 * the minimax polynomial q of (Phi(x) - 1/2) / x in s = x^2 on |x| <= 4.2. The error of x Phi(x) is 8e-5 then, and the
 * result is rounded afterwards. */
INLINE f32x16 normal_cdf_for_gelu(f32x16 x) {
#ifdef BFLOAT16_FACTORS
    f32x16 u = vector_max(vector_min(x, splat(4.2f)), splat(-4.2f)), s = u * u;
    f32x16 q = splat(-9.01753448e-10f) * s + 7.94134181e-8f;
    q = q * s - 3.03793277e-6f;
    q = q * s + 6.68907292e-5f;
    q = q * s - 9.5065805e-4f;
    q = q * s + 9.29823374e-3f;
    q = q * s - 6.55282194e-2f;
    q = q * s + 0.398465895f;
    return u * q + 0.5f;
#else
    f32x16 size = (f32x16)((i32x16)x & 0x7fffffff); /* |x| */
    f32x16 t = 1.0f / (1.0f + 0.23164190f * size);
    f32x16 p = splat(0.5307027145f) * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.1274147960f;
    f32x16 tail = p * t * exponential(-0.5f * x * x);
    return select_lanes(x > 0, 1.0f - tail, tail);
#endif
}

/* Return the activation function GELU, x Phi(x). */
INLINE f32x16 gelu(f32x16 x) { return x * normal_cdf_for_gelu(x); }

/* The pages of the KV cache that the next attention will read, and how far they are prefetched.
 *
 * Each tile of a matrix product prefetches a few cache lines, so that they are loaded while the processor computes. */
typedef struct {
    const char **pages;            /* (num_pages) */
    size_t num_pages;
    size_t offset, bytes;          /* where the keys and values of one layer begin in a page; their size in bytes */
    size_t page_index, line;       /* the next cache line to prefetch: index in `pages`, byte after `offset` */
    size_t lines_per_tile;         /* how many lines each tile of a product prefetches */
} PagePrefetch;

/* Prefetch the next `lines_per_tile` cache lines (of 64 bytes) of the listed pages. */
INLINE void prefetch_some(PagePrefetch *p) {
    for (size_t n = 0; n < p->lines_per_tile && p->page_index < p->num_pages; n++) {
        __builtin_prefetch(p->pages[p->page_index] + p->offset + p->line, 0, 2);
        if ((p->line += 64) >= p->bytes) p->line = 0, p->page_index++;
    }
}

/* What `gemm` does with its result: overwrite, add, or overwrite with an activation of the result. */
enum { STORE, ADD, STORE_GELU, STORE_RELU };

/* The rows of a product: their number, and how many numbers lie between the beginnings of two rows, in the matrix that
 * is multiplied and in the result. */
typedef struct {
    size_t count, factor_stride, out_stride;
} Rows;

/* Compute a W + bias for packed weights W, and store it according to `kind`, a compile-time constant.
 *
 * STORE: out (float) = result. ADD: out (float) += result. STORE_GELU, STORE_RELU: out (factor_t) = activation(result).
 * a: (rows, inputs) the matrix to multiply. Whole tiles of it are read, so its memory must extend to the next multiple
 * of ROWS rows. bias: (columns). prefetch: the pages of which each tile prefetches a part. */
INLINE void gemm(int kind, const factor_t *a, Rows rows, size_t inputs, const factor_t *weights, const float *bias,
                 size_t columns, void *out, PagePrefetch *prefetch) {
    for (size_t n = 0; n < columns; n += COLUMNS, weights += COLUMNS * inputs)
        for (size_t m = 0; m < rows.count; m += ROWS) {
            f32x16 sums[ROWS][2];
            prefetch_some(prefetch);
            gemm_tile(a + m * rows.factor_stride, rows.factor_stride, inputs, weights, sums);
            size_t num_rows = min_size(rows.count - m, ROWS); /* the last tile may have fewer rows */
            for (size_t r = 0; r < num_rows; r++)
                for (int half = 0; half < 2; half++) {
                    size_t column = n + half * LANES, place = (m + r) * rows.out_stride + column;
                    f32x16 v = sums[r][half] + load(bias + column);
                    if (kind == STORE) store((float *)out + place, v);
                    if (kind == ADD) store((float *)out + place, load((float *)out + place) + v);
                    if (kind == STORE_GELU) store_factors((factor_t *)out + place, gelu(v));
                    if (kind == STORE_RELU) store_factors((factor_t *)out + place, vector_max(v, splat(0)));
                }
        }
}
#endif
