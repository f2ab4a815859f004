// Quantised products by AMX tiles, which multiply numbers of 8 bits. quantised.h includes this in a build with TILES.
//
// A rounded number is 256 * upper + lower, of which the upper half is signed. Both halves' products are exact, so their
// sum is that of the numbers themselves. Weights are packed by fours of inputs: [panel][four][column][4] bytes. 4 bits:
// [panel][8 inputs][column][4] bytes, whose low bits hold the first four inputs. 5 and 6 bits: [panel][chunk] of
// [column][4] bytes with the numbers' upper bits, the first four's in the lowest, then as with 4 bits.
#pragma once

#include "quantised.h"
#include "tiles.h"

constexpr int kFourBytes = 4 * kColumns;

// The inputs of a step: a block is one step, or two.
INLINE int64_t step_inputs(const Quantised& q) { return std::min<int64_t>(q.block, 64); }

// Rounded values are [block of 16 rows][step][upper, lower][row][byte]. Blocks are always whole; rows that are not there
// hold anything, and their sums are not read.
INLINE size_t rounded_bytes(const Quantised& q, int64_t rows) {
    return (rows + kTileRows - 1) / kTileRows * kTileRows * q.blocks * q.block * 2;
}
INLINE char* rows_tile(const Quantised& q, const Rounded& x, int64_t row, int64_t at) {
    int64_t step = step_inputs(q), steps = q.blocks * q.block / step;
    return x.values + (row / kTileRows * steps + at / step) * 2 * kTileRows * step;
}
INLINE void put_numbers(const Quantised& q, const Rounded& to, int64_t row, int64_t at, I<LANES> numbers) {
    typedef int8_t Quarters __attribute__((vector_size(LANES)));
    int64_t step = step_inputs(q);
    char* place = rows_tile(q, to, row, at) + row % kTileRows * step + at % step;
    Quarters upper = __builtin_convertvector(numbers >> 8, Quarters), lower = __builtin_convertvector(numbers, Quarters);
    memcpy(place, &upper, sizeof upper);
    memcpy(place + kTileRows * step, &lower, sizeof lower);
}

// Tiles 0 to 2: sums of the upper halves. 3 to 5: of the lower halves. 6: rows. 7: weights.
INLINE TileSizes sizes_for(const Quantised& q, const Part& part) {
    TileSizes sizes;
    int64_t rows = std::min<int64_t>(part.rows, kTileRows);
    for (int tile = 0; tile < 6; tile++) sizes.set(tile, rows);
    sizes.set(6, rows, step_inputs(q));
    sizes.set(7, step_inputs(q) / 4);
    return sizes;
}

// The sums of 16 rows times a block of a panel.
struct BlockSums {
    alignas(64) int32_t upper[kTileRows * kColumns], lower[kTileRows * kColumns];

    // Each half of the rows is loaded once, and the weights of the last columns serve both.
    INLINE_MEMBER void take(const char* x, const char* weight, int64_t steps, int64_t step, WeightsAhead& ahead) {
        tilezero<0>(), tilezero<1>(), tilezero<2>(), tilezero<3>(), tilezero<4>(), tilezero<5>();
        for (int64_t k = 0; k < steps; k++, x += 2 * kTileRows * step, weight += step / 4 * kFourBytes) {
            tileloadd<6>(x, step);
            ahead.ask();
            tileloadd<7>(weight, kFourBytes);
            tdpbssd<0, 6, 7>();
            ahead.ask();
            tileloadd<7>(weight + 64, kFourBytes);
            tdpbssd<1, 6, 7>();
            ahead.ask();
            tileloadd<7>(weight + 128, kFourBytes);
            tdpbssd<2, 6, 7>();
            tileloadd<6>(x + kTileRows * step, step);
            tdpbusd<5, 6, 7>();
            tileloadd<7>(weight, kFourBytes);
            tdpbusd<3, 6, 7>();
            tileloadd<7>(weight + 64, kFourBytes);
            tdpbusd<4, 6, 7>();
        }
        tilestored<0>(upper, kFourBytes), tilestored<1>(upper + 16, kFourBytes), tilestored<2>(upper + 32, kFourBytes);
        tilestored<3>(lower, kFourBytes), tilestored<4>(lower + 16, kFourBytes), tilestored<5>(lower + 32, kFourBytes);
    }
    INLINE_MEMBER I<LANES> of(int row, int column) const {
        I<LANES> high, low;
        memcpy(&high, upper + row * kColumns + column, sizeof high);
        memcpy(&low, lower + row * kColumns + column, sizeof low);
        return (high << 8) + low;
    }
};

// Widens a block of a panel from fewer bits to 8.
template <int BITS> INLINE void widen_block(const char* from, int64_t inputs, char* to) {
    constexpr int UPPER = upper_bits(BITS);
    constexpr uint32_t MASK = ((1u << UPPER) - 1) * 0x01010101u;
    for (int64_t k = 0; k < inputs; k += chunk_inputs(BITS)) {
        const char* upper = from;
        if constexpr (UPPER) from += kFourBytes;
        for (int e = 0; e < chunk_inputs(BITS); e += 8, from += kFourBytes, to += 2 * kFourBytes) {
            __builtin_prefetch(from + 2048), __builtin_prefetch(from + 2112), __builtin_prefetch(from + 2176);
            for (int j = 0; j < kFourBytes; j += 4 * LANES) {
                U<LANES> both;
                memcpy(&both, from + j, sizeof both);
                U<LANES> first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
                if constexpr (UPPER) {
                    U<LANES> bits;
                    memcpy(&bits, upper + j, sizeof bits);
                    bits >>= e / 4 * UPPER;
                    first |= (bits & MASK) << 4;
                    second |= (bits >> UPPER & MASK) << 4;
                }
                memcpy(to + j, &first, sizeof first);
                memcpy(to + kFourBytes + j, &second, sizeof second);
            }
        }
    }
}
INLINE void widen_block(const Quantised& q, const char* from, char* to) {
    if (q.bits == 4) widen_block<4>(from, q.block, to);
    else if (q.bits == 5) widen_block<5>(from, q.block, to);
    else widen_block<6>(from, q.block, to);
}

// Holds configured tiles while it lives.
struct QuantisedPanels {
    const Quantised& q;
    const Rounded& x;
    const Gemm& g;
    const Part& part;
    ConfiguredTiles tiles{sizes_for(q, part)};

    void operator()(int64_t p, float* c, int64_t ldc = kColumns) const {
        begin_panel(g, part, p, c, ldc);
        const char* weight = (const char*)q.values + p * q.blocks * bytes();
        alignas(64) char wide[kMostBlock * kColumns];
        for (int64_t b = 0; b < q.blocks; b++, weight += bytes()) {
            if (q.bits < 8) widen_block(q, weight, wide);
            add_block(p, b, q.bits < 8 ? wide : weight, ahead_of(weight), c, ldc);
        }
    }

  private:
    // The bytes of a block of a panel.
    INLINE_MEMBER int64_t bytes() const { return q.block * kColumns * q.bits / 8; }

    // A block of weights of 8 bits is prefetched while those before it are multiplied: it is read once by few rows, or
    // while the rows' other blocks stay in the nearest cache.
    INLINE_MEMBER WeightsAhead ahead_of(const char* weight) const {
        int64_t count = (part.rows + kTileRows - 1) / kTileRows, asks = 3 * count * (q.block / step_inputs(q));
        if (q.bits < 8) return {weight, 0, true};
        return {weight + (count > 1 ? bytes() : kAheadOfTiles), (bytes() / asks + 63) / 64 * 64, true};
    }

    INLINE_MEMBER void add_block(int64_t p, int64_t b, const char* weight, WeightsAhead ahead, float* c,
                                 int64_t ldc) const {
        int64_t step = step_inputs(q);
        for (int64_t r = 0; r < part.rows; r += kTileRows) {
            BlockSums sums;
            sums.take(rows_tile(q, x, part.first + r, b * q.block), weight, q.block / step, step, ahead);
            int64_t end = std::min<int64_t>(r + kTileRows, part.rows);
            of_beside(q, [&](auto beside) {
                for (int j = 0; j < kVectors; j++) {
                    BlockColumns<decltype(beside)::value> columns(q, columns_at(q, p, b) + j * LANES);
                    for (int64_t i = r; i < end; i++) {
                        int64_t which = (part.first + i) * q.blocks + b;
                        I<LANES> of = sums.of(i - r, j * LANES) - (int32_t)q.zero * x.sums[which];
                        columns.add(of, x, which, c + i * ldc + j * LANES);
                    }
                }
            });
        }
    }
};
// Rows of the output are far apart and may conflict in a cache, so a part's are added up elsewhere.
constexpr bool kStraightToRows = false;
