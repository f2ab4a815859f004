// The storage of a head's key or value in the KV cache: plain fp32 or bf16, or one byte a number as in
// engine/kernels/reference.py: integers followed by an fp32 scale, or floats (e4m3) without one.
#pragma once

#include "vectors.h"

template <int W> struct ByteVec {
    typedef int8_t I __attribute__((vector_size(W)));
    typedef uint8_t U __attribute__((vector_size(W)));
    typedef int16_t Wide __attribute__((vector_size(2 * W)));
};

// A float with four bits of exponent and three of mantissa (arXiv 2209.05433).
struct e4m3 {
    uint8_t bits;
};

// Widens half-precision floats. The only NaN that may occur is the one with all bits set.
template <int W> INLINE F<W> widen_half(H<W> bits) {
#ifdef __F16C__
    if constexpr (W > 8) {
        H<8> parts[W / 8];
        memcpy(parts, &bits, sizeof bits);
        F<8> wide[W / 8];
        for (int i = 0; i < W / 8; i++) wide[i] = widen_half<8>(parts[i]);
        F<W> x;
        memcpy(&x, wide, sizeof x);
        return x;
    } else {
        return (F<W>)_mm256_cvtph_ps((__m128i)bits);
    }
#else
    U<W> wide = __builtin_convertvector(bits, U<W>), size = (wide & 0x7fff) << 13;
    // Subnormals have no leading one: add it, and subtract its value.
    F<W> normal = (F<W>)(size + (112u << 23)), small = (F<W>)(size + (113u << 23)) - 6.103515625e-5f;
    F<W> x = size < (1u << 23) ? small : normal;
    return (F<W>)((U<W>)(wide > 0x7fff ? -x : x) | (size == 0x7fffu << 13 ? 0x7fc00000u : 0u));
#endif
}

// Loads bytes into the upper halves of words.
template <int W> INLINE H<W> load_upper(const uint8_t* from) {
#ifdef __AVX2__
    if constexpr (W == 8) return (H<W>)_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadu_si64(from));
    if constexpr (W == 16)
        return (H<W>)_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 8);
#endif
    typename ByteVec<W>::U x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, H<W>) << 8;
}

// Loads exactly a 256th of each number: its bits, moved one place down, are that in half precision.
template <int W> INLINE F<W> load(const e4m3* from) {
    // All bits but the sign move to the right, because half precision has one more bit of exponent.
    H<W> bits = (H<W>)((typename ByteVec<W>::Wide)load_upper<W>(&from->bits) >> 1) & 0xbfff;
    return widen_half<W>(bits | (H<W>)((bits & 0x3f80) == 0x3f80));
}

// Rounds to nearest, ties to even, as torch does. Larger numbers become the largest; NaN stays NaN.
template <int W> INLINE void store(e4m3* to, F<W> x) {
    U<W> bits = (U<W>)x, sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    U<W> most = U<W>{} + 0x43e00000;  // 448
    size = size > most ? most : size;
    U<W> normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    // Numbers below 2^-6 are multiples of 2^-9, the value of the last place of 2^14.
    U<W> small = (U<W>)((F<W>)size + 16384.0f) - 0x46800000;
    U<W> found = size < 0x3c800000 ? small : normal;
    auto narrow = __builtin_convertvector((x != x ? U<W>{} + 0x7f : found) | sign, typename ByteVec<W>::U);
    memcpy(to, &narrow, sizeof narrow);
}

template <class T> INLINE void put_row(T* to, const float* from, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store<LANES>(to + i, load<LANES>(from + i));
    for (; i < width; i++) put(to + i, from[i]);
}

// The storage of numbers of type T. `load` returns numbers divided by `scale`. `bytes`: the size of `dim` numbers.
template <class T> struct Stored {
    static constexpr bool scaled = false;
    static constexpr int64_t bytes(int64_t dim) { return dim * (int64_t)sizeof(T); }
    static void write(void* to, const float* from, int64_t dim) { put_row((T*)to, from, dim); }
};

template <> struct Stored<e4m3> {
    static constexpr bool scaled = true;
    static constexpr int64_t bytes(int64_t dim) { return dim; }
    static float scale(const e4m3*, int64_t) { return 256.0f; }
    // `dim` is a multiple of 8.
    static void write(void* to, const float* from, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 8) store<8>((e4m3*)to + i, load<8>(from + i));
    }
};

template <> struct Stored<int8_t> {
    static constexpr bool scaled = true;
    static constexpr int64_t bytes(int64_t dim) { return dim + (int64_t)sizeof(float); }
    static float scale(const int8_t* of, int64_t dim) {
        float found;
        memcpy(&found, of + dim, sizeof found);
        return found;
    }
    // `dim` is a multiple of 8.
    static void write(void* to, const float* from, int64_t dim) {
        // The bits of absolute values, as integers, have the same order as the floats, and NaN is the largest.
        I<8> most{};
        for (int64_t i = 0; i < dim; i += 8) {
            I<8> size = (I<8>)load<8>(from + i) & 0x7fffffff;
            most = size > most ? size : most;
        }
        int32_t top = 0;
        for (int i = 0; i < 8; i++) top = most[i] > top ? most[i] : top;
        float scale;
        memcpy(&scale, &top, sizeof scale);
        scale = (scale < 1e-30f ? 1e-30f : scale) / 127.0f;
        const float magic = 12582912.0f;  // adding it rounds to an integer in the lowest bits
        for (int64_t i = 0; i < dim; i += 8) {
            F<8> q = load<8>(from + i) / scale;
            I<8> rounded = (I<8>)((q == q ? q : F<8>{}) + magic) - 0x4b400000;
            auto narrow = __builtin_convertvector(rounded, typename ByteVec<8>::I);
            memcpy((int8_t*)to + i, &narrow, sizeof narrow);
        }
        memcpy((int8_t*)to + dim, &scale, sizeof scale);
    }
};

// The kinds of a cache, as in the ABI and library.py. kPaired is bf16 as paired.h says, for a build with TILES.
enum { kFp32, kBf16, kInt8, kFp8, kPaired };

// Calls call(T{}) with the storage type T of a cache of that kind.
template <class Call> INLINE void of_kind(int64_t kind, Call&& call) {
    switch (kind) {
        case kFp32: return call(float{});
        case kBf16: return call(bf16{});
        case kInt8: return call(int8_t{});
        default: return call(e4m3{});
    }
}
