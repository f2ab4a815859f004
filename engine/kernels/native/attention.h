// Attention over the paged cache as it lies, for decodes and chunks of prompts alike.
//
// A piece is some queries of one sequence and all query heads of one KV head: rows that read the same keys. It walks
// the keys in tiles (scores, running softmax, sum of values), tiles in chunks of kChunk places; what chunks give is
// joined in their order. Tiles and chunks are counted from a sequence's first token, also where its table begins behind it
// (a window's): a row's sums are made in the same order whatever has been dropped. Where there are fewer pieces than the threads can share, each chunk is a task of its own, and
// joining comes after: the arithmetic is the same, so a row's result depends neither on the threads nor on the batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "pool.h"
#include "stored.h"
#include "vectors.h"

constexpr int kTile = 32;
constexpr int kChunk = 256;
// Rows of a piece, unless one query alone has more.
constexpr int kPieceRows = 48;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Attention {
    const float* query;  // [tokens, heads, head_dim], tokens `query_stride` apart
    int64_t query_stride;
    const void *keys, *values;  // [blocks, block, kv_heads, as many bytes as a head is stored in]
    const int32_t* starts;  // [sequences + 1]
    const int32_t* lengths;  // [sequences]
    // [sequences], less than kChunk: places before a table begins, counted from the last chunk that begins before it.
    const int32_t* leads;
    const int32_t* tables;  // rows `table_stride` apart
    int64_t table_stride;
    const int32_t* table_rows;  // [sequences]
    int64_t sequences, heads, kv_heads, head_dim, block;
    int64_t kind;  // how they are stored
    int64_t window;  // 0: none
    float scale, cap;  // cap 0: none
    float* out;  // [tokens, heads, head_dim]
};

struct Piece {
    int32_t sequence, kv_head, query, queries;  // `query`: the first, counted from the sequence's own
    int32_t chunk, chunks;  // those of which any row sees a part
    int32_t partial;  // of its first chunk
};

// Softmax in the making: of each row the largest score, the sum of weights and the weighted sum of values.
struct State {
    float *most, *weight, *sum;
    State(float* at, int64_t rows) : most(at), weight(at + rows), sum(at + 2 * rows) {}
    static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
};

INLINE void join(State& all, const State& part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (part.weight[r] == 0) continue;
        float most = all.weight[r] == 0 || part.most[r] > all.most[r] ? part.most[r] : all.most[r];
        float before = all.weight[r] == 0 ? 0 : std::exp(all.most[r] - most), now = std::exp(part.most[r] - most);
        all.most[r] = most;
        all.weight[r] = all.weight[r] * before + part.weight[r] * now;
        float *to = all.sum + r * dim, *from = part.sum + r * dim;
        for (int64_t i = 0; i < dim; i += 8)
            store<8>(to + i, load<8>(to + i) * before + load<8>(from + i) * now);
    }
}

// score[r * stride + t] = query row r . key t, for R rows and all `places` rounded up to four.
template <int W, int R, class T>
INLINE void dots(const float* const* query, const T* const* keys, int places, int dim, float* score, int stride) {
    for (int t = 0; t < places; t += 4) {
        F<W> s[R][4] = {};
        for (int i = 0; i < dim; i += W) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                F<W> key = load<W>(keys[t + j] + i);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) s[r][j] += load<W>(query[r] + i) * key;
            }
        }
        for (int r = 0; r < R; r++) store<4>(score + r * stride + t, sums<W>(s[r][0], s[r][1], s[r][2], s[r][3]));
    }
}

// sum[r * dim ..] += weight[r * stride + t] * value t, for R rows and V vectors of each.
template <int W, int R, int V, class T>
INLINE void weigh(const float* weight, int stride, const T* const* values, int places, int dim, int from, float* sum) {
    F<W> s[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) s[r][v] = load<W>(sum + r * dim + from + v * W);
    for (int t = 0; t < places; t++) {
        F<W> value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = load<W>(values[t] + from + v * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            F<W> w = splat<W>(weight[r * stride + t]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) s[r][v] += w * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store<W>(sum + r * dim + from + v * W, s[r][v]);
}

template <int W> class Walk {
  public:
    static int64_t floats(int64_t rows, int64_t dim) {
        return rows * (kTile + 4) + 2 * kTile * dim + State::floats(rows, dim) + rows * 4;
    }

    Walk(const Attention& a, const Piece& p, float* memory) : a_(a), p_(p) {
        share_ = (int)(a.heads / a.kv_heads);
        rows_ = p.queries * share_;
        dim_ = (int)a.head_dim;
        int first = a.starts[p.sequence];
        lead_ = a.leads[p.sequence];
        place_ = lead_ + a.lengths[p.sequence] - (a.starts[p.sequence + 1] - first) + p.query;
        token_ = first + p.query;
        table_ = a.tables + (int64_t)a.table_rows[p.sequence] * a.table_stride;
        query_ = (const float**)memory;
        memory += rows_ * 2;
        for (int r = 0; r < rows_; r++)
            query_[r] = a.query + (token_ + r / share_) * a.query_stride + (p.kv_head * share_ + r % share_) * dim_;
        score_ = memory;
        wide_ = score_ + rows_ * (kTile + 4);
    }

    int rows() const { return rows_; }

    // State of the piece's rows over chunk `chunk`.
    void chunk(int chunk, State state) {
        std::fill_n(state.weight, rows_, 0.0f);
        std::fill_n(state.most, rows_, kNothing);
        std::fill_n(state.sum, rows_ * dim_, 0.0f);
        int last = place_ + p_.queries - 1;
        int from = chunk * kChunk, to = std::min(from + kChunk, last + 1);
        if (a_.window) from = std::max(from, std::max<int>(0, place_ - (int)a_.window + 1) / kTile * kTile);
        for (int t = from; t < to; t += kTile)
            of_kind(a_.kind, [&](auto stored) { tile<decltype(stored)>(t, std::min(kTile, to - t), state); });
    }

    void finish(const State& state) {
        for (int r = 0; r < rows_; r++) {
            float* to = a_.out + ((token_ + r / share_) * a_.heads + p_.kv_head * share_ + r % share_) * dim_;
            float factor = 1.0f / state.weight[r];
            for (int i = 0; i < dim_; i += 8) store<8>(to + i, load<8>(state.sum + r * dim_ + i) * factor);
        }
    }

  private:
    template <class T> void tile(int first, int places, State& state) {
        const T *keys[kTile + 4], *values[kTile + 4];
        int64_t stored = Stored<T>::bytes(dim_);
        scaled_ = Stored<T>::scaled;
        for (int t = 0; t < places; t++) {
            // What lies before the table is behind the window: hidden, whatever it is.
            int place = std::max(first + t - lead_, 0);
            int64_t slot = (int64_t)table_[place / a_.block] * a_.block + place % a_.block;
            int64_t at = (slot * a_.kv_heads + p_.kv_head) * stored;
            keys[t] = (const T*)((const char*)a_.keys + at);
            values[t] = (const T*)((const char*)a_.values + at);
            if constexpr (Stored<T>::scaled) {
                key_scales_[t] = Stored<T>::scale(keys[t], dim_);
                value_scales_[t] = Stored<T>::scale(values[t], dim_);
            }
        }
        if (sizeof(T) == 4 || rows_ <= 3) {
            attend(keys, values, first, places, state);
            return;
        }
        // Widened once for all rows, but for scales: numbers are the same as where they are not.
        const float *wide_keys[kTile + 4], *wide_values[kTile + 4];
        for (int t = 0; t < places; t++) {
            float *k = wide_ + t * dim_, *v = wide_ + (kTile + t) * dim_;
            for (int i = 0; i < dim_; i += W) {
                store<W>(k + i, load<W>(keys[t] + i));
                store<W>(v + i, load<W>(values[t] + i));
            }
            wide_keys[t] = k;
            wide_values[t] = v;
        }
        attend(wide_keys, wide_values, first, places, state);
    }

    template <class K>
    __attribute__((noinline)) void attend(const K** keys, const K** values, int first, int places, State& state) {
        // Whole vectors of scores: what is beyond the last place repeats it, and is hidden like all that a row may not see.
        for (int t = places; t < (places + 3) / 4 * 4; t++) keys[t] = keys[places - 1];
        for (int r = 0; r < rows_;) {
            int left = rows_ - r, some = left == 4 || left == 2 ? 2 : left > 2 ? 3 : 1;
            float* score = score_ + r * (kTile + 4);
            float* sum = state.sum + r * dim_;
            if (some == 3) rows<3>(r, keys, values, first, places, score, sum, state);
            else if (some == 2) rows<2>(r, keys, values, first, places, score, sum, state);
            else rows<1>(r, keys, values, first, places, score, sum, state);
            r += some;
        }
    }

    template <int R, class K>
    INLINE_MEMBER void rows(int r, const K** keys, const K** values, int first, int places, float* score, float* sum, State& state) {
        dots<W, R>(query_ + r, keys, places, dim_, score, kTile + 4);
        if (scaled_) rescale<R>(score, key_scales_, places);
        for (int i = 0; i < R; i++) soften(r + i, first, places, score + i * (kTile + 4), sum + i * dim_, state);
        if (scaled_) rescale<R>(score, value_scales_, places);
        int d = 0;
        for (; d + 4 * W <= dim_; d += 4 * W) weigh<W, R, 4>(score, kTile + 4, values, places, dim_, d, sum);
        for (; d < dim_; d += W) weigh<W, R, 1>(score, kTile + 4, values, places, dim_, d, sum);
    }

    template <int R> INLINE_MEMBER void rescale(float* score, const float* scales, int places) {
        for (int i = 0; i < R; i++, score += kTile + 4)
            for (int t = 0; t < places; t += 4) store<4>(score + t, load<4>(score + t) * load<4>(scales + t));
    }

    // Scores of one row to weights, relative to its largest score so far.
    INLINE_MEMBER void soften(int r, int first, int places, float* score, float* sum, State& state) {
        int at = place_ + r / share_, begin = a_.window ? at - (int)a_.window + 1 - first : 0, end = at + 1 - first;
        begin = std::max(begin, 0);
        end = std::min(end, places);
        int padded = (places + 7) / 8 * 8;
        if (begin >= end) {
            std::fill_n(score, padded, 0.0f);
            return;
        }
        std::fill_n(score, begin, kNothing);
        std::fill_n(score + end, padded - end, kNothing);
        F<8> top = splat<8>(kNothing);
        for (int t = 0; t < padded; t += 8) {
            F<8> s = load<8>(score + t) * a_.scale;
            // cap * tanh(s / cap); what is hidden stays so.
            if (a_.cap != 0) {
                F<8> e = exponential<8>(s * (2.0f / a_.cap));
                s = s == kNothing ? s : a_.cap - 2.0f * a_.cap / (e + 1.0f);
            }
            store<8>(score + t, s);
            top = larger<8>(s, top);
        }
        float most = largest<8>(top);
        if (!(most > state.most[r])) most = state.most[r];
        // Of scores that are all NaN there is no largest one: any will do, the weights are NaN.
        if (most == kNothing) most = 0;
        if (most != state.most[r]) {
            float before = std::exp(state.most[r] - most);
            state.weight[r] *= before;
            for (int i = 0; i < dim_; i += 8) store<8>(sum + i, load<8>(sum + i) * before);
            state.most[r] = most;
        }
        F<8> total{};
        for (int t = 0; t < padded; t += 8) {
            F<8> w = exponential<8>(load<8>(score + t) - most);
            store<8>(score + t, w);
            total += w;
        }
        state.weight[r] += ::sum<8>(total);
    }

    const Attention& a_;
    const Piece& p_;
    int share_, rows_, dim_, lead_, place_, token_;
    const int32_t* table_;
    const float** query_;
    float *score_, *wide_;
    bool scaled_ = false;
    float key_scales_[kTile] = {}, value_scales_[kTile] = {};  // of a tile's places
};

template <int W> static void attend(Pool& pool, const Attention& a) {
    int share = (int)(a.heads / a.kv_heads), most = std::max(1, kPieceRows / share), rows = 0;
    std::vector<Piece> pieces;
    int partials = 0;
    // Backwards: long chunks of prompts come last in a step, and are best begun first.
    for (int i = (int)a.sequences - 1; i >= 0; i--) {
        int queries = a.starts[i + 1] - a.starts[i], length = a.lengths[i];
        if (length == 0) continue;
        for (int query = 0; query < queries; query += most) {
            int count = std::min(most, queries - query), place = a.leads[i] + length - queries + query;
            int begin = a.window ? std::max(0, place - (int)a.window + 1) / kChunk : 0;
            int chunks = (place + count - 1) / kChunk + 1 - begin;
            for (int h = 0; h < (int)a.kv_heads; h++, partials += chunks)
                pieces.push_back({i, h, query, count, begin, chunks, partials});
            rows = std::max(rows, count * share);
        }
    }
    int64_t walk = Walk<W>::floats(rows, a.head_dim), state = State::floats(rows, a.head_dim);
    if (partials == (int)pieces.size() || (int)pieces.size() >= 4 * pool.threads() || pool.threads() == 1) {
        pool.run((int)pieces.size(), [&](int task, int thread) {
            float* memory = pool.own[thread].take(walk + state);
            Walk<W> one(a, pieces[task], memory);
            const Piece& p = pieces[task];
            State all(memory + walk, one.rows()), part(memory + walk - state, one.rows());
            one.chunk(p.chunk, all);
            for (int c = 1; c < p.chunks; c++) {
                one.chunk(p.chunk + c, part);
                join(all, part, one.rows(), a.head_dim);
            }
            one.finish(all);
        });
        return;
    }
    float* memory = pool.shared.take(partials * state);
    std::vector<std::pair<int, int>> tasks;
    for (int i = 0; i < (int)pieces.size(); i++)
        for (int c = 0; c < pieces[i].chunks; c++) tasks.emplace_back(i, c);
    pool.run((int)tasks.size(), [&](int task, int thread) {
        const Piece& p = pieces[tasks[task].first];
        Walk<W> one(a, p, pool.own[thread].take(walk));
        int chunk = tasks[task].second;
        one.chunk(p.chunk + chunk, State(memory + (p.partial + chunk) * state, one.rows()));
    });
    pool.run((int)pieces.size(), [&](int task, int thread) {
        const Piece& p = pieces[task];
        Walk<W> one(a, p, pool.own[thread].take(walk));
        State all(memory + p.partial * state, one.rows());
        for (int c = 1; c < p.chunks; c++)
            join(all, State(memory + (p.partial + c) * state, one.rows()), one.rows(), a.head_dim);
        one.finish(all);
    });
}
