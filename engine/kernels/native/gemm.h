// x [rows, inputs] times a packed weight: panels of kColumns outputs, in each the inputs one after another.
//
// fp32: [panel][input][column]. bf16: [panel][pair of inputs][column][2], so that one vector of 32-bit words holds a
// column's two neighbouring inputs, and either becomes fp32 by a shift or a mask. Where the CPU multiplies such pairs
// itself (DOTS), the rows are rounded to bf16 too, as models in bf16 are computed everywhere. Each output is one chain of
// fused multiply-adds over the inputs in order, or over the pairs, whatever the number of rows and of threads: a row's
// result does not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "pool.h"
#include "vectors.h"

constexpr int kVectors = 3;
constexpr int kColumns = kVectors * LANES;
// Rows of a tile: its sums fill the registers (12 of 16, 24 of 32).
constexpr int kRows = LANES == 16 ? 8 : 4;
// Inputs at a time where a bf16 panel is widened for several tiles of rows: 24 KB of fp32.
constexpr int kDepth = 256;
// From so many rows on a panel is widened once for all, and not by each tile for itself.
constexpr int kWidenFrom = 4 * kRows;
// Rows of a task.
constexpr int kTaskRows = 32 * kRows;

struct Gemm {
    const float* x;
    const void* weight;
    const float* bias;  // may be null
    float* out;
    int64_t rows, inputs, outputs;
    const uint32_t* rounded = nullptr;  // x as pairs of bf16, with DOTS
};

#if defined(__AVX512BF16__) || defined(PENSTOCK_EMULATED_DOTS)
#define DOTS 1
#endif

INLINE int64_t panels_of(int64_t outputs) { return (outputs + kColumns - 1) / kColumns; }
INLINE int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }

template <int M> struct Tile {
    F<LANES> sums[M][kVectors];

    INLINE_MEMBER void begin(const float* c, int64_t ldc) {
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kVectors; j++) sums[i][j] = load<LANES>(c + i * ldc + j * LANES);
    }
    INLINE_MEMBER void end(float* c, int64_t ldc) const {
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kVectors; j++) store<LANES>(c + i * ldc + j * LANES, sums[i][j]);
    }
    INLINE_MEMBER void add(const float* x, int64_t ldx, const F<LANES>* w) {
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            F<LANES> value = splat<LANES>(x[i * ldx]);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) sums[i][j] += value * w[j];
        }
    }
};

template <int M>
static __attribute__((noinline)) void tile(const float* x, int64_t ldx, const float* w, int64_t inputs, float* c, int64_t ldc) {
    Tile<M> t;
    t.begin(c, ldc);
    for (int64_t k = 0; k < inputs; k++, w += kColumns) {
        F<LANES> columns[kVectors];
        for (int j = 0; j < kVectors; j++) columns[j] = load<LANES>(w + j * LANES);
        t.add(x + k, ldx, columns);
    }
    t.end(c, ldc);
}

template <int M>
static __attribute__((noinline)) void tile(const float* x, int64_t ldx, const bf16* w, int64_t inputs, float* c, int64_t ldc) {
    Tile<M> t;
    t.begin(c, ldc);
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * kColumns) {
        U<LANES> words[kVectors];
        F<LANES> columns[kVectors];
        for (int j = 0; j < kVectors; j++) words[j] = load_words<LANES>(w + 2 * j * LANES);
        __builtin_prefetch((const char*)w + 1024);
        __builtin_prefetch((const char*)w + 1088);
        for (int j = 0; j < kVectors; j++) columns[j] = (F<LANES>)(words[j] << 16);
        t.add(x + k, ldx, columns);
        if (k + 1 == inputs) break;
        for (int j = 0; j < kVectors; j++) columns[j] = (F<LANES>)(words[j] & 0xffff0000u);
        t.add(x + k + 1, ldx, columns);
    }
    t.end(c, ldc);
}

#ifdef DOTS
// sums + x's lower half * w's + x's upper half * w's, of each 32-bit word.
INLINE F<LANES> add_dots(F<LANES> sums, U<LANES> x, U<LANES> w) {
#ifdef __AVX512BF16__
    return (F<LANES>)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
#else
    sums += (F<LANES>)(x & 0xffff0000u) * (F<LANES>)(w & 0xffff0000u);
    return sums + (F<LANES>)(x << 16) * (F<LANES>)(w << 16);
#endif
}

// `x` and `w` are pairs; rows of `x` are `ldx` words apart.
template <int M>
static __attribute__((noinline)) void tile(const uint32_t* x, int64_t ldx, const bf16* w, int64_t pairs, float* c, int64_t ldc) {
    Tile<M> t;
    t.begin(c, ldc);
    for (int64_t k = 0; k < pairs; k++, w += 2 * kColumns) {
        U<LANES> words[kVectors];
        for (int j = 0; j < kVectors; j++) words[j] = load_words<LANES>(w + 2 * j * LANES);
        for (int j = 0; j < kVectors; j++) __builtin_prefetch((const char*)w + 1536 + 64 * j);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            U<LANES> pair = x[i * ldx + k] - U<LANES>{};
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) t.sums[i][j] = add_dots(t.sums[i][j], pair, words[j]);
        }
    }
    t.end(c, ldc);
}

// Rows of fp32 as pairs of bf16; a last input that is alone has a zero beside it.
static void round_rows(Pool& pool, const float* x, uint32_t* to, int64_t rows, int64_t inputs) {
    int64_t pairs = pairs_of(inputs);
    int tasks = (int)std::min<int64_t>(rows, rows * inputs < 16384 ? 1 : 4 * pool.threads());
    pool.run(tasks, [&](int task, int) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; row++) {
            const float* from = x + row * inputs;
            bf16* out = (bf16*)(to + row * pairs);
            int64_t i = 0;
            for (; i + LANES <= inputs; i += LANES) store<LANES>(out + i, load<LANES>(from + i));
            for (; i < inputs; i++) put(out + i, from[i]);
            if (inputs % 2) put(out + inputs, 0.0f);
        }
    });
}
#endif

template <int M = kRows, class X, class W>
INLINE void tiles(const X* x, int64_t ldx, int64_t rows, const W* w, int64_t inputs, float* c, int64_t ldc) {
    for (; rows >= M; rows -= M, x += M * ldx, c += M * ldc) tile<M>(x, ldx, w, inputs, c, ldc);
    if constexpr (M > 1) tiles<M - 1>(x, ldx, rows, w, inputs, c, ldc);
}

// Pairs of bf16 as columns of fp32.
INLINE void widen_panel(const bf16* w, int64_t pairs, float* wide) {
    for (int64_t k = 0; k < pairs; k++, w += 2 * kColumns, wide += 2 * kColumns) {
        U<LANES> words[kVectors];
        for (int j = 0; j < kVectors; j++) words[j] = load_words<LANES>(w + 2 * j * LANES);
        for (int j = 0; j < kVectors; j++) {
            store<LANES>(wide + j * LANES, (F<LANES>)(words[j] << 16));
            store<LANES>(wide + kColumns + j * LANES, (F<LANES>)(words[j] & 0xffff0000u));
        }
    }
}

// c [rows, kColumns], which has the bias already, plus x times one panel.
INLINE void panel(const Gemm& g, int64_t first, int64_t rows, const float* w, float* c, int64_t ldc) {
    const float* x = g.x + first * g.inputs;
    for (int64_t k = 0; k < g.inputs; k += kDepth)
        tiles(x + k, g.inputs, rows, w + k * kColumns, std::min<int64_t>(kDepth, g.inputs - k), c, ldc);
}
#ifdef DOTS
INLINE void panel(const Gemm& g, int64_t first, int64_t rows, const bf16* w, float* c, int64_t ldc) {
    int64_t pairs = pairs_of(g.inputs);
    tiles(g.rounded + first * pairs, pairs, rows, w, pairs, c, ldc);
}
#else
INLINE void panel(const Gemm& g, int64_t first, int64_t rows, const bf16* w, float* c, int64_t ldc) {
    const float* x = g.x + first * g.inputs;
    if (rows < kWidenFrom) return tiles(x, g.inputs, rows, w, g.inputs, c, ldc);
    alignas(64) float wide[kDepth * kColumns];
    for (int64_t k = 0; k < g.inputs; k += kDepth) {
        int64_t depth = std::min<int64_t>(kDepth, g.inputs - k);
        widen_panel(w + k * kColumns, pairs_of(depth), wide);
        tiles(x + k, g.inputs, rows, wide, depth, c, ldc);
    }
}
#endif

// What products need before their first task.
template <class W> INLINE void prepare(Pool& pool, Gemm& g) {
#ifdef DOTS
    if constexpr (sizeof(W) == 2) {
        uint32_t* rounded = (uint32_t*)pool.shared.take(g.rows * pairs_of(g.inputs));
        round_rows(pool, g.x, rounded, g.rows, g.inputs);
        g.rounded = rounded;
    }
#endif
}

// A task's rows and panels.
struct Part {
    int64_t first, rows, begin, end;
};

// How a product is cut into tasks: few enough for each to be worth claiming, enough for threads to end together.
struct Cut {
    int64_t panels, share, across, down;
    Cut(const Pool& pool, const Gemm& g) {
        panels = panels_of(g.outputs);
        share = std::max<int64_t>(1, std::min<int64_t>(panels / (8 * pool.threads()), 16));
        across = (panels + share - 1) / share;
        down = (g.rows + kTaskRows - 1) / kTaskRows;
    }
    Part part(const Gemm& g, int task) const {
        int64_t first = task / across * kTaskRows, begin = task % across * share;
        return {first, std::min<int64_t>(kTaskRows, g.rows - first), begin, std::min(begin + share, panels)};
    }
};

// One panel's columns of a part's rows into `c`, whole also where it is the last panel and has fewer.
template <class W> INLINE void product(const Gemm& g, const Part& part, int64_t p, float* c, int64_t ldc) {
    int64_t depth = sizeof(W) == 2 ? 2 * pairs_of(g.inputs) : g.inputs;
    int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
    for (int64_t i = 0; i < part.rows; i++) {
        memset(c + i * ldc, 0, kColumns * sizeof(float));
        if (g.bias) memcpy(c + i * ldc, g.bias + column, columns * sizeof(float));
    }
    panel(g, part.first, part.rows, (const W*)g.weight + p * kColumns * depth, c, ldc);
}

template <class W> static void gemm(Pool& pool, Gemm g) {
    prepare<W>(pool, g);
    Cut cut(pool, g);
    pool.run((int)(cut.across * cut.down), [&](int task, int) {
        Part part = cut.part(g, task);
        for (int64_t p = part.begin; p < part.end; p++) {
            int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
            float* to = g.out + part.first * g.outputs + column;
            if (columns == kColumns) {
                product<W>(g, part, p, to, g.outputs);
                continue;
            }
            alignas(64) float edge[kTaskRows * kColumns];
            product<W>(g, part, p, edge, kColumns);
            for (int64_t i = 0; i < part.rows; i++)
                memcpy(to + i * g.outputs, edge + i * kColumns, columns * sizeof(float));
        }
    });
}

// `weight` [outputs, inputs] into `packed`, which is zero and has room for whole panels.
static void pack(Pool& pool, const float* weight, float* packed, int64_t inputs, int64_t outputs) {
    pool.run((int)panels_of(outputs), [&](int p, int) {
        int64_t first = (int64_t)p * kColumns, columns = std::min<int64_t>(kColumns, outputs - first);
        float* to = packed + first * inputs;
        for (int64_t n = 0; n < columns; n++)
            for (int64_t k = 0; k < inputs; k++) to[k * kColumns + n] = weight[(first + n) * inputs + k];
    });
}
static void pack(Pool& pool, const bf16* weight, bf16* packed, int64_t inputs, int64_t outputs) {
    pool.run((int)panels_of(outputs), [&](int p, int) {
        int64_t first = (int64_t)p * kColumns, columns = std::min<int64_t>(kColumns, outputs - first);
        bf16* to = packed + first * 2 * pairs_of(inputs);
        for (int64_t n = 0; n < columns; n++)
            for (int64_t k = 0; k < inputs; k++) to[(k / 2 * kColumns + n) * 2 + k % 2] = weight[(first + n) * inputs + k];
    });
}
