// Attention of encoders: a token sees those of its sequence on both sides, or the near ones of these.
//
// A task is a head of one sequence and some of its queries. It goes through the keys in blocks: these are transposed
// and the values copied, so that both are read in order and stay in the core's own cache; then for a few queries at a
// time come scores, weights and sums of values. What blocks give is joined in order. A row's sums have an order that
// depends on its sequence alone.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "vectors.h"

struct Unmasked {
    const float* rows;  // [tokens, 3, heads, head_dim]: queries, keys, values
    const int32_t* starts;  // [sequences + 1]
    int64_t sequences, heads, head_dim;
    int64_t reach;  // the distance of the farthest tokens that a token sees; -1 for all
    // [heads, 2 * farthest + LANES or more]: what is added to a score, as a power of two, by the distance of the key
    // after its query, from -farthest on; may be null
    const float* biases;
    int64_t biases_stride, farthest;
    float unit;  // products times this are powers of two
    float* out;  // [tokens, heads, head_dim]
};

class UnmaskedSpan {
  public:
    // The queries of a task, and the keys of a block.
    static constexpr int kSpan = 240, kKeys = 1024;

    static int64_t floats(int64_t head_dim) {
        return head_dim * kKeys + kKeys * padded(head_dim) + kRows * (head_dim + kStride) +
               kSpan * (padded(head_dim) + 2) + 4;
    }

    UnmaskedSpan(const Unmasked& a, int sequence, int head, int query, float* memory) : a_(a), head_(head) {
        dim_ = (int)a.head_dim;
        wide_ = (int)padded(dim_);
        begin_ = a.starts[sequence];
        length_ = a.starts[sequence + 1] - begin_;
        first_ = query;
        count_ = std::min(kSpan, length_ - query);
        pitch_ = 3 * a.heads * a.head_dim;
        keys_ = memory;
        values_ = keys_ + dim_ * kKeys;
        queries_ = values_ + kKeys * wide_;
        scores_ = queries_ + kRows * dim_;
        sums_ = scores_ + kRows * kStride;
        most_ = sums_ + kSpan * wide_;
        weight_ = most_ + kSpan;
    }

    void run() {
        int rows = (count_ + kRows - 1) / kRows * kRows;
        std::fill_n(sums_, rows * wide_, 0.0f);
        std::fill_n(most_, rows, -kInfinity);
        std::fill_n(weight_, rows, 0.0f);
        int from = low(first_) / kKeys * kKeys, to = high(first_ + count_ - 1);
        for (int block = from; block < to; block += kKeys) {
            int keys = std::min(kKeys, to - block);
            pack(block, keys);
            for (int row = 0; row < count_; row += kRows) attend(row, block, keys);
        }
        for (int row = 0; row < count_; row++) {
            float* to = a_.out + ((begin_ + first_ + row) * a_.heads + head_) * dim_;
            float factor = 1.0f / weight_[row];
            for (int i = 0; i < dim_; i++) to[i] = sums_[row * wide_ + i] * factor;
        }
    }

  private:
    // The queries, and the vectors of keys, whose scores are computed together: their sums fill the registers.
    static constexpr int kRows = LANES == 16 ? 6 : 4, kVectors = LANES == 16 ? 4 : 2, kTile = kVectors * LANES;
    static constexpr int kFours = (kRows + 3) / 4;
    // From one row of scores to the next, not a power of two, for caches' sake.
    static constexpr int kStride = kKeys + LANES;
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    static int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }
    // The first key that a query sees, and the one after the last.
    int low(int query) const { return a_.reach < 0 ? 0 : (int)std::max<int64_t>(0, query - a_.reach); }
    int high(int query) const { return a_.reach < 0 ? length_ : (int)std::min<int64_t>(length_, query + a_.reach + 1); }
    const float* token(int place) const { return a_.rows + (begin_ + place) * pitch_ + head_ * dim_; }

    INLINE_MEMBER F<LANES> load_padded(const float* from, int numbers) const {
        if (numbers >= LANES) return load<LANES>(from);
        float part[LANES] = {};
        std::copy(from, from + numbers, part);
        return load<LANES>(part);
    }

    // Keys by tiles: [dim, kTile], zeros beyond the last. Values: [keys, wide], zeros beyond the head.
    void pack(int block, int keys) {
        int64_t width = pitch_ / 3;
        for (int t = 0; t < keys; t += kTile) {
            float* tile = keys_ + t * dim_;
            for (int i = 0; i < dim_; i += LANES) {
                for (int group = 0; group < kTile && t + group < keys; group += LANES) {
                    F<LANES> square[LANES] = {};
                    for (int j = 0; j < LANES && t + group + j < keys; j++)
                        square[j] = load_padded(token(block + t + group + j) + width + i, dim_ - i);
                    transpose<LANES>(square);
                    for (int j = 0; j < LANES && i + j < dim_; j++) store<LANES>(tile + (i + j) * kTile + group, square[j]);
                }
            }
        }
        for (int t = 0; t < keys; t++) {
            const float* value = token(block + t) + 2 * width;
            for (int i = 0; i < dim_; i += LANES) store<LANES>(values_ + t * wide_ + i, load_padded(value + i, dim_ - i));
        }
    }

    // Attends from `kRows` queries, from the span's number `row` on, to a block. Those after the last are zeros, and what
    // they give is not used.
    void attend(int row, int block, int keys) {
        int query = first_ + row, last = std::min(query + kRows, first_ + count_) - 1;
        int from = std::max(0, low(query) - block) / LANES * LANES, to = std::min(keys, high(last) - block);
        if (from >= to) return;
        for (int r = 0; r < kRows; r++) {
            float* to_query = queries_ + r * dim_;
            const float* source = token(std::min(query + r, last));
            for (int i = 0; i < dim_; i++) to_query[i] = query + r > last ? 0.0f : source[i] * a_.unit;
        }
        for (int t = from / kTile * kTile; t < to; t += kTile) {
            int vectors = std::min(kVectors, (to - t + LANES - 1) / LANES);
            if (vectors == 1) score<1>(t);
            else if (vectors == 2) score<2>(t);
            else score<kVectors>(t);
        }
        float before[kFours * 4];
        soften(row, query, last, block, from, to, keys, before);
        int d = 0;
        for (; d + kVectors * LANES <= wide_; d += kVectors * LANES) weigh<kVectors>(row, d, from, to, before);
        if (kVectors == 4 && d + 2 * LANES <= wide_) weigh<2>(row, d, from, to, before), d += 2 * LANES;
        for (; d < wide_; d += LANES) weigh<1>(row, d, from, to, before);
    }

    // The scores of V vectors of keys, from key t on.
    template <int V> __attribute__((noinline)) void score(int t) {
        const float* key = keys_ + t * dim_;
        F<LANES> sums[kRows][V] = {};
        for (int i = 0; i < dim_; i++, key += kTile) {
            F<LANES> k[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) k[v] = load<LANES>(key + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                F<LANES> q = splat<LANES>(queries_[r * dim_ + i]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sums[r][v] += q * k[v];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) store<LANES>(scores_ + r * kStride + t + v * LANES, sums[r][v]);
    }

    // Turns the rows' scores into weights relative to the largest so far, which it updates with their sums. `before`: the
    // factors that the sums so far get.
    __attribute__((noinline)) void soften(int row, int query, int last, int block, int from, int to, int keys,
                                          float* before) {
        F<LANES> tops[kFours * 4], totals[kFours * 4];
        for (int r = 0; r < kRows; r++) tops[r] = hide(r, std::min(query + r, last), block, from, to, keys);
        for (int r = kRows; r < kFours * 4; r++) tops[r] = tops[0];
        float bases[kFours * 4];
        for (int r = 0; r < kFours * 4; r += 4) {
            F<4> was = load<4>(most_ + row + r);
            F<4> top = larger<4>(largest_of<LANES>(tops[r], tops[r + 1], tops[r + 2], tops[r + 3]), was);
            // A row may have seen nothing yet, or only NaN. Its weights are then 0, or NaN.
            F<4> base = top == splat<4>(-kInfinity) ? F<4>{} : top;
            store<4>(bases + r, base);
            store<4>(before + r, two_to<4>(was - base));
            for (int i = 0; i < 4 && r + i < kRows; i++) most_[row + r + i] = top[i];
        }
        for (int r = 0; r < kFours * 4; r++) totals[r] = F<LANES>{};
        for (int r = 0; r < kRows; r++) {
            float* score = scores_ + r * kStride;
            F<LANES> base = splat<LANES>(bases[r]), total{};
            for (int t = from; t < to; t += LANES) {
                F<LANES> w = two_to<LANES>(load<LANES>(score + t) - base);
                store<LANES>(score + t, w);
                total += w;
            }
            totals[r] = total;
        }
        for (int r = 0; r < kFours * 4; r += 4) {
            F<4> total = sums<LANES>(totals[r], totals[r + 1], totals[r + 2], totals[r + 3]);
            for (int i = 0; i < 4 && r + i < kRows; i++)
                weight_[row + r + i] = weight_[row + r + i] * before[r + i] + total[i];
        }
    }

    // Adds biases to the scores of row r, hides what its query does not see, and returns the largest, lane by lane.
    INLINE_MEMBER F<LANES> hide(int r, int query, int block, int from, int to, int keys) {
        float* score = scores_ + r * kStride;
        int low_key = low(query) - block, high_key = std::min(keys, high(query) - block);
        const float* biases = a_.biases;
        if (biases) biases += head_ * a_.biases_stride + a_.farthest + block - query;
        F<LANES> top = splat<LANES>(-kInfinity);
        for (int t = from; t < to; t += LANES) {
            F<LANES> s = load<LANES>(score + t);
            bool edge = t < low_key || t + LANES > high_key;
            if (biases) s += load<LANES>(biases + t);
            if (edge) {
                I<LANES> place;
                for (int j = 0; j < LANES; j++) place[j] = t + j;
                s = (place >= low_key) & (place < high_key) ? s : splat<LANES>(-kInfinity);
            }
            if (biases || edge) store<LANES>(score + t, s);
            top = larger<LANES>(s, top);
        }
        return top;
    }

    // Adds to D vectors of the rows' sums the values of keys `from` to `to`, by their weights.
    template <int D> __attribute__((noinline)) void weigh(int row, int d, int from, int to, const float* before) {
        F<LANES> sums[kRows][D];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < D; v++) sums[r][v] = load<LANES>(sums_ + (row + r) * wide_ + d + v * LANES) * before[r];
        const float* value = values_ + from * wide_ + d;
        for (int t = from; t < to; t++, value += wide_) {
            F<LANES> k[D];
#pragma GCC unroll 4
            for (int v = 0; v < D; v++) k[v] = load<LANES>(value + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                F<LANES> w = splat<LANES>(scores_[r * kStride + t]);
#pragma GCC unroll 4
                for (int v = 0; v < D; v++) sums[r][v] += w * k[v];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < D; v++) store<LANES>(sums_ + (row + r) * wide_ + d + v * LANES, sums[r][v]);
    }

    const Unmasked& a_;
    int head_, dim_, wide_, begin_, length_, first_, count_;
    int64_t pitch_;
    float *keys_, *values_, *queries_, *scores_, *sums_, *most_, *weight_;
};

INLINE void attend(Pool& pool, const Unmasked& a) {
    struct Task {
        int32_t sequence, head, query;
    };
    std::vector<Task> tasks;
    // Backwards, because long sequences come last in a step and should be started first.
    for (int i = (int)a.sequences - 1; i >= 0; i--)
        for (int query = 0; query < a.starts[i + 1] - a.starts[i]; query += UnmaskedSpan::kSpan)
            for (int h = 0; h < (int)a.heads; h++) tasks.push_back({i, h, query});
    pool.run((int)tasks.size(), [&](int task, int thread) {
        const Task& t = tasks[task];
        float* memory = pool.own[thread].take(UnmaskedSpan::floats(a.head_dim));
        UnmaskedSpan(a, t.sequence, t.head, t.query, memory).run();
    });
}
