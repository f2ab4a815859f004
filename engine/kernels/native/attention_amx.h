// Attention over a paired cache (paired.h) on CPUs with AMX: prompts by tiles, decodes in plain vectors, to the same
// bits. layers.h includes this in a build with TILES; attention.h cuts the work into pieces and chunks.
//
// Queries are rounded to bf16. A chunk goes in steps of 64 places, counted from the sequence's first one. A score
// starts from 0 and gets 32 dimensions at a time, as TDPBF16PS adds them. The softmax is fp32 (paired_softmax.h). Its
// weights are rounded to bf16, and their total is that of the rounded ones. A sum of values gets a panel's 16 places at
// a time, as TDPBF16PS adds them. Within a chunk, numbers below 2^-126 are 0. Places that a row does not see have a
// weight of 0, which changes nothing but the sign of a 0; finish() undoes that. So a row's bits depend neither on the
// rows beside it nor on the cut of a prompt, if its sequence's keys and values are finite.
//
// Pieces of up to kFewRows rows take plain vectors (paired_rows.h). Others take tiles of 16 rows, the last filled up.
#pragma once

#include "attention.h"
#include "gemm_amx.h"
#include "paired_rows.h"

// The most rows that are computed in plain vectors.
constexpr int kFewRows = 8;

// Tiles 0 to 3: sums. 4: queries. 5: keys. 6: weights. 7: values.
INLINE TileSizes attention_sizes() {
    TileSizes sizes;
    for (int tile = 0; tile < 6; tile++) sizes.set(tile, kTileRows);
    sizes.set(6, kTileRows, 2 * kPanelPlaces);
    sizes.set(7, kPanelPlaces / 2);
    return sizes;
}

template <int C> INLINE void add_keys(const bf16* keys) {
    tileloadd<5>(keys, kTileRowBytes);
    tdpbf16ps<C, 4, 5>();
}

// score [16, kStep] = query, [dim / 32][16][32], times keys.
static __attribute__((noinline)) void tile_scores(const bf16* query, const bf16* keys, const StepPanels& here, int dim,
                                                  float* score) {
    tilezero<0>(), tilezero<1>(), tilezero<2>(), tilezero<3>();
    for (int k = 0; k < dim; k += kStepInputs) {
        tileloadd<4>(query + k * kTileRows, kTileRowBytes);
        const bf16* from = keys + k * kPanelPlaces;
        add_keys<0>(from + here.at[0]), add_keys<1>(from + here.at[1]);
        add_keys<2>(from + here.at[2]), add_keys<3>(from + here.at[3]);
    }
    constexpr int kBytes = kStep * sizeof(float);
    tilestored<0>(score, kBytes), tilestored<1>(score + 16, kBytes);
    tilestored<2>(score + 32, kBytes), tilestored<3>(score + 48, kBytes);
}

// Two tiles of sums: 16 rows and 32 dimensions.
template <int C> INLINE void load_two(const float* sum, int dim) {
    tileloadd<C>(sum, 4 * dim), tileloadd<C + 1>(sum + 16, 4 * dim);
}
template <int C> INLINE void store_two(float* sum, int dim) {
    tilestored<C>(sum, 4 * dim), tilestored<C + 1>(sum + 16, 4 * dim);
}
template <int C> INLINE void add_two(const bf16* values, int dim) {
    tileloadd<7>(values, 4 * dim);
    tdpbf16ps<C, 6, 7>();
    tileloadd<7>(values + 32, 4 * dim);
    tdpbf16ps<C + 1, 6, 7>();
}

// sum [16, dim] += weight [16, kStep] times the panels of values from `first` to `end`.
static __attribute__((noinline)) void tile_sums(const bf16* weight, const bf16* const* values, int first, int end,
                                                int dim, float* sum) {
    for (int d = 0; d < dim; d += 64) {
        bool both = d + 64 <= dim;
        load_two<0>(sum + d, dim);
        if (both) load_two<2>(sum + d + 32, dim);
        for (int g = first; g < end; g++) {
            tileloadd<6>(weight + g * kPanelPlaces, kStep * sizeof(bf16));
            add_two<0>(values[g] + 2 * d, dim);
            if (both) add_two<2>(values[g] + 2 * d + 64, dim);
        }
        store_two<0>(sum + d, dim);
        if (both) store_two<2>(sum + d + 32, dim);
    }
}

// The walk of walk.h over a paired cache.
class PairedWalk {
  public:
    static constexpr int kPieceRows = 128;
    static int64_t state_rows(int64_t rows) {
        int64_t whole = rows <= kFewRows ? kFewRows : kTileRows;
        return (rows + whole - 1) / whole * whole;
    }
    static int64_t floats(int64_t rows, int64_t dim) {
        return state_rows(rows) * dim + kTileRows * kStep * 3 / 2 + kPanelPlaces / 2 * dim +
               State::floats(state_rows(rows), dim);
    }

    PairedWalk(const Attention& a, const Piece& p, float* memory) : a_(a), p_(p) {
        share_ = (int)(a.heads / a.kv_heads);
        rows_ = p.queries * share_;
        dim_ = (int)a.head_dim;
        place_ = p.place(a);
        unit_ = 1.44269504f * (a.cap != 0 ? 1.0f : a.scale);
        token_ = a.starts[p.sequence] + p.query;
        score_ = memory;
        weight_ = (bf16*)(score_ + kTileRows * kStep);
        last_values_ = weight_ + kTileRows * kStep;
        query_ = (float*)(last_values_ + kPanelPlaces * dim_);
        if (few()) round_few();
        else round_tiles();
    }

    int rows() const { return (int)state_rows(rows_); }

    // As Walk::chunk.
    void chunk(int chunk, State state, const Piece* next, int then) {
        std::fill_n(state.weight, rows(), 0.0f);
        std::fill_n(state.most, rows(), kNothing);
        std::fill_n(state.sum, rows() * dim_, 0.0f);
        TileRounding rounding;
        Span span(a_, p_, chunk, kStep);
        if (!few()) return by_tiles(span, state);
        StepPanels here(a_, p_, span.from, span.to);
        for (int t = span.from; t < span.to; t += kStep) {
            bool more = t + kStep < span.to;
            StepPanels after = more ? StepPanels(a_, p_, t + kStep, span.to) : following(here, next, then);
            few_step(here, after, t, state);
            here = after;
        }
    }

    void merge(const State& all, const State& part) const { merge_paired(all, part, rows(), dim_); }

    void finish(const State& state) {
        for (int r = 0; r < rows_; r++) {
            float* to = a_.out + output_at(r);
            float factor = 1.0f / state.weight[r];
            for (int i = 0; i < dim_; i += LANES)
                store<LANES>(to + i, load<LANES>(state.sum + r * dim_ + i) * factor + 0.0f);
        }
    }

  private:
    bool few() const { return rows_ <= kFewRows; }
    int64_t output_at(int r) const {
        return ((token_ + r / share_) * a_.heads + p_.kv_head * share_ + r % share_) * dim_;
    }
    const float* query_of(int r) const {
        return a_.query + (token_ + r / share_) * a_.query_stride + (p_.kv_head * share_ + r % share_) * dim_;
    }

    // [rows, dim], in fp32 again.
    void round_few() {
        alignas(64) bf16 rounded[kStepInputs];
        for (int r = 0; r < rows_; r++) {
            for (int i = 0; i < dim_; i += kStepInputs) {
                round_inputs(query_of(r) + i, rounded);
                float* to = query_ + r * dim_ + i;
                store<LANES>(to, load<LANES>(rounded)), store<LANES>(to + LANES, load<LANES>(rounded + LANES));
            }
        }
    }
    // [rows / 16][dim / 32][16][32].
    void round_tiles() {
        for (int r = 0; r < rows(); r++) {
            for (int i = 0; i < dim_; i += kStepInputs) {
                bf16* to = tiles_of(r) + i * kTileRows + r % kTileRows * kStepInputs;
                if (r < rows_) round_inputs(query_of(r) + i, to);
                else memset(to, 0, kTileRowBytes);
            }
        }
    }
    bf16* tiles_of(int r) const { return (bf16*)query_ + r / kTileRows * kTileRows * dim_; }

    StepPanels following(const StepPanels& here, const Piece* next, int then) const {
        if (!next) return here;
        Span its(a_, *next, then, kStep);
        return {a_, *next, its.from, its.to};
    }

    StepRows step_rows(const State& state, int r, int rows) const {
        return {rows, score_, weight_, state.most + r, state.weight + r, state.sum + r * dim_};
    }
    Sight sight(int r, int t) const { return {r, share_, place_ - t, (int)a_.window}; }

    void weigh(const StepRows& rows, const Sight& sight) const {
        if (a_.cap != 0 || !sight.whole(rows.rows)) hide(rows, sight, a_.scale, a_.cap);
        soften(rows, unit_, dim_);
    }

    void few_step(const StepPanels& here, const StepPanels& after, int t, const State& state) const {
        const bf16 *keys = (const bf16*)a_.keys, *values = (const bf16*)a_.values;
        each_few(rows_, [&](auto count, int r) {
            constexpr int R = decltype(count)::value;
            few_scores<R>(query_ + r * dim_, keys, here, r ? here : after, dim_, score_ + r * kStep);
        });
        weigh(step_rows(state, 0, rows_), sight(0, t));
        each_few(rows_, [&](auto count, int r) {
            constexpr int R = decltype(count)::value;
            few_sums<R>(score_ + r * kStep, values, here, r ? here : after, dim_, state.sum + r * dim_);
        });
    }

    void by_tiles(const Span& span, const State& state) {
        ConfiguredTiles tiles(attention_sizes());
        for (int t = span.from; t < span.to; t += kStep) {
            StepPanels here(a_, p_, t, span.to);
            const bf16* values[kStepPanels];
            for (int g = here.first; g < here.end; g++) values[g] = (const bf16*)a_.values + here.at[g];
            int rest = here.places % kPanelPlaces;
            if (rest) values[here.end - 1] = cleared(values[here.end - 1], rest);
            for (int r = 0; r < rows_; r += kTileRows) {
                StepRows rows = step_rows(state, r, std::min(kTileRows, rows_ - r));
                if (sight(r, t).none(rows.rows)) continue;
                tile_scores(tiles_of(r), (const bf16*)a_.keys, here, dim_, score_);
                weigh(rows, sight(r, t));
                tile_sums(weight_, values, here.first, here.end, dim_, rows.sum);
            }
        }
    }

    // A copy of a panel of values in which places from `places` on are 0: they may hold anything.
    const bf16* cleared(const bf16* panel, int places) {
        memset(last_values_, 0, kPanelPlaces * dim_ * sizeof(bf16));
        memcpy(last_values_, panel, places / 2 * 2 * dim_ * sizeof(bf16));
        if (places % 2)
            for (int i = places / 2 * 2 * dim_; i < (places + 1) * dim_; i += 2) last_values_[i] = panel[i];
        return last_values_;
    }

    const Attention& a_;
    const Piece& p_;
    int share_, rows_, dim_, place_, token_;
    float unit_;  // scores times this are powers of two
    float *score_, *query_;
    bf16 *weight_, *last_values_;
};
