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

#define COLUMNS 32                      /* columns of a block of packed weights */
#define BLOCK_VECTORS (COLUMNS / LANES) /* vectors of a row of a block */

/* ROWS: rows of a tile (a part of a product's result that is computed at once). TILE_VECTORS: vectors of each row of a
 * tile, a divisor of BLOCK_VECTORS. As many sums are computed at once as fit into the processor's vector registers. */
#if LANES == 16
#define ROWS 12 /* 24 vectors of sums and 2 of weights, of 32 registers */
#define TILE_VECTORS 2
#elif defined(__aarch64__)
#define ROWS 6 /* 24 vectors of sums and 4 of weights, of 32 registers */
#define TILE_VECTORS 4
#elif LANES == 8
#define ROWS 3 /* 12 vectors of sums, 3 of factors and 1 of weights, of 16 registers */
#define TILE_VECTORS 4
#else /* a product, which no instruction adds to a sum, takes one more register */
#define ROWS 2
#define TILE_VECTORS 4
#endif

/* kv_t: a number in the KV cache. KV_WIDTH: how many neighbouring numbers of a key lie side by side in a page of the
 * cache. They are followed by those of the next token's key. */
#ifdef BFLOAT16_FACTORS
typedef uint16_t kv_t;
#define KV_WIDTH 2
/* Round to the nearest bfloat16, returned in the lower halves of 32-bit lanes. */
INLINE int_vector to_bfloat16(float_vector v) {
#ifdef __AVX512BF16__
    return __builtin_convertvector((half_vector)_mm512_cvtneps_pbh((__m512)v), int_vector);
#else
    int_vector bits = (int_vector)v; /* rounded half to even, by an addition before the lower half is removed */
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
#endif
}
#else
typedef float kv_t;
#define KV_WIDTH 1
#endif

/* Write a vector of floats as numbers of the KV cache. */
INLINE void store_kv(kv_t *p, float_vector v) {
#ifdef BFLOAT16_FACTORS
    half_vector halves = __builtin_convertvector(to_bfloat16(v), half_vector);
    memcpy(p, &halves, sizeof halves);
#else
    store(p, v);
#endif
}

/* Write a vector of floats as factors (store_factors), or read factors as a vector of floats (load_factors). */
INLINE void store_factors(factor_t *p, float_vector v) {
#if DOT_WIDTH == KV_WIDTH
    store_kv(p, v);
#else
    store(p, (float_vector)(to_bfloat16(v) << 16));
#endif
}
INLINE float_vector load_factors(const factor_t *p) {
#if DOT_WIDTH == 2
    half_vector halves;
    memcpy(&halves, p, sizeof halves);
    return (float_vector)(__builtin_convertvector(halves, int_vector) << 16);
#else
    return load(p);
#endif
}

/* Write two vectors as numbers of the KV cache (store_kv_pair), or read them (load_kv_pair).
 *
 * In bfloat16 the numbers of the two vectors alternate, so that one shift or one mask separates them when they are
 * read. */
INLINE void store_kv_pair(kv_t *p, float_vector low, float_vector high) {
#ifdef BFLOAT16_FACTORS
    int_vector both = to_bfloat16(low) | to_bfloat16(high) << 16;
    memcpy(p, &both, sizeof both);
#else
    store(p, low), store(p + LANES, high);
#endif
}
INLINE void load_kv_pair(const kv_t *p, float_vector *low, float_vector *high) {
#ifdef BFLOAT16_FACTORS
    int_vector both;
    memcpy(&both, p, sizeof both);
    *low = (float_vector)(both << 16), *high = (float_vector)(both & (int32_t)0xffff0000);
#else
    *low = load(p), *high = load(p + LANES);
#endif
}

/* Return total + a b, where a is one factor that multiplies each of LANES factors b.
 *
 * If DOT_WIDTH is 2, a is a pair of factors and b LANES pairs. Both products of two pairs are added. */
INLINE float_vector multiply_add(float_vector total, const factor_t *a, const factor_t *b) {
#if DOT_WIDTH == 2
    int32_t both;
    __m512i factors;
    memcpy(&both, a, 4);
    memcpy(&factors, b, 64);
    return (float_vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(both), (__m512bh)factors);
#else
    return total + *a * load(b);
#endif
}

/* Return total + a b as `multiply_add` does, but with b from the KV cache, where KV_WIDTH factors lie side by side. */
INLINE float_vector multiply_add_kv(float_vector total, const factor_t *a, const kv_t *b) {
#if DOT_WIDTH == KV_WIDTH
    return multiply_add(total, a, b);
#else
    float_vector low, high;
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

/* Return the row and the vector to which sum i of a tile belongs. The sums are numbered along the longer side of the tile,
 * so that the factors or the weights of the shorter one stay in registers. */
INLINE int row_of_sum(int i, int num_rows) { return num_rows < TILE_VECTORS ? i % num_rows : i / TILE_VECTORS; }
INLINE int vector_of_sum(int i, int num_rows) { return num_rows < TILE_VECTORS ? i / num_rows : i % TILE_VECTORS; }

/* Compute a part of a product: ROWS rows of a matrix times the 32 columns of a block of packed weights.
 *
 * a: ROWS rows of `inputs` factors; a row begins `stride` factors after the one before it. weights: (inputs /
 * DOT_WIDTH, 32, DOT_WIDTH). sums: output, the vectors of each row. */
INLINE void multiply_block(const factor_t *a, size_t stride, size_t inputs, const factor_t *weights,
                           float_vector sums[ROWS][BLOCK_VECTORS]) {
    for (int first = 0; first < BLOCK_VECTORS; first += TILE_VECTORS) {
        const factor_t *factors = a, *w = weights + first * LANES * DOT_WIDTH;
        float_vector c[ROWS][TILE_VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < TILE_VECTORS; v++) c[r][v] = splat(0);
        for (size_t k = 0; k < inputs; k += DOT_WIDTH, factors += DOT_WIDTH, w += COLUMNS * DOT_WIDTH) {
#pragma GCC unroll 24
            for (int i = 0; i < ROWS * TILE_VECTORS; i++) {
                int r = row_of_sum(i, ROWS), v = vector_of_sum(i, ROWS);
                c[r][v] = multiply_add(c[r][v], factors + r * stride, w + v * LANES * DOT_WIDTH);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][first + v] = c[r][v];
    }
}

/* Return the standard normal distribution function Phi(x).
 *
 * In float32 this is formula 7.1.26 of Abramowitz and Stegun (error 1.5e-7). In bfloat16 a polynomial is exact enough:
 * the minimax polynomial q of (Phi(x) - 1/2) / x in s = x^2 on |x| <= 4.2. The error of x Phi(x) is 8e-5 then, and the
 * result is rounded afterwards. */
INLINE float_vector normal_cdf_for_gelu(float_vector x) {
#ifdef BFLOAT16_FACTORS
    float_vector u = vector_max(vector_min(x, splat(4.2f)), splat(-4.2f)), s = u * u;
    float_vector q = splat(-9.01753448e-10f) * s + 7.94134181e-8f;
    q = q * s - 3.03793277e-6f;
    q = q * s + 6.68907292e-5f;
    q = q * s - 9.5065805e-4f;
    q = q * s + 9.29823374e-3f;
    q = q * s - 6.55282194e-2f;
    q = q * s + 0.398465895f;
    return u * q + 0.5f;
#else
    float_vector size = (float_vector)((int_vector)x & 0x7fffffff); /* |x| */
    float_vector t = 1.0f / (1.0f + 0.23164190f * size);
    float_vector p = splat(0.5307027145f) * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.1274147960f;
    float_vector tail = p * t * exponential(-0.5f * x * x);
    return select_lanes(x > 0, 1.0f - tail, tail);
#endif
}

/* Return the activation function GELU, x Phi(x). */
INLINE float_vector gelu(float_vector x) { return x * normal_cdf_for_gelu(x); }

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
            float_vector sums[ROWS][BLOCK_VECTORS];
            prefetch_some(prefetch);
            multiply_block(a + m * rows.factor_stride, rows.factor_stride, inputs, weights, sums);
            size_t num_rows = min_size(rows.count - m, ROWS); /* the last tile may have fewer rows */
            for (size_t r = 0; r < num_rows; r++)
                for (int v = 0; v < BLOCK_VECTORS; v++) {
                    size_t column = n + v * LANES, place = (m + r) * rows.out_stride + column;
                    float_vector y = sums[r][v] + load(bias + column);
                    if (kind == STORE) store((float *)out + place, y);
                    if (kind == ADD) store((float *)out + place, load((float *)out + place) + y);
                    if (kind == STORE_GELU) store_factors((factor_t *)out + place, gelu(y));
                    if (kind == STORE_RELU) store_factors((factor_t *)out + place, vector_max(y, splat(0)));
                }
        }
}
#endif
