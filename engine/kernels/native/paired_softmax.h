// The running softmax over a step of a paired cache, for attention_amx.h. Rows that came by tiles and by plain vectors
// go through the same compiled code, so that a row's bits are the same.
#pragma once

#include "gemm.h"
#include "paired.h"

// Rows of one piece: scores of a step, and what is kept of the steps before.
struct StepRows {
    int rows;
    float* score;  // [rows, kStep]: scores, and then weights, rounded to bf16
    bf16* weight;  // [rows, kStep]: the same weights
    float *most, *total, *sum;  // as in State, from the first row on
};

// What the rows see: row r the places from begin(r) to end(r). Places are counted from the step's first one.
struct Sight {
    int first_row, share, place, window;  // `place`: that of the piece's first query
    int end(int row) const { return place + (first_row + row) / share + 1; }
    int begin(int row) const { return window ? end(row) - window : 0; }
    bool whole(int rows) const { return end(0) >= kStep && begin(rows - 1) <= 0; }
    bool none(int rows) const { return end(rows - 1) <= 0 || begin(0) >= kStep; }
};

// Caps scores, and replaces those of places that a row does not see.
static __attribute__((noinline)) void hide(const StepRows& s, const Sight& sight, float scale, float cap) {
    I<LANES> lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int r = 0; r < s.rows; r++) {
        int begin = sight.begin(r), end = sight.end(r);
        for (int t = 0; t < kStep; t += LANES) {
            float* at = s.score + r * kStep + t;
            F<LANES> x = load<LANES>(at);
            // cap * tanh(scale * x / cap)
            if (cap != 0) x = cap - 2.0f * cap / (exponential<LANES>(x * (2.0f * scale / cap)) + 1.0f);
            I<LANES> place = lane + t;
            store<LANES>(at, (place >= begin) & (place < end) ? x : splat<LANES>(kNothing));
        }
    }
}

// Turns the scores of a row into weights relative to `base`. Returns their sums by lane.
INLINE F<LANES> weights_of(float* score, bf16* weight, float unit, float base) {
    F<LANES> total{};
    for (int t = 0; t < kStep; t += LANES)
        store<LANES>(score + t, two_to<LANES>(load<LANES>(score + t) * unit - splat<LANES>(base)));
    for (int t = 0; t < kStep; t += 2 * LANES) round_inputs(score + t, weight + t);
    for (int t = 0; t < kStep; t += LANES) {
        F<LANES> rounded = load<LANES>(weight + t);
        store<LANES>(score + t, rounded);
        total += rounded;
    }
    return total;
}

// Scores times `unit` are powers of two. What is kept of former steps is made relative to the new largest score.
static __attribute__((noinline)) void soften(const StepRows& s, float unit, int dim) {
    for (int r = 0; r < s.rows; r += 4) {
        F<LANES> tops[4], totals[4];
        F<4> was;
        int count = std::min(4, s.rows - r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int row = r + (i < count ? i : 0);
            const float* at = s.score + row * kStep;
            tops[i] = load<LANES>(at);
            for (int t = LANES; t < kStep; t += LANES) tops[i] = larger<LANES>(load<LANES>(at + t), tops[i]);
            was[i] = s.most[row];
        }
        F<4> top = largest_of<LANES>(tops[0], tops[1], tops[2], tops[3]) * unit;
        top = larger<4>(top, was);
        // A row may have seen nothing yet, or only NaN. Its weights are then 0, or NaN.
        F<4> base = top == kNothing ? F<4>{} : top, before = two_to<4>(was - base);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            totals[i] = F<LANES>{};
            if (i < count) totals[i] = weights_of(s.score + (r + i) * kStep, s.weight + (r + i) * kStep, unit, base[i]);
        }
        F<4> total = sums<LANES>(totals[0], totals[1], totals[2], totals[3]);
        for (int i = 0; i < count; i++) {
            s.most[r + i] = top[i];
            s.total[r + i] = s.total[r + i] * before[i] + total[i];
            float* sum = s.sum + (r + i) * dim;
            if (before[i] != 1.0f)
                for (int d = 0; d < dim; d += LANES) store<LANES>(sum + d, load<LANES>(sum + d) * before[i]);
        }
    }
}

// Adds a later chunk's state of `rows` rows, a multiple of 8.
static __attribute__((noinline)) void merge_paired(const State& all, const State& part, int rows, int dim) {
    for (int r = 0; r < rows; r += 8) {
        F<8> was = load<8>(all.most + r), most = load<8>(part.most + r), top = larger<8>(most, was);
        // A row may have seen nothing yet.
        F<8> base = top == kNothing ? F<8>{} : top, before = two_to<8>(was - base), now = two_to<8>(most - base);
        store<8>(all.most + r, top);
        store<8>(all.weight + r, load<8>(all.weight + r) * before + load<8>(part.weight + r) * now);
        for (int i = 0; i < 8; i++) {
            if (part.weight[r + i] == 0) continue;
            float *to = all.sum + (r + i) * dim, *from = part.sum + (r + i) * dim;
            for (int d = 0; d < dim; d += LANES)
                store<LANES>(to + d, load<LANES>(to + d) * before[i] + load<LANES>(from + d) * now[i]);
        }
    }
}
