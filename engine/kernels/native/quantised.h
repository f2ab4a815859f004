// Products of x, [rows, inputs], with weights of 4 or 8 bits. Rows are first rounded to 16 bits, with one scale for
// each block of inputs. So products are exact sums of integers, and this rounding is far finer than that of the
// weights. Each block is then scaled once. As in gemm.h, each output is summed in one order, whatever the other rows.
//
// 8 bits: [panel][pair of inputs][column][2], signed. 4 bits: [panel][8 inputs][column][2] words of 16 bits. The lowest
// bits hold the first pair of inputs, so that a mask and shifts extract four vectors of numbers in order.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "gemm.h"
#include "rows.h"

// quantised.py repeats this structure. Each field has eight bytes.
struct Quantised {
    const void* values;
    const float* scales;   // [panel][group][column]
    const int16_t* zeros;  // [panel][group][column]; null: all are 8. Only for 4 bits
    int64_t bits, block;   // block: inputs that share a scale of the row; a multiple of 8 that divides a group
    const int64_t* order;  // [inputs]: the index in the row of each input; null: they are in order
    int64_t blocks, group;  // blocks of a row, the last of which may extend beyond the inputs; blocks of a group
};

typedef int16_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));

constexpr int kMostBlock = 128;

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

struct Rounded {
    int16_t* values;  // [rows, blocks * block]
    float* scales;    // [rows, blocks]
    int32_t* sums;    // [rows, blocks], of the values
};

// Rounds one row, with zeros beyond its inputs. With 16 bits, 128 products with 8 bits are still far from overflow. A
// block with a NaN or infinity gets a scale of NaN.
INLINE void round_row(const float* x, int64_t inputs, const Quantised& q, const Rounded& to, int64_t row) {
    alignas(64) float last[kMostBlock];
    for (int64_t b = 0; b < q.blocks; b++) {
        const float* from = x + b * q.block;
        int64_t count = std::min(q.block, inputs - b * q.block);
        if (count < q.block) memset(last, 0, sizeof last);
        if (q.order) {
            for (int64_t k = 0; k < count; k++) last[k] = x[q.order[b * q.block + k]];
            from = last;
        } else if (count < q.block) {
            memcpy(last, from, count * sizeof(float));
            from = last;
        }
        F<LANES> most{}, odd{};
        for (int64_t k = 0; k < q.block; k += LANES) {
            F<LANES> value = load<LANES>(from + k);
            most = larger<LANES>(larger<LANES>(value, -value), most);
            odd += value * 0.0f;
        }
        float widest = largest<LANES>(most);
        float inverse = widest > 1e-30f ? 32767.0f / widest : 0.0f;
        int16_t* values = to.values + (row * q.blocks + b) * q.block;
        I<LANES> total{};
        for (int64_t k = 0; k < q.block; k += LANES) {
            // Adding and subtracting this number rounds to an integer, ties to even.
            F<LANES> rounded = load<LANES>(from + k) * inverse + 12582912.0f - 12582912.0f;
            I<LANES> number = __builtin_convertvector(rounded, I<LANES>);
            total += number;
            Halves narrow = __builtin_convertvector(number, Halves);
            memcpy(values + k, &narrow, sizeof narrow);
        }
        int32_t sum_of = 0;
        for (int i = 0; i < LANES; i++) sum_of += total[i];
        to.scales[row * q.blocks + b] = widest / 32767.0f + sum<LANES>(odd);
        to.sums[row * q.blocks + b] = sum_of;
    }
}

// The bytes of `inputs` inputs of a panel, for 4, 8 and (widened) 16 bits.
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
        for (int64_t k = 0; k < inputs; k += 8, w += bytes_of<4>(8)) {
            Words words[kVectors];
            for (int j = 0; j < kVectors; j++) words[j] = load_numbers(w + j * sizeof(Words));
            __builtin_prefetch(w + 2048);
            __builtin_prefetch(w + 2112);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < kVectors; j++) numbers[j] = (words[j] >> (4 * i)) & 15;
                call(k + 2 * i, numbers);
            }
        }
    }
}

// Widens one block of a panel to 16 bits, for several tiles of rows.
template <int BITS> INLINE void widen_block(const char* w, int64_t inputs, char* wide) {
    each_pair<BITS>(w, inputs, [&](int64_t k, const Words* numbers) {
        for (int j = 0; j < kVectors; j++)
            memcpy(wide + bytes_of<16>(k) + j * sizeof(Words), numbers + j, sizeof(Words));
    });
}

// Adds to c, [M, kColumns], the product of M rows and the blocks from `begin` to `end` of a panel, which are at `w`.
template <int M, int BITS>
static __attribute__((noinline)) void quantised_tile(const Quantised& q, const Rounded& x, int64_t row, int64_t panel,
                                                     int64_t begin, int64_t end, const char* w, float* c, int64_t ldc) {
    int64_t depth = q.blocks * q.block, groups = q.blocks / q.group;
    for (int64_t b = begin; b < end; b++, w += bytes_of<BITS>(q.block)) {
        const int16_t* values = x.values + row * depth + b * q.block;
        I<LANES> sums[M][kVectors];
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kVectors; j++) sums[i][j] = I<LANES>{};
        each_pair<BITS>(w, q.block, [&](int64_t k, const Words* numbers) {
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) {
                Words value = pair(values + i * depth + k);
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; j++) sums[i][j] = add_pairs(sums[i][j], value, numbers[j]);
            }
        });
        int64_t at = (panel * groups + b / q.group) * kColumns;
        for (int j = 0; j < kVectors; j++) {
            F<LANES> scale = load<LANES>(q.scales + at + j * LANES);
            I<LANES> zero = (q.bits == 4 ? 8 : 0) - I<LANES>{};
            if (q.zeros) {
                Halves narrow;
                memcpy(&narrow, q.zeros + at + j * LANES, sizeof narrow);
                zero = __builtin_convertvector(narrow, I<LANES>);
            }
            for (int i = 0; i < M; i++) {
                int64_t which = (row + i) * q.blocks + b;
                F<LANES> sum = __builtin_convertvector(sums[i][j] - zero * x.sums[which], F<LANES>);
                float* to = c + i * ldc + j * LANES;
                store<LANES>(to, load<LANES>(to) + sum * (scale * x.scales[which]));
            }
        }
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
INLINE void quantised_panel(const Quantised& q, const Rounded& x, int64_t row, int64_t rows, int64_t panel, float* c,
                            int64_t ldc) {
    const char* w = (const char*)q.values + panel * bytes_of<BITS>(q.blocks * q.block);
    if (rows <= 2 * kRows) return quantised_tiles<BITS>(q, x, row, rows, panel, 0, q.blocks, w, c, ldc);
    alignas(64) char wide[kMostBlock * kColumns * 2];
    for (int64_t b = 0; b < q.blocks; b++, w += bytes_of<BITS>(q.block)) {
        widen_block<BITS>(w, q.block, wide);
        quantised_tiles<16>(q, x, row, rows, panel, b, b + 1, wide, c, ldc);
    }
}

static Rounded rounded_rows(Pool& pool, const Quantised& q, const float* x, int64_t rows, int64_t inputs) {
    size_t room = (rows * q.blocks * q.block * sizeof(int16_t) + 63) / 64 * 64;
    char* memory = (char*)pool.shared.take((room + rows * q.blocks * 8) / sizeof(float) + 1);
    Rounded r{(int16_t*)memory, (float*)(memory + room), (int32_t*)(memory + room) + rows * q.blocks};
    each_row(pool, rows, inputs, [&](int64_t row) { round_row(x + row * inputs, inputs, q, r, row); });
    return r;
}

// Like gemm.h's product: computes one panel's columns of a part's rows into `c`. It writes a whole panel even if the
// last one has fewer columns.
INLINE void product(const Quantised& q, const Rounded& r, const Gemm& g, const Part& part, int64_t p, float* c,
                    int64_t ldc) {
    int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
    for (int64_t i = 0; i < part.rows; i++) {
        memset(c + i * ldc, 0, kColumns * sizeof(float));
        if (g.bias) memcpy(c + i * ldc, g.bias + column, columns * sizeof(float));
    }
    if (q.bits == 8) quantised_panel<8>(q, r, part.first, part.rows, p, c, ldc);
    else quantised_panel<4>(q, r, part.first, part.rows, p, c, ldc);
}

static void quantised_product(Pool& pool, const Gemm& g) {
    const Quantised& q = *(const Quantised*)g.weight;
    Rounded r = rounded_rows(pool, q, g.x, g.rows, g.inputs);
    Cut cut(pool, g);
    pool.spread((int)(cut.across * cut.down), [&](int task, int) {
        Part part = cut.part(g, task);
        for (int64_t p = part.begin; p < part.end; p++) {
            int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
            float* to = g.out + part.first * g.outputs + column;
            if (columns == kColumns) {
                product(q, r, g, part, p, to, g.outputs);
                continue;
            }
            alignas(64) float edge[kTaskRows * kColumns];
            product(q, r, g, part, p, edge, kColumns);
            for (int64_t i = 0; i < part.rows; i++)
                memcpy(to + i * g.outputs, edge + i * kColumns, columns * sizeof(float));
        }
    });
}
