// Products of x, [rows, inputs], with a packed weight: panels of kColumns outputs, each with its inputs in order.
//
// fp32: [panel][input][column]. bf16: [panel][pair of inputs][column][2], so that a vector of 32-bit words holds two
// neighbouring inputs of each column, and a shift or a mask turns either into fp32. If the CPU multiplies such pairs
// itself (DOTS, or TILES: gemm_amx.h), the rows are rounded to bf16 too, as is usual for models in bf16. Each output is
// one chain of fused multiply-adds over the inputs in order, or over the pairs, whatever the number of rows and threads.
// So a row's result does not depend on other rows.
#pragma once

#include <algorithm>
#include <array>

#if defined(PENSTOCK_TILES) || defined(PENSTOCK_EMULATED_TILES)
#define TILES 1
#elif defined(__AVX512BF16__) || defined(PENSTOCK_EMULATED_DOTS)
#define DOTS 1
#endif
#include "pool.h"
#include "tile_avx2.h"
#include "tile_avx512.h"
#include "vectors.h"

constexpr int kVectors = 3;
constexpr int kColumns = kVectors * LANES;
// The rows of a tile. Its sums fill the registers (12 of 16, 24 of 32).
constexpr int kRows = LANES == 16 ? 8 : 4;
// kPiece: bytes of a panel that several tiles read in turn, small enough for the nearest cache. kStay: bytes of a
// task's rows that are read again for each panel, small enough for the core's own cache. CPUs with AVX-512 mostly have
// 1 MiB or more of that, and read a panel from there as fast as they multiply. So tiles go through all inputs, and sums
// stay in registers.
#if LANES == 16
constexpr int kPiece = 147456, kStay = 1048576;
#else
constexpr int kPiece = 12288, kStay = 262144;
#endif
// The inputs of such a piece in bf16, and the number of tiles from which it is widened to fp32 once for all of them.
constexpr int kWide = kPiece / (2 * kColumns);
constexpr int kWorthWidening = 8;
// The prefetch distance of a single tile's weights, in bytes.
constexpr int kAhead = 1024;
// The most rows of a task.
constexpr int kTaskRows = 16 * kRows;

struct Gemm {
    const float* x;
    const void* weight;
    const float* bias;  // may be null
    float* out;
    int64_t rows, inputs, outputs;
    const uint32_t* rounded = nullptr;  // x as pairs of bf16, with DOTS or TILES
};

#ifdef DOTS
// Whether a product steps through pairs of inputs instead of single inputs.
template <class W> constexpr bool kPairs = sizeof(W) == 2;
#else
template <class W> constexpr bool kPairs = false;
#endif

INLINE int64_t panels_of(int64_t outputs) { return (outputs + kColumns - 1) / kColumns; }
INLINE int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }
template <class W> INLINE int64_t units_of(int64_t inputs) { return kPairs<W> ? pairs_of(inputs) : inputs; }

// a * b + c, rounded once. Compilers do not guarantee that for the operators, and all tiles must round in the same way.
INLINE F<LANES> fused(F<LANES> a, F<LANES> b, F<LANES> c) {
#if LANES == 16 && defined(__AVX512F__)
    return (F<LANES>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    __m256 x[LANES / 8], y[LANES / 8], z[LANES / 8];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
    for (int i = 0; i < LANES / 8; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#endif
}

// Where a tile's sums are stored, row by row, and their initial values: the stored ones, or one row for all.
struct Sums {
    float* to;
    int64_t ld;
    const float* from;
    int64_t from_ld;

    INLINE_MEMBER Sums below(int64_t rows) const { return {to + rows * ld, ld, from + rows * from_ld, from_ld}; }
    INLINE_MEMBER Sums begun() const { return {to, ld, to, ld}; }
    // Prefetches the cache lines that are written for the first time. Another core may have used them last.
    template <int M> INLINE_MEMBER void ask() const {
        if (from == to) return;
        for (int i = 0; i < M; i++)
            for (int at = 0; at < kColumns; at += 16) ask_to_write(to + i * ld + at);
    }
};

template <int M> struct Tile {
    F<LANES> sums[M][kVectors];

    INLINE_MEMBER void begin(const Sums& s) {
        s.ask<M>();
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kVectors; j++) sums[i][j] = load<LANES>(s.from + i * s.from_ld + j * LANES);
    }
    INLINE_MEMBER void end(const Sums& s) const {
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kVectors; j++) store<LANES>(s.to + i * s.ld + j * LANES, sums[i][j]);
    }
    INLINE_MEMBER void add(const float* x, int64_t ldx, const F<LANES>* w) {
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            F<LANES> value = splat<LANES>(x[i * ldx]);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) sums[i][j] = fused(value, w[j], sums[i][j]);
        }
    }
};

// A tile's prefetches while it computes: at `at`, then `step` bytes further for every input, or pair of inputs.
struct Ahead {
    const char* at;
    int64_t step;
    INLINE_MEMBER void ask(int64_t steps) {
        __builtin_prefetch(at);
        __builtin_prefetch(at + 64);
        at += steps * step;
    }
};

// Runs the handwritten tile over as many inputs as it supports, and leaves the rest in `x`, `w`, `inputs` and `s`.
template <int M, class W>
INLINE void take_by_hand(const float*& x, int64_t ldx, const W*& w, int64_t& inputs, Sums& s, const Ahead& ahead) {
#ifdef PENSTOCK_TILE_BY_HAND
    if constexpr (M == kRows && (LANES == 8 || sizeof(W) == 2)) {
        // The fp32 tile does not prefetch enough if only one tile reads the panel.
        if (inputs < 4 || (sizeof(W) == 4 && 4 * ahead.step > 128)) return;
        s.ask<M>();
        tile_by_hand(x, ldx, w, inputs / 4, s.from, s.from_ld, s.to, s.ld, ahead.at, 4 * ahead.step);
        s = s.begun();
        x += inputs / 4 * 4;
        w += inputs / 4 * 4 * kColumns;
        inputs %= 4;
    }
#endif
}

template <int M>
static __attribute__((noinline)) void tile(const float* x, int64_t ldx, const float* w, int64_t inputs, Sums s,
                                           Ahead ahead) {
    take_by_hand<M>(x, ldx, w, inputs, s, ahead);
    if (!inputs) return;
    Tile<M> t;
    t.begin(s);
    for (int64_t k = 0; k < inputs; k++, w += kColumns) {
        F<LANES> columns[kVectors];
        for (int j = 0; j < kVectors; j++) columns[j] = load<LANES>(w + j * LANES);
        ahead.ask(1);
        t.add(x + k, ldx, columns);
    }
    t.end(s);
}

template <int M>
static __attribute__((noinline)) void tile(const float* x, int64_t ldx, const bf16* w, int64_t inputs, Sums s,
                                           Ahead ahead) {
    auto columns = [&](bool second) {
        std::array<F<LANES>, kVectors> found;
        for (int j = 0; j < kVectors; j++) {
            U<LANES> words = load_words<LANES>(w + 2 * j * LANES);
            found[j] = (F<LANES>)(second ? words & 0xffff0000u : words << 16);
        }
        return found;
    };
    take_by_hand<M>(x, ldx, w, inputs, s, ahead);
    if (inputs / 2) {
        Tile<M> t;
        t.begin(s);
        for (int64_t pairs = inputs / 2; pairs; pairs--, w += 2 * kColumns, x += 2) {
            ahead.ask(2);
            t.add(x, ldx, columns(false).data());
            // Read the words again: keeping them would spill sums from the registers.
            asm volatile("" : "+r"(w));
            t.add(x + 1, ldx, columns(true).data());
        }
        t.end(s);
        s = s.begun();
    }
    // A last single input is separate, for the same reason.
    if (inputs % 2) {
        Tile<M> t;
        t.begin(s);
        t.add(x, ldx, columns(false).data());
        t.end(s);
    }
}

#if defined(DOTS) || defined(TILES)
// Rounds 2 * LANES inputs of a row. The CPU's instruction makes numbers below 2^-126 0, as do the products themselves.
INLINE void round_inputs(const float* from, bf16* to) {
#ifdef __AVX512BF16__
    auto both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + LANES), _mm512_loadu_ps(from));
    memcpy(to, &both, sizeof both);
#else
    for (int i = 0; i < 2 * LANES; i += LANES) {
        U<LANES> bits = (U<LANES>)load<LANES>(from + i);
        store<LANES>(to + i, (F<LANES>)((bits & 0x7f800000) != 0 ? bits : bits & 0x80000000));
    }
#endif
}
#endif

#ifdef DOTS
// sums + lower half of x * lower half of w + upper half of x * upper half of w, for each 32-bit word.
INLINE F<LANES> add_dots(F<LANES> sums, U<LANES> x, U<LANES> w) {
#ifdef __AVX512BF16__
    return (F<LANES>)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
#else
    sums += (F<LANES>)(x & 0xffff0000u) * (F<LANES>)(w & 0xffff0000u);
    return sums + (F<LANES>)(x << 16) * (F<LANES>)(w << 16);
#endif
}

// A tile whose `x` and `w` are pairs. Rows of `x` are `ldx` words apart.
template <int M>
static __attribute__((noinline)) void tile(const uint32_t* x, int64_t ldx, const bf16* w, int64_t pairs, Sums s,
                                           Ahead ahead) {
    Tile<M> t;
    t.begin(s);
    for (int64_t k = 0; k < pairs; k++, w += 2 * kColumns) {
        U<LANES> words[kVectors];
        for (int j = 0; j < kVectors; j++) words[j] = load_words<LANES>(w + 2 * j * LANES);
        ahead.ask(1);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            U<LANES> pair = x[i * ldx + k] - U<LANES>{};
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) t.sums[i][j] = add_dots(t.sums[i][j], pair, words[j]);
        }
    }
    t.end(s);
}

// Rounds rows of fp32 to pairs of bf16. A last single input is paired with a zero.
static void round_rows(Pool& pool, const float* x, uint32_t* to, int64_t rows, int64_t inputs) {
    int64_t pairs = pairs_of(inputs);
    int tasks = (int)std::min<int64_t>(rows, rows * inputs < 16384 ? 1 : 4 * pool.threads());
    pool.spread(tasks, [&](int task, int) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; row++) {
            const float* from = x + row * inputs;
            bf16* out = (bf16*)(to + row * pairs);
            int64_t i = 0;
            for (; i + 2 * LANES <= inputs; i += 2 * LANES) round_inputs(from + i, out + i);
            for (; i < inputs; i++) put(out + i, from[i]);
            if (inputs % 2) put(out + inputs, 0.0f);
        }
    });
}
#endif

template <int M = kRows, class X, class W>
INLINE void tiles(const X* x, int64_t ldx, int64_t rows, const W* w, int64_t depth, Sums s, Ahead ahead, int64_t share) {
    for (; rows >= M; rows -= M, x += M * ldx, s = s.below(M), ahead.at += share) tile<M>(x, ldx, w, depth, s, ahead);
    if constexpr (M > 1) tiles<M - 1>(x, ldx, rows, w, depth, s, ahead, share);
}

// The memory for a product's rounded rows, in floats.
template <class W> INLINE size_t rounded_floats(const Gemm& g) { return kPairs<W> ? g.rows * pairs_of(g.inputs) : 0; }

// Rounds a product's rows into `memory`, if its tiles read rounded ones.
template <class W> INLINE void round_into(Pool& pool, Gemm& g, float* memory) {
#ifdef DOTS
    if constexpr (sizeof(W) == 2) {
        round_rows(pool, g.x, (uint32_t*)memory, g.rows, g.inputs);
        g.rounded = (const uint32_t*)memory;
    }
#endif
}

// Prepares a product before its first task.
template <class W> INLINE void prepare(Pool& pool, Gemm& g) {
    round_into<W>(pool, g, pool.shared.take(rounded_floats<W>(g)));
}

// The most rows of one of a product's tasks.
template <class W> INLINE int64_t most_rows(const Gemm&) { return kTaskRows; }

// The rows and panels of a task.
struct Part {
    int64_t first, rows, begin, end;
};

// Cuts a product into tasks: few enough to be worth claiming, and enough for the threads to end together.
struct Cut {
    int64_t panels, share, across, down, most;
    // `all`: the panels of all products that run at once.
    Cut(const Pool& pool, const Gemm& g, int64_t most_rows = kTaskRows, int64_t all = 0) : most(most_rows) {
        panels = panels_of(g.outputs);
        share = std::max<int64_t>(1, std::min<int64_t>(std::max(panels, all) / (8 * pool.threads()), 16));
        across = (panels + share - 1) / share;
        down = (g.rows + most - 1) / most;
    }
    int tasks() const { return (int)(across * down); }
    Part part(const Gemm& g, int task) const {
        int64_t first = task / across * most, begin = task % across * share;
        return {first, std::min(most, g.rows - first), begin, std::min(begin + share, panels)};
    }
};

// The rows of a part in the form that tiles read.
template <class W> INLINE auto rows_of(const Gemm& g, const Part& part) {
    if constexpr (kPairs<W>) return g.rounded + part.first * pairs_of(g.inputs);
    else return g.x + part.first * g.inputs;
}

// The product of many rows and a piece of a bf16 panel, of 4 to kWide inputs. The first tile widens the piece.
#ifdef PENSTOCK_WIDEN_BY_HAND
INLINE void widened(const float* x, int64_t ldx, int64_t rows, const bf16* w, int64_t some, Sums s) {
    alignas(64) float wide[kWide * kColumns];
    int64_t whole = some / 4 * 4, others = (rows - 1) / kRows, share = some * kColumns * sizeof(bf16) / others;
    Ahead next{(const char*)(w + some * kColumns), share / some};
    s.ask<kRows>();
    widen_by_hand(x, ldx, w, whole / 4, s.from, s.from_ld, s.to, s.ld, wide);
    tiles(x + kRows * ldx, ldx, rows - kRows, wide, whole, s.below(kRows), next, share);
    if (whole < some) tiles(x + whole, ldx, rows, w + whole * kColumns, some - whole, s.begun(), next, 0);
}
#endif

// Adds the product of the units from `k` to `end` to c, [rows, kColumns], which is first set to the bias if k is 0.
// Several tiles share a piece of the panel, and meanwhile the next piece is prefetched; it follows in memory, as does
// the next panel. Only the last piece stores its sums to `c`, because its rows are far apart and may conflict in a
// cache.
template <class W>
INLINE void product(const Gemm& g, const Part& part, int64_t p, int64_t k, int64_t end, float* c, int64_t ldc) {
    constexpr int64_t kBytes = kColumns * (kPairs<W> ? 4 : sizeof(W));
    int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
    alignas(64) float bias[kColumns] = {}, kept[kTaskRows * kColumns];
    if (g.bias) memcpy(bias, g.bias + column, columns * sizeof(float));
    const auto* x = rows_of<W>(g, part);
    int64_t units = units_of<W>(g.inputs), depth = sizeof(W) == 2 ? 2 * pairs_of(g.inputs) : g.inputs;
    const W* weight = (const W*)g.weight + p * kColumns * depth;
    int64_t count = (part.rows + kRows - 1) / kRows, most = count == 1 ? end - k : kPiece / kBytes;
    int64_t pieces = (end - k + most - 1) / most, some = ((end - k + pieces - 1) / pieces + 3) / 4 * 4;
    Sums s{c, ldc, k ? c : bias, k ? ldc : 0};
    for (; k < end; k += some, s = s.begun()) {
        some = std::min(some, end - k);
        s.to = k + some < end ? kept : c;
        s.ld = k + some < end ? kColumns : ldc;
        const char* w = (const char*)weight + k * kBytes;
#ifdef PENSTOCK_WIDEN_BY_HAND
        if constexpr (sizeof(W) == 2)
            if (count >= kWorthWidening && some >= 4) {
                widened(x + k, units, part.rows, (const W*)w, some, s);
                continue;
            }
#endif
        const char* ahead = count == 1 ? w + kAhead : w + some * kBytes;
        tiles(x + k, units, part.rows, (const W*)w, some, s, {ahead, kBytes / count}, some * kBytes / count);
    }
}

// Computes whole panels of one part: c, [part.rows, kColumns].
template <class W> struct PanelProduct {
    const Gemm& g;
    const Part& part;
    void operator()(int64_t p, float* c) const { product<W>(g, part, p, 0, units_of<W>(g.inputs), c, kColumns); }
};

// Computes one task of a prepared product.
template <class W> static void gemm_part(const Gemm& g, const Part& part) {
    int64_t units = units_of<W>(g.inputs), deep = std::max<int64_t>(256, kStay / 4 / part.rows / 2 * 2);
    for (int64_t k = 0; k < units; k += deep) {
        for (int64_t p = part.begin; p < part.end; p++) {
            int64_t end = std::min(k + deep, units), column = p * kColumns;
            int64_t columns = std::min<int64_t>(kColumns, g.outputs - column);
            float* to = g.out + part.first * g.outputs + column;
            if (columns == kColumns) {
                product<W>(g, part, p, k, end, to, g.outputs);
                continue;
            }
            if (k) continue;
            alignas(64) float edge[kTaskRows * kColumns];
            product<W>(g, part, p, 0, units, edge, kColumns);
            for (int64_t i = 0; i < part.rows; i++)
                memcpy(to + i * g.outputs, edge + i * kColumns, columns * sizeof(float));
        }
    }
}

template <class W> static void gemm(Pool& pool, Gemm g) {
    prepare<W>(pool, g);
    Cut cut(pool, g, most_rows<W>(g));
    pool.spread(cut.tasks(), [&](int task, int) { gemm_part<W>(g, cut.part(g, task)); });
}

// Packs `weight`, [outputs, inputs], into `packed`, which is zero and has room for whole panels.
static void pack(Pool& pool, const float* weight, float* packed, int64_t inputs, int64_t outputs) {
    pool.spread((int)panels_of(outputs), [&](int p, int) {
        int64_t first = (int64_t)p * kColumns, columns = std::min<int64_t>(kColumns, outputs - first);
        float* to = packed + first * inputs;
        const float* from = weight + first * inputs;
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t n = 0; n < columns; n++) to[k * kColumns + n] = from[n * inputs + k];
    });
}
static void pack(Pool& pool, const bf16* weight, bf16* packed, int64_t inputs, int64_t outputs) {
    pool.spread((int)panels_of(outputs), [&](int p, int) {
        int64_t first = (int64_t)p * kColumns, columns = std::min<int64_t>(kColumns, outputs - first);
        bf16* to = packed + first * 2 * pairs_of(inputs);
        const bf16* from = weight + first * inputs;
        for (int64_t k = 0; k < inputs / 2; k++)  // a pair of inputs at a time, in the order of what is written
            for (int64_t n = 0; n < columns; n++)
                memcpy(to + (k * kColumns + n) * 2, from + n * inputs + 2 * k, 2 * sizeof(bf16));
        if (inputs % 2)
            for (int64_t n = 0; n < columns; n++)
                to[((inputs / 2) * kColumns + n) * 2] = from[n * inputs + inputs - 1];
    });
}

#ifdef TILES
#include "gemm_amx.h"
#endif
