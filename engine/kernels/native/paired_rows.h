// The products of attention_amx.h for a few rows, as decodes have them, in plain vectors: the bits of TDPBF16PS, read
// from the same panels. What TDPBF16PS adds at once is here two chains of fused multiply-adds, which start from 0: over
// the first numbers of the pairs, and over the second ones. The chains are added to each other, and then to the sum.
#pragma once

#include "paired_softmax.h"

INLINE F<LANES> first_of(U<LANES> pairs) { return (F<LANES>)(pairs << 16); }
INLINE F<LANES> second_of(U<LANES> pairs) { return (F<LANES>)(pairs & 0xffff0000u); }

// Two chains for each of R rows and two vectors.
template <int R> struct Chains {
    F<LANES> first[R][2] = {}, second[R][2] = {};

    INLINE_MEMBER void add_first(int row, F<LANES> x, const U<LANES> (&pairs)[2]) {
        for (int v = 0; v < 2; v++) first[row][v] = fused(x, first_of(pairs[v]), first[row][v]);
    }
    INLINE_MEMBER void add_second(int row, F<LANES> x, const U<LANES> (&pairs)[2]) {
        for (int v = 0; v < 2; v++) second[row][v] = fused(x, second_of(pairs[v]), second[row][v]);
    }
    INLINE_MEMBER void join(F<LANES> (&sums)[R][2]) const {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 2; v++) sums[r][v] += first[r][v] + second[r][v];
    }
};

// score [R, kStep] = query [R, dim] times keys, two panels at a time. `ahead`: the panels to prefetch meanwhile.
template <int R>
static __attribute__((noinline)) void few_scores(const float* query, const bf16* keys, const StepPanels& here,
                                                 const StepPanels& ahead, int dim, float* score) {
    for (int g = 0; g < here.end; g += 2) {
        const bf16 *panel[2] = {keys + here.at[g], keys + here.at[g + 1]};
        const bf16 *next[2] = {keys + ahead.at[g], keys + ahead.at[g + 1]};
        F<LANES> sums[R][2] = {};
        for (int i = 0; i < dim; i += kStepInputs) {
            Chains<R> chains;
#pragma GCC unroll 2
            for (int k = i; k < i + kStepInputs; k += 2) {
                U<LANES> pairs[2];
                for (int v = 0; v < 2; v++) {
                    __builtin_prefetch(next[v] + k * kPanelPlaces);
                    pairs[v] = load_words<LANES>(panel[v] + k * kPanelPlaces);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    chains.add_first(r, splat<LANES>(query[r * dim + k]), pairs);
                    chains.add_second(r, splat<LANES>(query[r * dim + k + 1]), pairs);
                }
            }
            chains.join(sums);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 2; v++) store<LANES>(score + r * kStep + (g + v) * kPanelPlaces, sums[r][v]);
    }
}

// sum [R, dim] += weight [R, kStep] times values. Places that no row sees are not read: they may hold anything.
template <int R>
static __attribute__((noinline)) void few_sums(const float* weight, const bf16* values, const StepPanels& here,
                                               const StepPanels& ahead, int dim, float* sum) {
    for (int d = 0; d < dim; d += 2 * LANES) {
        F<LANES> sums[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 2; v++) sums[r][v] = load<LANES>(sum + r * dim + d + v * LANES);
        for (int g = here.first; g < here.end; g++) {
            const bf16 *at = values + here.at[g] + 2 * d, *next = values + ahead.at[g] + 2 * d;
            const float* factor = weight + g * kPanelPlaces;
            int places = std::min(kPanelPlaces, here.places - g * kPanelPlaces);
            Chains<R> chains;
#pragma GCC unroll 2
            for (int t = 0; t < places; t += 2, at += 2 * dim, next += 2 * dim) {
                U<LANES> pairs[2];
                for (int v = 0; v < 2; v++) {
                    __builtin_prefetch(next + v * 2 * LANES);
                    pairs[v] = load_words<LANES>(at + v * 2 * LANES);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) chains.add_first(r, splat<LANES>(factor[r * kStep + t]), pairs);
                if (t + 1 == places) break;
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) chains.add_second(r, splat<LANES>(factor[r * kStep + t + 1]), pairs);
            }
            chains.join(sums);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 2; v++) store<LANES>(sum + r * dim + d + v * LANES, sums[r][v]);
    }
}

// Calls call(number of rows, first row), for all rows.
template <class Call> INLINE void each_few(int rows, Call&& call) {
    for (int r = 0; r < rows; r += 4) {
        if (rows - r >= 4) call(std::integral_constant<int, 4>{}, r);
        else if (rows - r == 3) call(std::integral_constant<int, 3>{}, r);
        else if (rows - r == 2) call(std::integral_constant<int, 2>{}, r);
        else call(std::integral_constant<int, 1>{}, r);
    }
}
