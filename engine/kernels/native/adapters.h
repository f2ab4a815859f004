// LoRA adapters: each adds scale * B A x to a product's results for its own rows. Rows of one adapter share its matrices;
// the rows of all adapters are tasks of one call. A row's sums have one order, whatever the other rows.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "pool.h"
#include "vectors.h"

// A: [group of kDownRanks ranks][block of inputs][kDownRanks][input of the block], with zeros beyond ranks and inputs. B:
// [panel of kUpPanel outputs][rank][output], the last panel with zeros. If the CPU multiplies pairs of bf16, matrices in
// bf16 are read by pairs: B is [panel][pair of ranks][output][2], and what they are multiplied by is rounded, as by
// gemm.h.
constexpr int kUpVectors = 4, kUpPanel = kUpVectors * LANES, kDownRanks = 4;
#ifdef __AVX512BF16__
template <class W> constexpr bool kAdapterPairs = sizeof(W) == 2;
#else
template <class W> constexpr bool kAdapterPairs = false;
#endif
template <class W> constexpr int kBlock = kAdapterPairs<W> ? 2 * LANES : LANES;
// The most ranks of a part; the rows of a tile, and the most rows of a task.
constexpr int kMostRanks = 256;
constexpr int kAdapterTile = LANES == 16 ? 4 : 2, kAdapterRows = 8;

// kernels/native/adapters.py repeats these structures. Each field has eight bytes.

// The change of a part of a product's outputs.
struct LowRankPart {
    const void* up;  // scale * B
    int64_t rank, ranks, output, outputs;  // `rank`, `output`: the first of each
};

// The change of a product by an adapter.
struct LowRank {
    const void* down;  // all parts' A, one below another
    int64_t ranks, half;  // of all parts, a multiple of kDownRanks; whether matrices are in bf16
    const LowRankPart* parts;
    int64_t count;  // 0: the product is not changed
};

// The products of a layer that adapters change.
enum Adapted { kQkv, kOutput, kGateUp, kDown, kRouter, kAdaptedProducts };

struct AdapterRows {
    const LowRank* products;  // [layers, kAdaptedProducts]
    const int64_t* rows;  // [count]
    int64_t count;
};

struct Adapters {
    const AdapterRows* each;
    int64_t count;
    // For each adapter its changes of experts, those of all layers with experts one after another: of each expert's gate
    // and up product, and of its down product. Null: it changes none.
    const LowRank* const* experts;
    const int64_t* first_experts;  // [layers]: the index of a layer's first expert among those
};

// The changes of a mixture's experts by a step's adapters.
struct ExpertAdapters {
    const Adapters* adapters;  // null: none
    int64_t first;  // the index of the mixture's first expert
};

// The change of some rows of a product's results.
struct Change {
    const LowRank* low;
    const int64_t* rows;
    int64_t count;
};

// A product's rows: x, [tokens, inputs], and its results, [tokens, outputs].
struct Adaptable {
    const float* x;
    int64_t inputs;
    float* out;
    int64_t outputs;
};

// The memory (bytes) that a tile asks for ahead.
constexpr int kAdapterAhead = 2048;
template <class W> INLINE void ask_ahead(const W* w) {
    for (int i = 0; i < (int)sizeof(W); i += 1) __builtin_prefetch((const char*)w + kAdapterAhead + i * 64);
}

#ifdef __AVX512BF16__
INLINE F<LANES> add_pairs(F<LANES> sums, U<LANES> a, U<LANES> b) {
    return (F<LANES>)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// Rounds 2 * LANES numbers.
INLINE U<LANES> rounded_pairs(const float* from) {
    U<LANES> pairs;
    auto both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + LANES), _mm512_loadu_ps(from));
    memcpy(&pairs, &both, sizeof pairs);
    return pairs;
}

template <class W, int M>
static void down_pairs(const LowRank& low, const float* const* x, int64_t inputs, float* inner, uint32_t* pairs) {
    constexpr int kStep = 2 * LANES;
    int64_t blocks = (inputs + kStep - 1) / kStep;
    for (int i = 0; i < M; i++) {
        for (int64_t b = 0; b < blocks; b++) {
            alignas(64) float last[kStep] = {};
            const float* from = x[i] + b * kStep;
            if ((b + 1) * kStep > inputs) from = (float*)memcpy(last, from, (inputs - b * kStep) * sizeof(float));
            U<LANES> rounded = rounded_pairs(from);
            memcpy(pairs + (i * blocks + b) * LANES, &rounded, sizeof rounded);
        }
    }
    const bf16* w = (const bf16*)low.down;
    for (int64_t r = 0; r < low.ranks; r += kDownRanks) {
        F<LANES> sum_of[M][kDownRanks] = {};
        for (int64_t b = 0; b < blocks; b++, w += kDownRanks * kStep) {
            U<LANES> columns[kDownRanks];
            for (int j = 0; j < kDownRanks; j++) columns[j] = load_words<LANES>(w + j * kStep);
            for (int j = 0; j < kDownRanks; j++) __builtin_prefetch((const char*)w + kAdapterAhead + j * 64);
            for (int i = 0; i < M; i++) {
                U<LANES> value = load_words<LANES>((const bf16*)(pairs + (i * blocks + b) * LANES));
                for (int j = 0; j < kDownRanks; j++) sum_of[i][j] = add_pairs(sum_of[i][j], value, columns[j]);
            }
        }
        for (int i = 0; i < M; i++) {
            auto* s = sum_of[i];
            store<4>(inner + i * low.ranks + r, sums<LANES>(s[0], s[1], s[2], s[3]));
        }
    }
}
#endif

// Writes the products of M rows with A to `inner`, [M, ranks]. `pairs`: memory for M rounded rows.
template <class W, int M>
static void down_tile(const LowRank& low, const float* const* x, int64_t inputs, float* inner, uint32_t* pairs) {
#ifdef __AVX512BF16__
    if constexpr (kAdapterPairs<W>) return down_pairs<W, M>(low, x, inputs, inner, pairs);
#endif
    int64_t whole = inputs / LANES * LANES;
    alignas(64) float last[M][LANES] = {};
    if (whole < inputs)
        for (int i = 0; i < M; i++) memcpy(last[i], x[i] + whole, (inputs - whole) * sizeof(float));
    const W* w = (const W*)low.down;
    for (int64_t r = 0; r < low.ranks; r += kDownRanks) {
        F<LANES> sum_of[M][kDownRanks] = {};
        auto add = [&](auto&& rows_at) {
            F<LANES> columns[kDownRanks];
            for (int j = 0; j < kDownRanks; j++) columns[j] = load<LANES>(w + j * LANES);
            ask_ahead(w);
            for (int i = 0; i < M; i++) {
                F<LANES> value = load<LANES>(rows_at(i));
                for (int j = 0; j < kDownRanks; j++) sum_of[i][j] = fused(value, columns[j], sum_of[i][j]);
            }
            w += kDownRanks * LANES;
        };
        for (int64_t k = 0; k < whole; k += LANES) add([&](int i) { return x[i] + k; });
        if (whole < inputs) add([&](int i) { return last[i]; });
        for (int i = 0; i < M; i++) {
            auto* s = sum_of[i];
            store<4>(inner + i * low.ranks + r, sums<LANES>(s[0], s[1], s[2], s[3]));
        }
    }
}

// Adds the products of `inner`, [M, ranks], with B to M rows of results.
template <class W, int M>
static void up_tile(const LowRank& low, const LowRankPart& part, const float* inner, float* const* out) {
    const W* w = (const W*)part.up;
#ifdef __AVX512BF16__
    uint32_t pairs[M][kMostRanks / 2];
    if constexpr (kAdapterPairs<W>) {
        for (int i = 0; i < M; i++) {
            for (int64_t k = 0; k < part.ranks; k += 2) {
                const float* from = inner + i * low.ranks + part.rank + k;
                bf16 pair[2] = {};
                put(pair, from[0]);
                if (k + 1 < part.ranks) put(pair + 1, from[1]);
                memcpy(&pairs[i][k / 2], pair, sizeof pair);
            }
        }
    }
#endif
    for (int64_t first = 0; first < part.outputs; first += kUpPanel) {
        F<LANES> sum_of[M][kUpVectors] = {};
#ifdef __AVX512BF16__
        if constexpr (kAdapterPairs<W>) {
            for (int64_t k = 0; k < part.ranks; k += 2, w += 2 * kUpPanel) {
                U<LANES> columns[kUpVectors];
                for (int j = 0; j < kUpVectors; j++) columns[j] = load_words<LANES>(w + 2 * j * LANES);
                for (int j = 0; j < kUpVectors; j++) __builtin_prefetch((const char*)w + kAdapterAhead + j * 64);
                for (int i = 0; i < M; i++) {
                    U<LANES> value = pairs[i][k / 2] - U<LANES>{};
                    for (int j = 0; j < kUpVectors; j++) sum_of[i][j] = add_pairs(sum_of[i][j], value, columns[j]);
                }
            }
        } else
#endif
        for (int64_t k = 0; k < part.ranks; k++, w += kUpPanel) {
            F<LANES> columns[kUpVectors];
            for (int j = 0; j < kUpVectors; j++) columns[j] = load<LANES>(w + j * LANES);
            ask_ahead(w);
            for (int i = 0; i < M; i++) {
                F<LANES> value = splat<LANES>(inner[i * low.ranks + part.rank + k]);
                for (int j = 0; j < kUpVectors; j++) sum_of[i][j] = fused(value, columns[j], sum_of[i][j]);
            }
        }
        int64_t columns = std::min<int64_t>(kUpPanel, part.outputs - first);
        for (int i = 0; i < M; i++) {
            float* to = out[i] + part.output + first;
            if (columns == kUpPanel) {
                for (int j = 0; j < kUpPanel; j += LANES) store<LANES>(to + j, load<LANES>(to + j) + sum_of[i][j / LANES]);
                continue;
            }
            alignas(64) float edge[kUpPanel];
            for (int j = 0; j < kUpVectors; j++) store<LANES>(edge + j * LANES, sum_of[i][j]);
            for (int64_t j = 0; j < columns; j++) to[j] += edge[j];
        }
    }
}

template <class W, int M = kAdapterTile>
static void adapter_tiles(const LowRank& low, const Adaptable& of, const int64_t* rows, int64_t count, float* inner) {
    for (; count >= M; count -= M, rows += M) {
        const float* x[M];
        float* out[M];
        for (int i = 0; i < M; i++) x[i] = of.x + rows[i] * of.inputs, out[i] = of.out + rows[i] * of.outputs;
        down_tile<W, M>(low, x, of.inputs, inner, (uint32_t*)(inner + M * low.ranks));
        for (int64_t i = 0; i < low.count; i++) up_tile<W, M>(low, low.parts[i], inner, out);
    }
    if constexpr (M > 1) adapter_tiles<W, M - 1>(low, of, rows, count, inner);
}

// Adds changes to a product's results. Those of one adapter are of rows of its own.
static void add_changes(Pool& pool, const std::vector<Change>& changes, const Adaptable& of) {
    int64_t all = 0;
    for (const Change& change : changes) all += change.count;
    int64_t most = std::clamp<int64_t>((all + pool.threads() - 1) / pool.threads(), 1, kAdapterRows);
    std::vector<Change> tasks;
    for (const Change& change : changes)
        for (int64_t first = 0; first < change.count; first += most)
            tasks.push_back({change.low, change.rows + first, std::min(most, change.count - first)});
    if (tasks.empty()) return;
    pool.spread((int)tasks.size(), [&](int task, int thread) {
        const Change& t = tasks[task];
        float* inner = pool.own[thread].take(kAdapterTile * (t.low->ranks + of.inputs / 2 + 2 * LANES));
        if (t.low->half) adapter_tiles<bf16>(*t.low, of, t.rows, t.count, inner);
        else adapter_tiles<float>(*t.low, of, t.rows, t.count, inner);
    });
}

// Adds the adapters' changes of product `which` to its results.
static void add_adapters(Pool& pool, const Adapters& adapters, int64_t which, const Adaptable& of) {
    std::vector<Change> changes;
    for (int64_t a = 0; a < adapters.count; a++) {
        const AdapterRows& group = adapters.each[a];
        if (group.products[which].count) changes.push_back({group.products + which, group.rows, group.count});
    }
    add_changes(pool, changes, of);
}
