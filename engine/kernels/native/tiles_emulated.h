// What the instructions of tiles.h do, to the bit, for tests on CPUs that have none. It needs AVX2 and FMA.
//
// What the CPU refuses ends the process here too: tiles that are not configured, and sizes that do not go together.
#pragma once

#include <cstdlib>

#include "vectors.h"

struct EmulatedTiles {
    TileSizes sizes;
    alignas(64) uint8_t data[8][16][64];
};
static thread_local EmulatedTiles emulated;

INLINE void require(bool allowed) {
    if (!allowed) std::abort();
}

INLINE int ask_for_tiles() { return 0; }

static void ldtilecfg(const TileSizes& sizes) {
    require(sizes.palette == 1 && !sizes.start_row);
    for (int i = 0; i < 16; i++) {
        require(sizes.rows[i] <= 16 && sizes.bytes[i] <= 64 && !sizes.rows[i] == !sizes.bytes[i]);
        require(i < 8 || !sizes.rows[i]);
    }
    emulated.sizes = sizes;
    memset(emulated.data, 0, sizeof emulated.data);
}
static void tilerelease() { emulated = {}; }

template <int T> static void tilezero() {
    require(emulated.sizes.rows[T]);
    memset(emulated.data[T], 0, sizeof emulated.data[T]);
}
template <int T> static void tileloadd(const void* from, int64_t stride) {
    tilezero<T>();
    for (int64_t i = 0; i < emulated.sizes.rows[T]; i++)
        memcpy(emulated.data[T][i], (const char*)from + i * stride, emulated.sizes.bytes[T]);
}
template <int T> static void tilestored(void* to, int64_t stride) {
    require(emulated.sizes.rows[T]);
    for (int64_t i = 0; i < emulated.sizes.rows[T]; i++)
        memcpy((char*)to + i * stride, emulated.data[T][i], emulated.sizes.bytes[T]);
}

// Calls add(row of C, row of A, B's rows, words of a row of A) for each row of C.
template <int C, int A, int B, class Add> INLINE void each_row_of_tile(Add&& add) {
    static_assert(C != A && C != B && A != B, "three tiles");
    const TileSizes& sizes = emulated.sizes;
    require(sizes.rows[C] && sizes.rows[C] == sizes.rows[A] && sizes.bytes[C] == sizes.bytes[B]);
    require(sizes.bytes[A] == 4 * sizes.rows[B] && sizes.bytes[C] % 4 == 0);
    for (int m = 0; m < sizes.rows[C]; m++)
        add(emulated.data[C][m], emulated.data[A][m], emulated.data[B], sizes.rows[B]);
}

// Each sum gets two chains of fused multiply-adds, which start from 0 and go over the words of A's row in order: one
// over the lower halves of words, one over the upper halves. The chains are added to each other, and then to the sum.
template <int C, int A, int B> static __attribute__((noinline)) void tdpbf16ps() {
    TileRounding rounding;
    each_row_of_tile<C, A, B>([](uint8_t* c, const uint8_t* a, const uint8_t (*b)[64], int words) {
        for (int at = 0; at < 64; at += 32) {
            F<8> lower{}, upper{}, sums;
            for (int k = 0; k < words; k++) {
                uint32_t pair;
                memcpy(&pair, a + 4 * k, sizeof pair);
                U<8> column = load_words<8>((const bf16*)(b[k] + at));
                F<8> x = (F<8>)(U<8>{} + (pair << 16)), y = (F<8>)(U<8>{} + (pair & 0xffff0000u));
                lower = (F<8>)_mm256_fmadd_ps((__m256)x, (__m256)(column << 16), (__m256)lower);
                upper = (F<8>)_mm256_fmadd_ps((__m256)y, (__m256)(column & 0xffff0000u), (__m256)upper);
            }
            memcpy(&sums, c + at, sizeof sums);
            sums += lower + upper;
            memcpy(c + at, &sums, sizeof sums);
        }
    });
}

template <int C, int A, int B, class Number> static void emulated_byte_products() {
    each_row_of_tile<C, A, B>([](uint8_t* c, const uint8_t* a, const uint8_t (*b)[64], int words) {
        for (int n = 0; n < 16; n++) {
            uint32_t sum;
            memcpy(&sum, c + 4 * n, sizeof sum);
            for (int k = 0; k < 4 * words; k++) sum += (uint32_t)((Number)a[k] * (int8_t)b[k / 4][4 * n + k % 4]);
            memcpy(c + 4 * n, &sum, sizeof sum);
        }
    });
}
template <int C, int A, int B> static void tdpbssd() { emulated_byte_products<C, A, B, int8_t>(); }
template <int C, int A, int B> static void tdpbusd() { emulated_byte_products<C, A, B, uint8_t>(); }
