// Quantised products of pairs of 16-bit integers, in registers. quantised.h includes this in a build without TILES.
//
// 8 bits: [panel][pair of inputs][column][2], signed. 4 bits: [panel][8 inputs][column][2] words of 16 bits. The lowest
// bits hold the first pair of inputs, so that a mask and shifts extract four vectors of numbers in order. 5 and 6 bits:
// [panel][chunk] of [column][2] words with the numbers' upper bits, the first pair's in the lowest, then as with 4 bits.
#pragma once

#include "quantised.h"

typedef int16_t Words __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));

// Rounded values are int16, [rows, blocks * block].
INLINE size_t rounded_bytes(const Quantised& q, int64_t rows) { return rows * q.blocks * q.block * sizeof(int16_t); }
INLINE void put_numbers(const Quantised& q, const Rounded& to, int64_t row, int64_t at, I<LANES> numbers) {
    Halves narrow = __builtin_convertvector(numbers, Halves);
    memcpy(to.values + (row * q.blocks * q.block + at) * sizeof(int16_t), &narrow, sizeof narrow);
}

// Adds to `sums` the products of both numbers of each pair.
INLINE I<LANES> add_pairs(I<LANES> sums, Words a, Words b) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (I<LANES>)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif LANES == 16 && defined(__AVX512BW__)
    return sums + (I<LANES>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    __m256i left[LANES / 8], right[LANES / 8];
    memcpy(left, &a, sizeof a);
    memcpy(right, &b, sizeof b);
    for (int i = 0; i < LANES / 8; i++) left[i] = _mm256_madd_epi16(left[i], right[i]);
    I<LANES> products;
    memcpy(&products, left, sizeof products);
    return sums + products;
#endif
}
INLINE Words pair(const int16_t* from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (Words)(both - I<LANES>{});
}

// Returns by value, because compilers copy several loads into an array in pieces, for which the readers have to wait.
INLINE Words load_numbers(const char* from) {
    Words x;
    memcpy(&x, from, sizeof x);
    return x;
}

// The bytes of `inputs` inputs of a panel; 16 bits: widened.
template <int BITS> INLINE int64_t bytes_of(int64_t inputs) { return inputs * kColumns * BITS / 8; }

// Calls call(k, numbers) for each pair of inputs of a panel.
template <int BITS, class Call> INLINE void each_pair(const char* w, int64_t inputs, Call&& call) {
    Words numbers[kVectors];
    if constexpr (BITS == 16) {
        for (int64_t k = 0; k < inputs; k += 2, w += bytes_of<16>(2)) {
            for (int j = 0; j < kVectors; j++) numbers[j] = load_numbers(w + j * sizeof(Words));
            call(k, numbers);
        }
    } else if constexpr (BITS == 8) {
        for (int64_t k = 0; k < inputs; k += 2, w += bytes_of<8>(2)) {
            for (int j = 0; j < kVectors; j++) {
                Bytes bytes;
                memcpy(&bytes, w + j * sizeof bytes, sizeof bytes);
                numbers[j] = __builtin_convertvector(bytes, Words);
            }
            __builtin_prefetch(w + 2048);
            call(k, numbers);
        }
    } else {
        constexpr int UPPER = upper_bits(BITS);
        constexpr int16_t MASK = ((1 << UPPER) - 1) << 4;
        for (int64_t k = 0; k < inputs; k += chunk_inputs(BITS)) {
            const char* upper = w;
            if constexpr (UPPER) w += kVectors * sizeof(Words);
            for (int e = 0; e < chunk_inputs(BITS); e += 8, w += bytes_of<4>(8)) {
                Words words[kVectors];
                for (int j = 0; j < kVectors; j++) words[j] = load_numbers(w + j * sizeof(Words));
                __builtin_prefetch(w + 2048);
                __builtin_prefetch(w + 2112);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    for (int j = 0; j < kVectors; j++) {
                        numbers[j] = (words[j] >> (4 * i)) & 15;
                        if constexpr (UPPER) {
                            int shift = (e / 2 + i) * UPPER - 4;
                            Words bits = load_numbers(upper + j * sizeof(Words));
                            numbers[j] |= (shift < 0 ? bits << -shift : bits >> shift) & MASK;
                        }
                    }
                    call(k + e + 2 * i, numbers);
                }
            }
        }
    }
}

// Widens blocks of a panel to 16 bits, for several tiles of rows.
template <int BITS> INLINE void widen_blocks(const char* w, int64_t inputs, char* wide) {
    each_pair<BITS>(w, inputs, [&](int64_t k, const Words* numbers) {
        for (int j = 0; j < kVectors; j++)
            memcpy(wide + bytes_of<16>(k) + j * sizeof(Words), numbers + j, sizeof(Words));
    });
}

// Adds to c, [M, kColumns], the product of M rows and the blocks from `begin` to `end` of a panel, which are at `w`.
template <int M, int BITS>
static __attribute__((noinline)) void quantised_tile(const Quantised& weight, const Rounded& rounded, int64_t row,
                                                     int64_t panel, int64_t begin, int64_t end, const char* w, float* c,
                                                     int64_t ldc) {
    // Copies, which no store into c can change.
    const Quantised q = weight;
    const Rounded x = rounded;
    int64_t depth = q.blocks * q.block;
    for (int64_t b = begin; b < end; b++, w += bytes_of<BITS>(q.block)) {
        const int16_t* values = (const int16_t*)x.values + row * depth + b * q.block;
        int64_t which = row * q.blocks + b, at = columns_at(q, panel, b);
        I<LANES> sums[M][kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            I<LANES> less = -(int32_t)q.zero * x.sums[which + i * q.blocks] - I<LANES>{};
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) sums[i][j] = less;
        }
        each_pair<BITS>(w, q.block, [&](int64_t k, const Words* numbers) {
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                Words value = pair(values + i * depth + k);
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; j++) sums[i][j] = add_pairs(sums[i][j], value, numbers[j]);
            }
        });
        of_beside(q, [&](auto beside) {
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) {
                BlockColumns<decltype(beside)::value> columns(q, at + j * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) columns.add(sums[i][j], x, which + i * q.blocks, c + i * ldc + j * LANES);
            }
        });
    }
}

template <int BITS, int M = kRows>
INLINE void quantised_tiles(const Quantised& q, const Rounded& x, int64_t row, int64_t rows, int64_t panel,
                            int64_t begin, int64_t end, const char* w, float* c, int64_t ldc) {
    for (; rows >= M; rows -= M, row += M, c += M * ldc) quantised_tile<M, BITS>(q, x, row, panel, begin, end, w, c, ldc);
    if constexpr (M > 1) quantised_tiles<BITS, M - 1>(q, x, row, rows, panel, begin, end, w, c, ldc);
}

// Adds to c, [rows, kColumns], the product of `rows` rows from `row` on and one panel.
template <int BITS>
INLINE void add_panel(const Quantised& q, const Rounded& x, int64_t row, int64_t rows, int64_t panel, float* c,
                      int64_t ldc) {
    const char* w = (const char*)q.values + panel * bytes_of<BITS>(q.blocks * q.block);
    if (rows <= 2 * kRows) return quantised_tiles<BITS>(q, x, row, rows, panel, 0, q.blocks, w, c, ldc);
    // As many blocks at one time as have the inputs of the largest block.
    alignas(64) char wide[kMostBlock * kColumns * 2];
    int64_t together = kMostBlock / q.block;
    for (int64_t b = 0; b < q.blocks; b += together) {
        int64_t end = std::min(b + together, q.blocks), inputs = (end - b) * q.block;
        widen_blocks<BITS>(w, inputs, wide);
        w += bytes_of<BITS>(inputs);
        quantised_tiles<16>(q, x, row, rows, panel, b, end, wide, c, ldc);
    }
}

struct QuantisedPanels {
    const Quantised& q;
    const Rounded& x;
    const Gemm& g;
    const Part& part;

    void operator()(int64_t p, float* c, int64_t ldc = kColumns) const {
        begin_panel(g, part, p, c, ldc);
        if (q.bits == 8) add_panel<8>(q, x, part.first, part.rows, p, c, ldc);
        else if (q.bits == 6) add_panel<6>(q, x, part.first, part.rows, p, c, ldc);
        else if (q.bits == 5) add_panel<5>(q, x, part.first, part.rows, p, c, ldc);
        else add_panel<4>(q, x, part.first, part.rows, p, c, ldc);
    }
};
constexpr bool kStraightToRows = true;
