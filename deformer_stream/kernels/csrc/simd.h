/* Vectors of floats, as wide as the registers of the processor, in the vector extensions of GCC and Clang.
 *
 * The compiler translates their operations to the vector instructions of the processor. Wider vectors would be correct,
 * too, but GCC stores them in memory. Intrinsics are used only where the compiler's own code would be slower. */
#ifndef SIMD_H
#define SIMD_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

/* LANES: floats of a vector, a divisor of 16. A lane is the place of one of them. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else /* SSE, NEON */
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
typedef float float_vector __attribute__((vector_size(4 * LANES)));
typedef int32_t int_vector __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vector __attribute__((vector_size(2 * LANES)));

/* Return the smallest multiple of `multiple` that is at least n. */
INLINE size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Return the smaller (min_size) or the larger (max_size) of two sizes. */
INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
INLINE size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* Read or write a vector of floats at an address of any alignment. */
INLINE float_vector load(const float *p) { float_vector v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, float_vector v) { memcpy(p, &v, sizeof v); }

/* Return a vector with x in every lane. The compiler extends x to a vector if it is combined with one. */
INLINE float_vector splat(float x) { return x - (float_vector){0}; } /* x + 0 would turn -0 into 0 */

/* Return a vector with the numbers 0, 1, 2 and so on, to compare a lane's position with a length. */
INLINE float_vector lane_numbers(void) {
    static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

/* Return a vector with the lanes of a where the mask is -1, and those of b where it is 0. */
INLINE float_vector select_lanes(int_vector mask, float_vector a, float_vector b) {
    return (float_vector)((mask & (int_vector)a) | (~mask & (int_vector)b));
}

/* Return a vector with the larger (vector_max) or smaller (vector_min) number of each lane of a and b. */
#if LANES == 16
INLINE float_vector vector_max(float_vector a, float_vector b) {
    return (float_vector)_mm512_max_ps((__m512)a, (__m512)b);
}
INLINE float_vector vector_min(float_vector a, float_vector b) {
    return (float_vector)_mm512_min_ps((__m512)a, (__m512)b);
}
#elif LANES == 8
INLINE float_vector vector_max(float_vector a, float_vector b) {
    return (float_vector)_mm256_max_ps((__m256)a, (__m256)b);
}
INLINE float_vector vector_min(float_vector a, float_vector b) {
    return (float_vector)_mm256_min_ps((__m256)a, (__m256)b);
}
#else
INLINE float_vector vector_max(float_vector a, float_vector b) { return select_lanes(a > b, a, b); }
INLINE float_vector vector_min(float_vector a, float_vector b) { return select_lanes(a < b, a, b); }
#endif

/* Return the sum or the maximum of all lanes. Additions have a fixed order, so results are reproducible. */
#ifdef __AVX512F__
INLINE float reduce_sum(float_vector v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float reduce_max(float_vector v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float reduce_sum(float_vector v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
INLINE float reduce_max(float_vector v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
#endif

/* Return e^x for x <= 88, with a relative error of 2e-7; below -87 the result is e^-87.
 *
 * e^x = 2^n e^r, where n is x / ln(2) rounded to an integer, and r = x - n ln(2), so that |r| <= ln(2) / 2. e^r is
 * computed as a minimax polynomial p. */
INLINE float_vector exponential(float_vector x) {
    x = vector_max(x, splat(-87.0f));
#ifdef __AVX512F__
    enum { TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    float_vector n = (float_vector)_mm512_roundscale_ps((__m512)(x * 1.44269504f), TO_NEAREST);
#else
    const float_vector magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    float_vector shifted = x * 1.44269504f + magic, n = shifted - magic;
#endif
    /* ln(2) is the difference of the two constants. The product with the first one, which has few bits, is exact. */
    float_vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float_vector p = splat(0.00829027207f) * r + 0.0418981596f;
    p = p * r + 0.166676381f;
    p = p * r + 0.499991478f;
    p = p * r + 0.999999706f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (float_vector)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* The last bits of `shifted` are the integer n. Adding n to the exponent bits of p multiplies p by 2^n. */
    return (float_vector)((int_vector)p + (((int_vector)shifted - (int_vector)magic) << 23));
#endif
}

/* Return 2 atanh(s) / s = ln((1 + s) / (1 - s)) / s for |s| <= 0.18: the first terms of its series in t = s^2. */
INLINE float_vector log_ratio_series(float_vector t) {
    float_vector p = splat(2.0f / 9) * t + 2.0f / 7;
    p = p * t + 2.0f / 5;
    p = p * t + 2.0f / 3;
    return p * t + 2.0f;
}

/* Return the natural logarithm of positive normal numbers.
 *
 * x = m 2^exponent with m in [sqrt(1/2), sqrt(2)), so ln(x) = ln(m) + exponent ln(2). With s = (m - 1) / (m + 1),
 * ln(m) = 2 atanh(s). */
INLINE float_vector logarithm(float_vector x) {
    /* 0x3f3504f3 are the bits of sqrt(1/2). Without them, the upper bits of x are the exponent, the lower ones m. */
    int_vector bits = (int_vector)x - 0x3f3504f3;
    int_vector exponent = bits >> 23;
    float_vector m = (float_vector)((bits & 0x7fffff) + 0x3f3504f3);
    float_vector s = (m - 1.0f) / (m + 1.0f), t = s * s;
    float_vector p = log_ratio_series(t);
    return __builtin_convertvector(exponent, float_vector) * 0.69314718f + p * s;
}
#endif
