// Products with bf16 weights by AMX tiles, at every number of rows. gemm.h includes this in a build with TILES.
//
// Weights are packed as gemm.h says. 16 pairs of a panel are a step: three neighbouring tiles of 16 columns. Rows are
// rounded to bf16 into the tiles that they are loaded as. Each output starts from the bias and gets the steps in order,
// each as TDPBF16PS adds it. Beyond the inputs both sides are 0. So a row's result depends neither on other rows nor on
// how a product is cut.
#pragma once

#include "gemm.h"
#include "tiles.h"

static_assert(kColumns == 48, "a step of a panel is three tiles");
constexpr int kTileRows = 16;
constexpr int kStepInputs = 2 * LANES;
constexpr int kTileRowBytes = 64;  // a row's inputs of one step, and 16 columns
constexpr int kPairBytes = 4 * kColumns;
constexpr int kStepBytes = kStepInputs / 2 * kPairBytes;
// A pass is the product of two blocks of 16 rows and a panel: six tiles of sums, one of rows, one of weights.
constexpr int kPassRows = 2 * kTileRows;
// The most rows of a task. Their sums stay in the core's own cache.
constexpr int kPartRows = 256;
// With more passes than kWholePasses, all passes read a slice of a panel before the next slice. kSliceSteps of them
// stay in the nearest cache beside the rows.
constexpr int kWholePasses = 4, kSliceSteps = 6;
// The prefetch distance of weights that are read once, in bytes.
constexpr int kAheadOfTiles = 8192;

INLINE int64_t steps_of(int64_t inputs) { return (inputs + kStepInputs - 1) / kStepInputs; }

// Rounded rows are [block of rows][step][row][kTileRowBytes]. A block has 16 rows, or all rows if there are fewer.
INLINE int64_t block_rows(const Gemm& g) { return std::min<int64_t>(g.rows, kTileRows); }
INLINE int64_t row_blocks(const Gemm& g) { return (g.rows + kTileRows - 1) / kTileRows; }
INLINE int64_t tile_bytes(const Gemm& g) { return block_rows(g) * kTileRowBytes; }
INLINE const char* rows_tile(const Gemm& g, int64_t row, int64_t step) {
    return (const char*)g.rounded + (row / kTileRows * steps_of(g.inputs) + step) * tile_bytes(g);
}

// Rounds one step of a row, of up to 32 inputs. The rest is 0.
INLINE void round_step(const float* from, int64_t inputs, bf16* to) {
    alignas(64) float padded[kStepInputs] = {};
    if (inputs < kStepInputs) from = (const float*)memcpy(padded, from, inputs * sizeof(float));
    round_inputs(from, to);
}

// Rows from g.rows on, which fill the last block, are 0.
INLINE void round_to_tiles(const Gemm& g, int64_t row) {
    char* to = (char*)rows_tile(g, row, 0) + row % kTileRows * kTileRowBytes;
    for (int64_t first = 0; first < g.inputs; first += kStepInputs, to += tile_bytes(g)) {
        if (row < g.rows) round_step(g.x + row * g.inputs + first, g.inputs - first, (bf16*)to);
        else memset(to, 0, kTileRowBytes);
    }
}

template <> size_t rounded_floats<bf16>(const Gemm& g) {
    return row_blocks(g) * block_rows(g) * steps_of(g.inputs) * kTileRowBytes / sizeof(float);
}

template <> void round_into<bf16>(Pool& pool, Gemm& g, float* memory) {
    int64_t all = row_blocks(g) * block_rows(g);
    g.rounded = (const uint32_t*)memory;
    int tasks = (int)std::min<int64_t>(all, g.rows * g.inputs < 16384 ? 1 : 4 * pool.threads());
    pool.spread(tasks, [&](int task, int) {
        for (int64_t row = all * task / tasks; row < all * (task + 1) / tasks; row++) round_to_tiles(g, row);
    });
}

// Tiles 0 to 5: sums. 6: rows. 7, and 3 to 5 if there is one block: weights. A single block has no more rows than the
// product, so nothing beyond them is read or written.
INLINE TileSizes sizes_for(const Gemm& g) {
    TileSizes sizes;
    for (int tile = 0; tile < 8; tile++) sizes.set(tile, tile < 3 || tile == 6 ? block_rows(g) : kTileRows);
    return sizes;
}

// Prefetches weights in shares, while others are multiplied.
struct WeightsAhead {
    const char* at;
    int64_t share;  // bytes
    bool near;  // into the nearest cache, else into the next one

    INLINE_MEMBER void ask() {
        const char* end = at + share;
        if (near) for (; at < end; at += 64) __builtin_prefetch(at, 0, 3);
        else for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Some steps of a pass.
struct Pass {
    const char *x, *below;  // tiles of the two blocks
    int64_t x_step;  // the distance of their steps, in bytes
    const char* weight;
    int64_t steps;
    const char* last;  // the weights of one more step; null: none
    Sums sums;
};

template <int FIRST> INLINE void load_sums(const Sums& s) {
    tileloadd<FIRST>(s.from, 4 * s.from_ld);
    tileloadd<FIRST + 1>(s.from + 16, 4 * s.from_ld);
    tileloadd<FIRST + 2>(s.from + 32, 4 * s.from_ld);
}
template <int FIRST> INLINE void store_sums(const Sums& s) {
    tilestored<FIRST>(s.to, 4 * s.ld);
    tilestored<FIRST + 1>(s.to + 16, 4 * s.ld);
    tilestored<FIRST + 2>(s.to + 32, 4 * s.ld);
}

// `step(x, below, weight)` for each step of the pass.
template <class Step> INLINE void each_step(const Pass& pass, Step&& step) {
    const char *x = pass.x, *below = pass.below, *weight = pass.weight;
    for (int64_t k = 0; k < pass.steps; k++, x += pass.x_step, below += pass.x_step, weight += kStepBytes)
        step(x, below, weight);
    if (pass.last) step(x, below, pass.last);
}

// Prefetches are spread between loads, so that memory always has something to fetch.
static void one_block(const Pass& pass, WeightsAhead ahead) {
    load_sums<0>(pass.sums);
    ahead.share /= 3;
    each_step(pass, [&](const char* x, const char*, const char* weight) __attribute__((always_inline)) {
        tileloadd<6>(x, kTileRowBytes);
        ahead.ask();
        tileloadd<3>(weight, kPairBytes);
        tdpbf16ps<0, 6, 3>();
        ahead.ask();
        tileloadd<4>(weight + 64, kPairBytes);
        tdpbf16ps<1, 6, 4>();
        ahead.ask();
        tileloadd<5>(weight + 128, kPairBytes);
        tdpbf16ps<2, 6, 5>();
    });
    store_sums<0>(pass.sums);
}

// Seven loads for six products: each product changes either the rows or the weights.
static void two_blocks(const Pass& pass, WeightsAhead ahead) {
    load_sums<0>(pass.sums);
    load_sums<3>(pass.sums.below(kTileRows));
    each_step(pass, [&](const char* x, const char* below, const char* weight) __attribute__((always_inline)) {
        ahead.ask();
        tileloadd<7>(weight, kPairBytes);
        tileloadd<6>(x, kTileRowBytes);
        tdpbf16ps<0, 6, 7>();
        tileloadd<6>(below, kTileRowBytes);
        tdpbf16ps<3, 6, 7>();
        tileloadd<7>(weight + 64, kPairBytes);
        tdpbf16ps<4, 6, 7>();
        tileloadd<6>(x, kTileRowBytes);
        tdpbf16ps<1, 6, 7>();
        tileloadd<7>(weight + 128, kPairBytes);
        tdpbf16ps<2, 6, 7>();
        tileloadd<6>(below, kTileRowBytes);
        tdpbf16ps<5, 6, 7>();
    });
    store_sums<0>(pass.sums);
    store_sums<3>(pass.sums.below(kTileRows));
}

// A panel, and its bias and last step filled up with zeros.
struct TilePanel {
    int64_t columns, steps;  // whole steps
    const char* weight;
    const char* last = nullptr;  // a step that is not whole
    alignas(64) float bias[kColumns] = {};
    alignas(64) char padded[kStepBytes];

    TilePanel(const Gemm& g, int64_t p) {
        int64_t bytes = pairs_of(g.inputs) * kPairBytes, rest = bytes % kStepBytes;
        columns = std::min<int64_t>(kColumns, g.outputs - p * kColumns);
        steps = bytes / kStepBytes;
        weight = (const char*)g.weight + p * bytes;
        if (g.bias) memcpy(bias, g.bias + p * kColumns, columns * sizeof(float));
        if (!rest) return;
        last = padded;
        memcpy(padded, weight + bytes - rest, rest);
        memset(padded + rest, 0, kStepBytes - rest);
    }
};

// A part's rows times a panel: c, [part.rows, columns].
class TileProduct {
  public:
    TileProduct(const Gemm& g, const Part& part, int64_t p, float* c, int64_t ldc)
        : g_(g), part_(part), panel_(g, p), c_(c), ldc_(ldc), passes_((part.rows + kPassRows - 1) / kPassRows) {}

    // The tiles are configured.
    void run() {
        int64_t all = panel_.steps, slices = 1;
        if (passes_ > kWholePasses) slices = std::max<int64_t>(1, (all + kSliceSteps - 1) / kSliceSteps);
        for (int64_t i = 0; i < slices; i++) slice(all * i / slices, all * (i + 1) / slices);
    }

  private:
    // All passes over the steps from `begin` to `end`. Meanwhile the weights behind them are prefetched.
    void slice(int64_t begin, int64_t end) {
        const char* weight = panel_.weight + begin * kStepBytes;
        WeightsAhead ahead{weight + kAheadOfTiles, kStepBytes, true};
        if (passes_ > 1) ahead = {weight + (end - begin) * kStepBytes, (kStepBytes / passes_ + 63) / 64 * 64, false};
        for (int64_t r = 0; r < part_.rows; r += kPassRows, ahead.at += (end - begin) * ahead.share)
            run_pass(r, begin, end, ahead);
    }

    // Sums that are not done, or have other rows or columns beside them, are kept until they are copied to `c`.
    void run_pass(int64_t r, int64_t begin, int64_t end, const WeightsAhead& ahead) {
        int64_t rows = std::min<int64_t>(kPassRows, part_.rows - r), row = part_.first + r;
        bool done = end == panel_.steps, whole = rows % block_rows(g_) == 0 && panel_.columns == kColumns;
        float* kept = kept_ + r * kColumns;
        Sums sums{kept, kColumns, begin ? kept : panel_.bias, begin ? kColumns : 0};
        if (done && whole) sums.to = c_ + r * ldc_, sums.ld = ldc_;
        if (done && whole && passes_ > 1) ask_for(sums, rows);
        Pass pass{rows_tile(g_, row, begin), rows_tile(g_, row + kTileRows, begin), tile_bytes(g_),
                  panel_.weight + begin * kStepBytes, end - begin, done ? panel_.last : nullptr, sums};
        if (rows > kTileRows) two_blocks(pass, ahead);
        else one_block(pass, ahead);
        if (!done || whole) return;
        for (int64_t i = 0; i < rows; i++)
            memcpy(c_ + (r + i) * ldc_, kept + i * kColumns, panel_.columns * sizeof(float));
    }

    static void ask_for(const Sums& sums, int64_t rows) {
        for (int64_t i = 0; i < rows; i++)
            for (int at = 0; at < kColumns; at += 16) ask_to_write(sums.to + i * sums.ld + at);
    }

    const Gemm& g_;
    const Part& part_;
    TilePanel panel_;
    float* c_;
    int64_t ldc_, passes_;
    alignas(64) float kept_[kPartRows * kColumns];
};

// Holds configured tiles while it lives.
template <> struct PanelProduct<bf16> {
    const Gemm& g;
    const Part& part;
    ConfiguredTiles tiles{sizes_for(g)};
    void operator()(int64_t p, float* c, int64_t ldc = kColumns) const { TileProduct(g, part, p, c, ldc).run(); }
};

// The rows of each part: about equally many, and whole passes.
INLINE int64_t even_rows(int64_t rows) {
    int64_t parts = std::max<int64_t>(1, (rows + kPartRows - 1) / kPartRows);
    return std::max<int64_t>(1, (rows + parts * kPassRows - 1) / (parts * kPassRows)) * kPassRows;
}

template <> int64_t most_rows<bf16>(const Gemm& g) { return even_rows(g.rows); }

template <> void gemm_part<bf16>(const Gemm& g, const Part& part) {
    PanelProduct<bf16> product{g, part};
    float* to = g.out + part.first * g.outputs;
    for (int64_t p = part.begin; p < part.end; p++) product(p, to + p * kColumns, g.outputs);
}
