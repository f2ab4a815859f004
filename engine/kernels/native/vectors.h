// The vector type of all kernels. It is the compilers' own extension, so that the same source becomes SSE, AVX2 or
// AVX-512 by the build flags, and a vector may be wider than the machine's.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef LANES
#error "LANES: floats in a vector, 8 (AVX2) or 16 (AVX-512)"
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

using bf16 = uint16_t;

template <int W>
struct Vec {
    typedef float F __attribute__((vector_size(4 * W)));
    typedef int32_t I __attribute__((vector_size(4 * W)));
    typedef uint32_t U __attribute__((vector_size(4 * W)));
    typedef uint16_t H __attribute__((vector_size(2 * W)));
};
template <int W> using F = typename Vec<W>::F;
template <int W> using I = typename Vec<W>::I;
template <int W> using U = typename Vec<W>::U;
template <int W> using H = typename Vec<W>::H;

// Prefetches a cache line for writing.
INLINE void ask_to_write(const void* at) {
#if defined(__x86_64__)
    // In assembly, because compilers emit a plain prefetch unless told that the CPU has this one. Other CPUs ignore it.
    asm volatile("prefetchw %0" : : "m"(*(const char*)at));
#else
    __builtin_prefetch(at, 1);
#endif
}

template <int W> INLINE F<W> splat(float x) { return x - F<W>{}; }

template <int W> INLINE F<W> load(const float* from) {
    F<W> x;
    memcpy(&x, from, sizeof x);
    return x;
}

// Loads numbers of one or two bytes, widened. It uses intrinsics if possible, because GCC (12) widens vectors of the
// machine's size in halves, and bytes to floats one by one.
template <int W> INLINE U<W> load_wide(const uint16_t* from) {
#ifdef __AVX2__
    if constexpr (W == 8) return (U<W>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
#ifdef __AVX512F__
    if constexpr (W == 16) return (U<W>)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#endif
    H<W> x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, U<W>);
}

template <int W> INLINE I<W> load_wide(const int8_t* from) {
#ifdef __AVX2__
    if constexpr (W == 8) return (I<W>)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#endif
#ifdef __AVX512F__
    if constexpr (W == 16) return (I<W>)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
    typedef int8_t B __attribute__((vector_size(W)));
    B x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, I<W>);
}

// Exact, because a bf16 is the upper half of a float.
template <int W> INLINE F<W> load(const bf16* from) { return (F<W>)(load_wide<W>(from) << 16); }

template <int W> INLINE F<W> load(const int8_t* from) { return __builtin_convertvector(load_wide<W>(from), F<W>); }

// Loads pairs of bf16 as words.
template <int W> INLINE U<W> load_words(const bf16* from) {
    U<W> x;
    memcpy(&x, from, sizeof x);
    return x;
}

template <int W> INLINE void store(float* to, F<W> x) { memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even. NaN stays NaN.
template <int W> INLINE H<W> narrow(F<W> x) {
    U<W> bits = (U<W>)x;
    U<W> rounded = bits + 0x7fff + (bits >> 16 & 1);
    U<W> quiet = bits | 0x400000;
    return __builtin_convertvector((x != x ? quiet : rounded) >> 16, H<W>);
}
template <int W> INLINE void store(bf16* to, F<W> x) {
    H<W> y = narrow<W>(x);
    memcpy(to, &y, sizeof y);
}

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
INLINE void put(float* to, float x) { *to = x; }
INLINE void put(bf16* to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *to = (bf16)((x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The larger number; `b` if either is NaN. It uses intrinsics, because GCC (12) compares and blends.
template <int W> INLINE F<W> larger(F<W> a, F<W> b) {
#ifdef __AVX__
    if constexpr (W == 4) return (F<W>)_mm_max_ps((__m128)a, (__m128)b);
    if constexpr (W == 8) return (F<W>)_mm256_max_ps((__m256)a, (__m256)b);
#endif
    return a > b ? a : b;
}

// The lower or upper half of a vector.
template <int W, int UPPER> INLINE F<W / 2> half(F<W> x) {
    F<W / 2> y;
    memcpy(&y, (const char*)&x + UPPER * sizeof y, sizeof y);
    return y;
}

INLINE F<8> joined(F<4> lower, F<4> upper) {
#ifdef __AVX__
    return (F<8>)_mm256_set_m128((__m128)upper, (__m128)lower);  // GCC 12 compiles the code below to go through memory
#else
    F<8> x;
    memcpy(&x, &lower, sizeof lower);
    memcpy((char*)&x + sizeof lower, &upper, sizeof upper);
    return x;
#endif
}

template <int W> INLINE float sum(F<W> x) {
    if constexpr (W == 1) return x[0];
    else return sum<W / 2>(half<W, 0>(x) + half<W, 1>(x));
}
template <int W> INLINE float largest(F<W> x) {
    if constexpr (W == 1) return x[0];
    else return largest<W / 2>(larger<W / 2>(half<W, 0>(x), half<W, 1>(x)));
}

// Transposes a square.
template <int W> INLINE void transpose(F<W>* square) {
    I<W> even, odd;  // interleave the first halves, and the second halves, of two vectors
    for (int i = 0; i < W; i++) {
        even[i] = i / 2 + i % 2 * W;
        odd[i] = even[i] + W / 2;
    }
    for (int half = 1; half < W; half *= 2) {
        F<W> next[W];
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = __builtin_shuffle(square[i], square[i + W / 2], even);
            next[2 * i + 1] = __builtin_shuffle(square[i], square[i + W / 2], odd);
        }
        memcpy(square, next, sizeof next);
    }
}

// The sum of each of four vectors, as a vector of four.
template <int W> INLINE F<4> sums(F<W> a, F<W> b, F<W> c, F<W> d) {
    if constexpr (W > 8) {
        return sums<W / 2>(half<W, 0>(a) + half<W, 1>(a), half<W, 0>(b) + half<W, 1>(b), half<W, 0>(c) + half<W, 1>(c),
                           half<W, 0>(d) + half<W, 1>(d));
    } else if constexpr (W == 8) {
        // Sum within halves and join these last: 11 instructions. Joining each vector's halves first would take 17.
        typedef I<8> P;
        auto pairs = [](F<8> x, F<8> y) {
            return __builtin_shuffle(x, y, P{0, 8, 1, 9, 4, 12, 5, 13}) + __builtin_shuffle(x, y, P{2, 10, 3, 11, 6, 14, 7, 15});
        };
        F<8> ab = pairs(a, b), cd = pairs(c, d);
        F<8> all = __builtin_shuffle(ab, cd, P{0, 1, 8, 9, 4, 5, 12, 13}) + __builtin_shuffle(ab, cd, P{2, 3, 10, 11, 6, 7, 14, 15});
        return half<8, 0>(all) + half<8, 1>(all);
    } else {
        typedef I<4> P;
        F<4> ab = __builtin_shuffle(a, b, P{0, 4, 1, 5}) + __builtin_shuffle(a, b, P{2, 6, 3, 7});
        F<4> cd = __builtin_shuffle(c, d, P{0, 4, 1, 5}) + __builtin_shuffle(c, d, P{2, 6, 3, 7});
        return __builtin_shuffle(ab, cd, P{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, P{2, 3, 6, 7});
    }
}

// The sum of each of 16 vectors of 16, as one vector, each in the order of `sums`. It takes 45 instructions instead of
// 76. It takes the vectors in fours, so that few are held at one time.
struct SumsOf16 {
    F<16> fours[4];

    // The index of the vector that is number j of four g, and the lowest index of four g.
    static constexpr int key(int g, int j) { return g / 2 * 8 + g % 2 * 2 + j % 2 * 4 + j / 2; }
    static constexpr int first(int g) { return key(g, 0); }

    INLINE_MEMBER void take(int g, const F<16> (&s)[4]) {
        F<16> x = halves(s[0], s[1]), y = halves(s[2], s[3]);
        fours[g] = __builtin_shuffle(x, y, I<16>{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
                   __builtin_shuffle(x, y, I<16>{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    }
    INLINE_MEMBER F<16> all() const {
        F<16> x = pairs(fours[0], fours[1]), y = pairs(fours[2], fours[3]);
        return __builtin_shuffle(x, y, I<16>{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
               __builtin_shuffle(x, y, I<16>{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
    }

  private:
    static INLINE_MEMBER F<16> halves(F<16> a, F<16> b) {
        return __builtin_shuffle(a, b, I<16>{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
               __builtin_shuffle(a, b, I<16>{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    }
    static INLINE_MEMBER F<16> pairs(F<16> a, F<16> b) {
        return __builtin_shuffle(a, b, I<16>{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
               __builtin_shuffle(a, b, I<16>{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    }
};

// Like `sums`, for the largest numbers. NaN is ignored.
template <int W> INLINE F<4> largest_of(F<W> a, F<W> b, F<W> c, F<W> d) {
    if constexpr (W > 4) {
        auto halves = [](F<W> x) { return larger<W / 2>(half<W, 0>(x), half<W, 1>(x)); };
        return largest_of<W / 2>(halves(a), halves(b), halves(c), halves(d));
    } else {
        typedef I<4> P;
        F<4> ab = larger<4>(__builtin_shuffle(a, b, P{0, 4, 1, 5}), __builtin_shuffle(a, b, P{2, 6, 3, 7}));
        F<4> cd = larger<4>(__builtin_shuffle(c, d, P{0, 4, 1, 5}), __builtin_shuffle(c, d, P{2, 6, 3, 7}));
        return larger<4>(__builtin_shuffle(ab, cd, P{0, 1, 4, 5}), __builtin_shuffle(ab, cd, P{2, 3, 6, 7}));
    }
}

// e^x within 2 units of the last place. It is 0 below -87.3, where fp32 has no normal numbers left, and at most e^88.
// The power of two is exact, the rest a polynomial on [-ln 2 / 2, ln 2 / 2] (coefficients as in Cephes' expf).
template <int W> INLINE F<W> exponential(F<W> x) {
    F<W> low = splat<W>(-87.3f), high = splat<W>(88.0f);
    F<W> y = larger<W>(low, x);
    y = y > high ? high : y;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the lowest bits
    F<W> shifted = y * 1.44269504f + magic;
    F<W> n = shifted - magic;
    F<W> r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    F<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    F<W> scale = (F<W>)(((I<W>)shifted + 127) << 23);
    F<W> result = p * scale;
    return x < low ? F<W>{} : result;
}

// 2^x for x of at most 0, within 2 units of the last place. It is 0 below -127, and at most 2^-126 from there to -126.
// NaN stays NaN. The integer part goes into the exponent, the rest is a polynomial on [-1/2, 1/2] (coefficients as in
// Cephes' exp2f) that is 1 at 0.
template <int W> INLINE F<W> two_to(F<W> x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the lowest bits
    F<W> y = larger<W>(splat<W>(-127.0f), x), shifted = y + magic, r = y - (shifted - magic);
    F<W> p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    p = p * r + 1.0f;
    return (F<W>)((I<W>)p + ((I<W>)shifted << 23));
}

// ln x of a normal positive number, within 2 units of the last place (polynomial as in Cephes' logf).
template <int W> INLINE F<W> logarithm(F<W> x) {
    I<W> bits = (I<W>)x;
    I<W> power = (bits - 0x3f3504f3) >> 23;  // so that the rest is from sqrt(1/2) to sqrt(2)
    F<W> f = (F<W>)(bits - (power << 23)) - 1.0f;
    F<W> e = __builtin_convertvector(power, F<W>);
    F<W> p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * f * f;
    p = p - e * 2.12194440e-4f - 0.5f * f * f;
    return f + p + e * 0.693359375f;
}

template <int W> INLINE bool any(I<W> mask) {
    int64_t parts[W / 2];
    memcpy(parts, &mask, sizeof parts);
    int64_t all = 0;
    for (int i = 0; i < W / 2; i++) all |= parts[i];
    return all != 0;
}
