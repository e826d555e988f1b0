/* Vectors of sixteen floats, in the vector extensions of GCC and Clang.
 *
 * The compiler translates their operations to the vector instructions of the processor. AVX-512 intrinsics are used
 * only where the compiler's own code would be slower. */
#ifndef SIMD_H
#define SIMD_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16 /* floats of a vector; a lane is the place of one of them */
#define INLINE static inline __attribute__((always_inline))
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

/* Return the smallest multiple of `multiple` that is at least n. */
INLINE size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Return the smaller (min_size) or the larger (max_size) of two sizes. */
INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
INLINE size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* Read or write sixteen floats at an address of any alignment. */
INLINE f32x16 load(const float *p) { f32x16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, f32x16 v) { memcpy(p, &v, sizeof v); }

/* Return a vector with x in every lane. The compiler extends x to a vector if it is combined with one. */
INLINE f32x16 splat(float x) { return x - (f32x16){0}; } /* x + 0 would turn -0 into 0 */

/* Return a vector with the numbers 0 to 15, to compare a lane's position with a length. */
INLINE f32x16 lane_numbers(void) { return (f32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* Return a vector with the lanes of a where the mask is -1, and those of b where it is 0. */
INLINE f32x16 select_lanes(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* Return a vector with the larger (vector_max) or smaller (vector_min) number of each lane of a and b. */
#ifdef __AVX512F__
INLINE f32x16 vector_max(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32x16 vector_min(f32x16 a, f32x16 b) { return (f32x16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE f32x16 vector_max(f32x16 a, f32x16 b) { return select_lanes(a > b, a, b); }
INLINE f32x16 vector_min(f32x16 a, f32x16 b) { return select_lanes(a < b, a, b); }
#endif

/* Return the sum or the maximum of the sixteen lanes. Additions have a fixed order, so results are reproducible. */
#ifdef __AVX512F__
INLINE float reduce_sum(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float reduce_max(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float reduce_sum(f32x16 v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
INLINE float reduce_max(f32x16 v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}
#endif

/* Return e^x for x <= 88, with a relative error of 2e-7; below -87 the result is e^-87.
 *
 * e^x = 2^n e^r, where n is x / ln(2) rounded to an integer, and r = x - n ln(2), so that |r| <= ln(2) / 2. e^r is
 * computed as a minimax polynomial p. */
INLINE f32x16 exponential(f32x16 x) {
    x = vector_max(x, splat(-87.0f));
#ifdef __AVX512F__
    f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32x16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    f32x16 shifted = x * 1.44269504f + magic, n = shifted - magic;
#endif
    /* ln(2) is the difference of the two constants. The product with the first one, which has few bits, is exact. */
    f32x16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = splat(0.00829027207f) * r + 0.0418981596f;
    p = p * r + 0.166676381f;
    p = p * r + 0.499991478f;
    p = p * r + 0.999999706f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* The last bits of `shifted` are the integer n. Adding n to the exponent bits of p multiplies p by 2^n. */
    return (f32x16)((i32x16)p + (((i32x16)shifted - (i32x16)magic) << 23));
#endif
}

/* Return 2 atanh(s) / s = ln((1 + s) / (1 - s)) / s for |s| <= 0.18: the first terms of its series in t = s^2. */
INLINE f32x16 log_ratio_series(f32x16 t) {
    f32x16 p = splat(2.0f / 9) * t + 2.0f / 7;
    p = p * t + 2.0f / 5;
    p = p * t + 2.0f / 3;
    return p * t + 2.0f;
}

/* Return the natural logarithm of positive normal numbers.
 *
 * x = m 2^exponent with m in [sqrt(1/2), sqrt(2)), so ln(x) = ln(m) + exponent ln(2). With s = (m - 1) / (m + 1),
 * ln(m) = 2 atanh(s). */
INLINE f32x16 logarithm(f32x16 x) {
    /* 0x3f3504f3 are the bits of sqrt(1/2). Without them, the upper bits of x are the exponent, the lower ones m. */
    i32x16 bits = (i32x16)x - 0x3f3504f3;
    i32x16 exponent = bits >> 23;
    f32x16 m = (f32x16)((bits & 0x7fffff) + 0x3f3504f3);
    f32x16 s = (m - 1.0f) / (m + 1.0f), t = s * s;
    f32x16 p = log_ratio_series(t);
    return __builtin_convertvector(exponent, f32x16) * 0.69314718f + p * s;
}
#endif
