/* Sixteen floats at a time, in the vector extensions of GCC and Clang: whatever the processor has is made of them. */
#ifndef LANES_H
#define LANES_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

INLINE size_t whole(size_t n, size_t of) { return (n + of - 1) / of * of; }
INLINE v16 load(const float *p) { v16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, v16 v) { memcpy(p, &v, sizeof v); }
INLINE v16 all(float x) { return x - (v16){0}; }
INLINE v16 chosen(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }
#ifdef __AVX512F__
INLINE v16 larger(v16 a, v16 b) { return (v16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE v16 smaller(v16 a, v16 b) { return (v16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE v16 larger(v16 a, v16 b) { return chosen(a > b, a, b); }
INLINE v16 smaller(v16 a, v16 b) { return chosen(a < b, a, b); }
#endif
#ifdef __AVX512F__
INLINE float sum(v16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float largest(v16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float sum(v16 v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
INLINE float largest(v16 v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}
#endif

/* e to the x, for x of at most 88: 2^n times the minimax polynomial on |r| <= ln 2 / 2, relative error 2e-7; next to
 * nothing below -87. */
INLINE v16 exponential(v16 x) {
    x = larger(x, all(-87.0f));
#ifdef __AVX512F__
    v16 n = (v16)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const v16 magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    v16 shifted = x * 1.44269504f + magic, n = shifted - magic;
#endif
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 p = all(0.00829027207f) * r + 0.0418981596f;
    p = p * r + 0.166676381f;
    p = p * r + 0.499991478f;
    p = p * r + 0.999999706f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (v16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (v16)((i16)p + (((i16)shifted - (i16)magic) << 23));
#endif
}

/* ln of positive normal numbers: 2 atanh((m - 1) / (m + 1)) for m in [sqrt 1/2, sqrt 2), and the exponent. */
INLINE v16 logarithm(v16 x) {
    i16 bits = (i16)x - 0x3f3504f3;
    i16 exponent = bits >> 23;
    v16 m = (v16)((bits & 0x7fffff) + 0x3f3504f3);
    v16 s = (m - 1.0f) / (m + 1.0f), t = s * s;
    v16 p = all(2.0f / 9) * t + 2.0f / 7;
    p = p * t + 2.0f / 5;
    p = p * t + 2.0f / 3;
    p = p * t + 2.0f;
    return __builtin_convertvector(exponent, v16) * 0.69314718f + p * s;
}
#endif
