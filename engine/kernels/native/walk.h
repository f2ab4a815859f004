// A piece's walk over its keys and values in the cache, tile by tile.
//
// While a tile is computed, the next one is prefetched, because blocks are scattered and no processor predicts them. A
// row's numbers are computed in one order of lanes and places, whatever the other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "pool.h"
#include "scores.h"
#include "stored.h"
#include "vectors.h"

constexpr int kChunk = 256;
// The most places whose scores are computed together.
constexpr int kTogether = 8;
// The number of rows from which a tile is widened to fp32 once for all of them.
constexpr int kWiden = 7;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Attention {
    const float* query;  // [tokens, heads, head_dim], tokens `query_stride` apart
    int64_t query_stride;
    const void *keys, *values;  // [blocks, block, kv_heads, bytes of a stored head], or as paired.h says
    const int32_t* starts;  // [sequences + 1]
    const int32_t* lengths;  // [sequences]
    // [sequences]: the places of a sequence before its table begins. Chunks are counted from its first place.
    const int32_t* leads;
    const int32_t* tables;  // rows `table_stride` apart
    int64_t table_stride;
    const int32_t* table_rows;  // [sequences]
    int64_t sequences, heads, kv_heads, head_dim, block;
    int64_t kind;  // the storage of keys and values
    int64_t window;  // 0: none
    float scale, cap;  // cap 0: none
    float* out;  // [tokens, heads, head_dim]
};

struct Piece {
    int32_t sequence, kv_head, query, queries;  // `query`: the first one's index in the sequence's queries
    int32_t chunk, chunks;  // the first chunk that any row sees a part of, and their number
    int32_t partial;  // the index of its first chunk's partial result

    // The place of the first query, in the same count as chunks.
    int place(const Attention& a) const {
        int own = a.starts[sequence + 1] - a.starts[sequence];
        return a.leads[sequence] + a.lengths[sequence] - own + query;
    }
};

// The places of a chunk that a piece sees, from the beginning of a tile of `tile` places.
struct Span {
    int from, to;
    Span(const Attention& a, const Piece& p, int chunk, int tile = kTile) {
        int place = p.place(a);
        from = chunk * kChunk;
        to = std::min(from + kChunk, place + p.queries);
        if (a.window) from = std::max(from, std::max<int>(0, place - (int)a.window + 1) / tile * tile);
    }
};

// The byte offsets of a tile's places from the beginning of the keys, and of the values.
struct Places {
    int64_t at[kTile];
    int places = 0;

    void find(const Attention& a, const Piece& p, int first, int count, int64_t stored) {
        const int32_t* table = a.tables + (int64_t)a.table_rows[p.sequence] * a.table_stride;
        int64_t pitch = a.kv_heads * stored, head = p.kv_head * stored;
        int place = first - a.leads[p.sequence], block = (int)a.block, t = 0;
        // Places before the table are behind the window and hidden, so any block will do.
        for (; t < count && place < 0; t++, place++) at[t] = (int64_t)table[0] * block * pitch + head;
        while (t < count) {
            int within = place % block, some = std::min(block - within, count - t);
            int64_t from = ((int64_t)table[place / block] * block + within) * pitch + head;
            for (int i = 0; i < some; i++, from += pitch) at[t + i] = from;
            t += some;
            place += some;
        }
        // Pad to whole vectors of scores by repeating the last place. The padding is hidden like all places not seen.
        for (; t % kTogether; t++) at[t] = at[count - 1];
        places = count;
    }
};

// The state of a running softmax: for each row the largest score (as a power of two), the sum of weights and the
// weighted sum of values.
struct State {
    float *most, *weight, *sum;
    State(float* at, int64_t rows) : most(at), weight(at + rows), sum(at + 2 * rows) {}
    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
};

INLINE void merge_states(State& all, const State& part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (part.weight[r] == 0) continue;
        float most = all.weight[r] == 0 || part.most[r] > all.most[r] ? part.most[r] : all.most[r];
        float before = all.weight[r] == 0 ? 0 : std::exp2(all.most[r] - most), now = std::exp2(part.most[r] - most);
        all.most[r] = most;
        all.weight[r] = all.weight[r] * before + part.weight[r] * now;
        float *to = all.sum + r * dim, *from = part.sum + r * dim;
        for (int64_t i = 0; i < dim; i += 8)
            store<8>(to + i, load<8>(to + i) * before + load<8>(from + i) * now);
    }
}

template <int W> class Walk {
  public:
    // The most rows of a piece, unless a single query has more.
    static constexpr int kPieceRows = 48;
    // The rows of the state of a piece of `rows` rows.
    static int64_t state_rows(int64_t rows) { return rows; }
    static int64_t floats(int64_t rows, int64_t dim) {
        return rows * kTile + 2 * kTile * dim + State::floats(rows, dim) + rows * 4;
    }

    Walk(const Attention& a, const Piece& p, float* memory) : a_(a), p_(p) {
        share_ = (int)(a.heads / a.kv_heads);
        rows_ = p.queries * share_;
        dim_ = (int)a.head_dim;
        place_ = p.place(a);
        unit_ = 1.44269504f * (a.cap != 0 ? 1.0f : a.scale);
        token_ = a.starts[p.sequence] + p.query;
        score_ = memory;
        wide_ = score_ + rows_ * kTile;
        query_ = (const float**)(wide_ + 2 * kTile * dim_);
        before_ = (float*)(query_ + rows_);
        base_ = before_ + rows_;
        for (int r = 0; r < rows_; r++)
            query_[r] = a.query + (token_ + r / share_) * a.query_stride + (p.kv_head * share_ + r % share_) * dim_;
    }

    int rows() const { return rows_; }

    // Computes the state of the piece's rows over chunk `chunk`. The next walk is over chunk `then` of `next`, which
    // may be null.
    void chunk(int chunk, State state, const Piece* next, int then) {
        std::fill_n(state.weight, rows_, 0.0f);
        std::fill_n(state.most, rows_, kNothing);
        std::fill_n(state.sum, rows_ * dim_, 0.0f);
        of_kind(a_.kind, [&](auto stored) { over<decltype(stored)>({a_, p_, chunk}, state, next, then); });
    }

    // Adds a later chunk's state.
    INLINE_MEMBER void merge(State& all, const State& part) const { merge_states(all, part, rows_, dim_); }

    void finish(const State& state) {
        for (int r = 0; r < rows_; r++) {
            float* to = a_.out + ((token_ + r / share_) * a_.heads + p_.kv_head * share_ + r % share_) * dim_;
            float factor = 1.0f / state.weight[r];
            for (int i = 0; i < dim_; i += 8) store<8>(to + i, load<8>(state.sum + r * dim_ + i) * factor);
        }
    }

  private:
    template <class T> void over(Span span, State& state, const Piece* next, int then) {
        int64_t stored = Stored<T>::bytes(dim_);
        Places tiles[2];
        auto find = [&](Places& tile, const Piece& p, int first, int to) {
            tile.find(a_, p, first, std::min(kTile, to - first), stored);
        };
        find(tiles[0], p_, span.from, span.to);
        for (int t = span.from, i = 0; t < span.to; t += kTile, i ^= 1) {
            Places& after = tiles[i ^ 1];
            after.places = 0;
            if (t + kTile < span.to) {
                find(after, p_, t + kTile, span.to);
            } else if (next) {
                Span its(a_, *next, then);
                find(after, *next, its.from, its.to);
            }
            // If the next tile has fewer places than this one, its first place is prefetched again.
            int asked = (tiles[i].places + kTogether - 1) / kTogether * kTogether;
            for (int j = after.places; after.places && j < asked; j++) after.at[j] = after.at[0];
            tile<T>(tiles[i], t, state, after);
        }
    }

    template <class T> void tile(const Places& here, int first, State& state, const Places& after) {
        const char *keys = (const char*)a_.keys, *values = (const char*)a_.values;
        int stored = (int)Stored<T>::bytes(dim_);
        scaled_ = Stored<T>::scaled;
        if constexpr (Stored<T>::scaled) {
            for (int t = 0; t < here.places; t++) {
                key_scales_[t] = Stored<T>::scale((const T*)(keys + here.at[t]), dim_);
                value_scales_[t] = Stored<T>::scale((const T*)(values + here.at[t]), dim_);
            }
        }
        Asked next_keys, next_values;
        if (after.places) {
            next_keys = {keys, after.at, stored};
            next_values = {values, after.at, stored};
        }
        if (rows_ < kWiden || (sizeof(T) == 4 && !kAcross<W>)) {
            attend<T>(keys, values, here, first, state, next_keys, next_values);
            return;
        }
        // Widened once for all rows, except for scales. The numbers are the same as without widening.
        Places wide;
        if constexpr (kAcross<W>) turn<T>(keys, here);
        for (int t = 0; t < here.places; t++) {
            next_keys.ask(t);
            next_values.ask(t);
            float *k = wide_ + t * dim_, *v = k + kTile * dim_;
            const T *key = (const T*)(keys + here.at[t]), *value = (const T*)(values + here.at[t]);
            for (int i = 0; i < dim_; i += W) {
                if constexpr (!kAcross<W>) store<W>(k + i, load<W>(key + i));
                store<W>(v + i, load<W>(value + i));
            }
        }
        wide.places = here.places;
        for (int t = 0; t < (here.places + 3) / 4 * 4; t++)
            wide.at[t] = std::min(t, here.places - 1) * (int64_t)(dim_ * sizeof(float));
        attend<float, true>((const char*)wide_, (const char*)(wide_ + kTile * dim_), wide, first, state, {}, {});
    }

    // Transposes keys into `wide_`: dimension i of all places, then dimension i + 1. Missing places are 0.
    template <class T> void turn(const char* keys, const Places& here) {
        for (int t = 0; t < here.places; t += W) {
            for (int i = 0; i < dim_; i += W) {
                F<W> square[W] = {};
                for (int j = 0; j < W && t + j < here.places; j++) square[j] = load<W>((const T*)(keys + here.at[t + j]) + i);
                transpose<W>(square);
                for (int j = 0; j < W; j++) store<W>(wide_ + (i + j) * kTile + t, square[j]);
            }
        }
    }

    // Attends to one tile. WIDE: keys and values are in `wide_`.
    template <class T, bool WIDE = false>
    __attribute__((noinline)) void attend(const char* keys, const char* values, const Places& here, int first, State& state,
                                          Asked next_keys, Asked next_values) {
        // Each stage runs for all rows before the next stage. So keys, and then values, stay in the nearest cache, and
        // no row waits for its own previous stage.
        bool plain = here.places == kTile && !scaled_ && a_.cap == 0;
        of_size<W>(dim_, [&](auto size) {
            constexpr int DIM = decltype(size)::value;
            each_rows([&](auto count, int r) {
                constexpr int R = decltype(count)::value;
                int places = seen(r + R - 1, first, here.places);
                if (places <= 0) return;
                float* score = score_ + r * kTile;
                Asked next = r ? Asked{} : next_keys;
                if constexpr (WIDE && kAcross<W>) dots_across<W, R, DIM>(query_ + r, wide_, places, dim_, score);
                else if constexpr (W == 16) dots_by_16<R, T, DIM>(query_ + r, keys, here.at, places, dim_, score, next);
                else dots<W, R, T>(query_ + r, keys, here.at, places, dim_, score, next);
            });
        });
        each_rows([&](auto count, int r) {
            constexpr int R = decltype(count)::value;
            if (seen(r + R - 1, first, here.places) <= 0) return;
            bool all = seen(r, first, kTile) == kTile && (!a_.window || begin(r + R - 1, first) <= 0);
            if (plain && all) level<R, true>(r, first, state);
            else level<R, false>(r, first, state);
        });
        each_rows([&](auto count, int r) {
            constexpr int R = decltype(count)::value;
            if (seen(r + R - 1, first, here.places) > 0) soften<R>(r, state);
        });
        each_rows([&](auto count, int r) {
            constexpr int R = decltype(count)::value, V = R == 1 ? 8 : 4;
            float* sum = state.sum + r * dim_;
            int places = seen(r + R - 1, first, here.places), d = 0;
            if (places <= 0) return;
            // Prefetch the same dimensions of the next values. More at once would exceed what memory can deliver.
            auto part = [&](int numbers) {
                if (r || !next_values.from) return Asked{};
                // For bytes, prefetch all with the first part: a cache line or two, with the scale.
                if (sizeof(T) == 1) return d ? Asked{} : next_values;
                return next_values.part(d * sizeof(T), numbers * sizeof(T));
            };
            for (; d + V * W <= dim_; d += V * W)
                weigh<W, R, V, T>(score_ + r * kTile, before_ + r, values, here.at, places, dim_, d, sum, part(V * W));
            for (; d < dim_; d += W)
                weigh<W, R, 1, T>(score_ + r * kTile, before_ + r, values, here.at, places, dim_, d, sum, part(W));
        });
    }

    // Calls call(number of rows, first row), for all rows.
    template <class Call> INLINE_MEMBER void each_rows(Call&& call) {
        for (int r = 0; r < rows_;) {
            int left = rows_ - r, some = left == 4 || left == 2 ? 2 : left > 2 ? 3 : 1;
            if (some == 3) call(std::integral_constant<int, 3>{}, r);
            else if (some == 2) call(std::integral_constant<int, 2>{}, r);
            else call(std::integral_constant<int, 1>{}, r);
            r += some;
        }
    }

    // For the tile at `first`: where row r's window begins, and how many of the places are not after row r.
    int begin(int r, int first) const { return place_ + r / share_ - (int)a_.window + 1 - first; }
    int seen(int r, int first, int places) const { return std::min(place_ + r / share_ + 1 - first, places); }

    // Updates the largest score of each of R rows, and `before_`, the factor that this change gives to their sums so
    // far. Without PLAIN, it first scales, caps and masks the scores. With PLAIN, all rows see the whole tile with
    // plain scores.
    template <int R, bool PLAIN> INLINE_MEMBER void level(int r, int first, State& state) {
        F<8> tops[4];
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) {
            int from = a_.window ? begin(r + i, first) : 0, to = seen(r + i, first, kTile);
            tops[i] = splat<8>(kNothing);
#pragma GCC unroll 8
            for (int t = 0; t < kTile; t += 8) {
                float* at = score_ + (r + i) * kTile + t;
                // In the width in which they were stored.
                F<8> s = W == 16 ? load<8>(at) : joined(load<4>(at), load<4>(at + 4));
                if (!PLAIN) {
                    if (scaled_) s *= load<8>(key_scales_ + t);
                    // cap * tanh(scale * s / cap)
                    if (a_.cap != 0)
                        s = a_.cap - 2.0f * a_.cap / (exponential<8>(s * (2.0f * a_.scale / a_.cap)) + 1.0f);
                    I<8> place = I<8>{0, 1, 2, 3, 4, 5, 6, 7} + t;
                    s = (place >= from) & (place < to) ? s : splat<8>(kNothing);
                    store<8>(at, s);
                }
                tops[i] = larger<8>(s, tops[i]);
            }
        }
        for (int i = R; i < 4; i++) tops[i] = tops[0];
        F<4> top = largest_of<8>(tops[0], tops[1], tops[2], tops[3]) * unit_, was;
        for (int i = 0; i < 4; i++) was[i] = state.most[r + (i < R ? i : 0)];
        top = larger<4>(top, was);
        // A row may have seen nothing yet, or only NaN. Its weights are then 0, or NaN.
        F<4> base = top == kNothing ? F<4>{} : top, before = two_to<4>(was - base);
        for (int i = 0; i < R; i++) {
            state.most[r + i] = top[i];
            base_[r + i] = base[i];
            before_[r + i] = before[i];
        }
    }

    // Turns the scores of R rows into weights relative to the largest.
    template <int R> INLINE_MEMBER void soften(int r, State& state) {
        F<W> totals[4] = {};
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) {
            F<W> base = splat<W>(base_[r + i]);
#pragma GCC unroll 8
            for (int t = 0; t < kTile; t += W) {
                float* at = score_ + (r + i) * kTile + t;
                F<W> w = two_to<W>(load<W>(at) * unit_ - base);
                totals[i] += w;
                if (scaled_) w *= load<W>(value_scales_ + t);
                store<W>(at, w);
            }
        }
        F<4> total = sums<W>(totals[0], totals[1], totals[2], totals[3]);
        for (int i = 0; i < R; i++) state.weight[r + i] = state.weight[r + i] * before_[r + i] + total[i];
    }

    const Attention& a_;
    const Piece& p_;
    int share_, rows_, dim_, place_, token_;
    float unit_;  // scores times this are powers of two
    const float** query_;
    float *score_, *wide_, *before_, *base_;
    bool scaled_ = false;
    float key_scales_[kTile] = {}, value_scales_[kTile] = {};  // of a tile's places
};
