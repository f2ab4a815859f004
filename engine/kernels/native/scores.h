// Attention within a tile, some rows at a time: scores with its keys, and sums of its values. Meanwhile it prefetches
// the next tile.
#pragma once

#include <type_traits>

#include "stored.h"
#include "vectors.h"

// The places of a tile.
constexpr int kTile = 32;

// Prefetches `bytes` bytes from `at` on.
INLINE void ask(const char* at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// The prefetches of the next tile, place by place. `from` is null if there is no next tile.
struct Asked {
    const char* from = nullptr;
    const int64_t* at = nullptr;
    int bytes = 0;
    INLINE_MEMBER void ask(int t) const {
        if (from) ::ask(from + at[t], bytes);
    }
    // The same for a number of bytes known at compile time.
    template <int BYTES> INLINE_MEMBER void ask(int t) const {
        if (!from) return;
#pragma GCC unroll 4
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from + at[t] + i);
    }
    Asked part(int begin, int size) const { return {from + begin, at, size}; }
};

// Adds to `s`, lane by lane, the products of each of R query rows and four keys.
template <int W, int R, class T>
INLINE void add_four(const float* const* query, const T* const* key, int dim, F<W> (&s)[R][4]) {
#pragma GCC unroll 4
    for (int i = 0; i < dim; i += W) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            F<W> wide = load<W>(key[j] + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) s[r][j] += load<W>(query[r] + i) * wide;
        }
    }
}

// score[r * kTile + t] = query row r . key t, for R rows and all `places`, rounded up to four.
template <int W, int R, class T>
INLINE void dots(const float* const* query, const char* keys, const int64_t* at, int places, int dim, float* score,
                 Asked next) {
    for (int t = 0; t < places; t += 4) {
        for (int j = 0; j < 4; j++) next.ask(t + j);
        F<W> s[R][4] = {};
        const T* key[4];
        for (int j = 0; j < 4; j++) key[j] = (const T*)(keys + at[t + j]);
        add_four<W, R, T>(query, key, dim, s);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store<4>(score + r * kTile + t, sums<W>(s[r][0], s[r][1], s[r][2], s[r][3]));
    }
}

// The same for vectors of 16, in the same order: the sums of 16 keys end in one vector. `places` are rounded up to
// eight. DIM: the head size if it is a usual one, else 0. Without it, compilers spend more on addresses than on
// products.
template <int R, class T, int DIM>
INLINE void dots_by_16(const float* const* query, const char* keys, const int64_t* at, int places, int dim, float* score,
                       Asked next) {
    if (DIM) dim = DIM;
    for (int t = 0; t < places; t += 16) {
        SumsOf16 sums[R] = {};
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            if (t + SumsOf16::first(g) >= places) continue;
            F<16> s[R][4] = {};
            const T* key[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                if constexpr (DIM) next.template ask<Stored<T>::bytes(DIM)>(t + SumsOf16::key(g, j));
                else next.ask(t + SumsOf16::key(g, j));
                key[j] = (const T*)(keys + at[t + SumsOf16::key(g, j)]);
            }
            add_four<16, R, T>(query, key, dim, s);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r].take(g, s[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store<16>(score + r * kTile + t, sums[r].all());
    }
}

// Whether widened keys are transposed. That pays if sums within vectors cost more than products.
template <int W> constexpr bool kAcross = W == 16;

// The same for transposed keys (`keys`: [dim, kTile]). A vector holds one dimension of several keys, so that no sums
// within vectors are needed. The order of summation is the same, that of `sums`.
template <int W, int V, int R, int DIM>
INLINE void dots_of(const float* const* query, const float* keys, int dim, float* score) {
    if (DIM) dim = DIM;
    typedef F<W> Part[R][V];
    auto add = [](Part& to, const Part& from) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) to[r][v] += from[r][v];
    };
    // The sum that lanes `lane` and `lane` + 8 would have.
    auto lanes = [&](int lane, Part& lower) __attribute__((always_inline)) {
        Part upper = {};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) lower[r][v] = F<W>{};
        for (int i = lane; i < dim; i += W) {
            const float* at = keys + i * kTile;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                F<W> a = splat<W>(query[r][i]), b = splat<W>(query[r][i + 8]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    lower[r][v] += a * load<W>(at + v * W);
                    upper[r][v] += b * load<W>(at + 8 * kTile + v * W);
                }
            }
        }
        add(lower, upper);
    };
    auto four = [&](int lane, Part& s) __attribute__((always_inline)) {
        Part t, u;
        lanes(lane, s);
        lanes(lane + 2, t);
        add(s, t);
        lanes(lane + 1, t);
        lanes(lane + 3, u);
        add(t, u);
        add(s, t);
    };
    Part s, t;
    four(0, s);
    four(4, t);
    add(s, t);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store<W>(score + r * kTile + v * W, s[r][v]);
}

template <int W, int R, int DIM>
INLINE void dots_across(const float* const* query, const float* keys, int places, int dim, float* score) {
    if (places > W) dots_of<W, kTile / W, R, DIM>(query, keys, dim, score);
    else dots_of<W, 1, R, DIM>(query, keys, dim, score);
}

// Calls call(head size) with a compile-time constant: the size if it is a usual one, else 0.
template <int W, class Call> INLINE void of_size(int dim, Call&& call) {
    if (W == 16 && dim == 64) call(std::integral_constant<int, 64>{});
    else if (W == 16 && dim == 128) call(std::integral_constant<int, 128>{});
    else call(std::integral_constant<int, 0>{});
}

// sum[r * dim ..] = sum[r * dim ..] * before[r] + the sum of weight[r * kTile + t] * value t, for R rows and V vectors
// each.
template <int W, int R, int V, class T>
INLINE void weigh(const float* weight, const float* before, const char* values, const int64_t* at, int places, int dim,
                  int from, float* sum, Asked next) {
    F<W> s[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) s[r][v] = load<W>(sum + r * dim + from + v * W) * before[r];
    }
#pragma GCC unroll 2
    for (int t = 0; t < places; t++) {
        next.ask(t);
        const T* value = (const T*)(values + at[t]) + from;
        F<W> w[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) w[r] = splat<W>(weight[r * kTile + t]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            F<W> wide = load<W>(value + v * W);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) s[r][v] += w[r] * wide;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store<W>(sum + r * dim + from + v * W, s[r][v]);
    }
}
