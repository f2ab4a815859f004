// Finds the tokens of a row that Gumbel noise can make the largest: nearly always one, even of a vocabulary of 100,000.
//
// The noise is that of sampling/draws.py: the hash is equal to the bit, the logarithms within 2e-5. The results are all
// tokens whose sum is within kMargin of the largest. The caller computes these exactly and chooses among them.
#pragma once

#include <cmath>

#include "pool.h"
#include "vectors.h"

constexpr float kMargin = 1e-3f;
// An additional margin relative to the largest sum, because large sums are rounded coarsely.
constexpr float kRelativeMargin = 1e-6f;

INLINE U<LANES> fold(U<LANES> x, int shift) { return x ^ (x >> shift); }

// The same as `bits` in sampling/draws.py.
INLINE U<LANES> noise_bits(U<LANES> tokens, uint32_t first, uint32_t second) {
    U<LANES> x = (tokens * 0x9e3779b1u) ^ first;
    x = fold(x, 16) * 0x7feb352du;
    x = (fold(x, 15) + second) * 0x846ca68bu;
    x = fold(x, 16) * 0x7feb352du;
    return fold(x, 15);
}

// The same as `gumbel` in sampling/draws.py.
INLINE F<LANES> noise(U<LANES> bits) {
    F<LANES> u = __builtin_convertvector((I<LANES>)(bits & 0x7fffffffu), F<LANES>);
    u = (u + 0.5f) * (float)(0x1p-31 * (1 - 0x1p-23));
    // -log(1 - u), by its series if 1 - u would round u away.
    F<LANES> series = u * (1.0f + u * (0.5f + u * (1.0f / 3 + u * (0.25f + u * 0.2f))));
    F<LANES> by_log = 0.0f - logarithm<LANES>(1.0f - u);
    return 0.0f - logarithm<LANES>(u < 0.015625f ? series : by_log);
}

// For each row of `scaled`, [rows, tokens], writes its candidates to `found`, [rows, most], and their count to
// `counts`, [rows]. Numbers below `floors`, [rows] or null, are left out. A row with more than `most` candidates has
// count -1. A row without any comparable number has token 0.
static void candidates(Pool& pool, const float* scaled, const float* floors, const uint32_t* keys, int64_t rows,
                       int64_t tokens, int64_t most, int64_t* found, int64_t* counts) {
    pool.run((int)rows, [&](int row, int thread) {
        const float* x = scaled + row * tokens;
        float floor = floors ? floors[row] : -INFINITY;
        int64_t whole = (tokens + LANES - 1) / LANES;
        float* sums = pool.own[thread].take(whole * LANES);
        U<LANES> token;
        for (int i = 0; i < LANES; i++) token[i] = i;
        F<LANES> top = splat<LANES>(-INFINITY);
        for (int64_t i = 0; i < whole; i++, token += LANES) {
            F<LANES> value = splat<LANES>(-INFINITY);
            if ((i + 1) * LANES <= tokens) value = load<LANES>(x + i * LANES);
            else memcpy(&value, x + i * LANES, (tokens - i * LANES) * sizeof(float));
            F<LANES> sum = value + noise(noise_bits(token, keys[2 * row], keys[2 * row + 1]));
            sum = value >= floor ? sum : splat<LANES>(-INFINITY);
            store<LANES>(sums + i * LANES, sum);
            top = larger<LANES>(sum, top);
        }
        float best = largest<LANES>(top), least = best - kMargin - kRelativeMargin * std::fabs(best);
        int64_t* to = found + row * most;
        int64_t count = 0;
        for (int64_t i = 0; i < whole; i++) {
            I<LANES> near = load<LANES>(sums + i * LANES) >= least;
            if (!any<LANES>(near)) continue;
            for (int64_t t = i * LANES; t < std::min((i + 1) * LANES, tokens); t++) {
                if (!(sums[t] >= least) || !(sums[t] > -INFINITY)) continue;
                if (count < most) to[count] = t;
                count++;
            }
        }
        if (count == 0) to[count++] = 0;
        counts[row] = count > most ? -1 : count;
    });
}
