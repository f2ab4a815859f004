// Runs all layers of a decoder in one call, from a table of their parts. The operations are the same as the ABI's
// single ones, in the same order, so that both ways give the same bits.
#pragma once

#include "adapters.h"
#include "experts.h"
#include "operations.h"
#include "ranks.h"

// layers.py repeats this structure. Each field has eight bytes, so that nothing depends on padding.
struct Layer {
    const float* input_norm;  // before attention
    Product qkv;
    const float *query_norm, *key_norm;  // for each head; null: none
    Product output;
    const float* attended_norm;  // for attention's output, before it is added; null: none
    const float* middle_norm;  // before the feed-forward block
    Product gate_up;  // of a layer without experts, as `down`
    int64_t gelu;
    Product down;
    const float* fed_norm;  // for the feed-forward block's output, before it is added; null: none
    int64_t heads, kv_heads, head_dim;
    double eps, scale, cap;  // cap 0: none
    Product router;
    Mixture mixture;  // `experts` null: none
    int64_t group, place, rope;  // the KV group, the layer's index in its cache, the index of its rotation
};

// The product `which` of layer `i`, with the changes of the step's adapters.
INLINE void step_multiply(Pool& pool, const Step& s, const Product& p, int64_t i, Adapted which, const float* x,
                          float* out) {
    timed(s, kLinear, [&] { multiply(pool, p, x, out, s.tokens); });
    if (!s.adapted) return;
    timed(s, kAdapters, [&] {
        add_adapters(pool, *s.adapted, i * kAdaptedProducts + which, {x, p.inputs, out, p.outputs});
    });
}

INLINE void step_norm(Pool& pool, const Step& s, const Layer& l, const float* x, float* residual, const float* weight,
                      float* out) {
    timed(s, kNorm, [&] { norm(pool, x, residual, weight, out, s.tokens, s.width, (float)l.eps); });
}

// The first part of a layer, up to and including attention.
static void attention_block(Pool& pool, const Layer& l, int64_t i, const Step& s, float* heads, float* attended) {
    const Group& g = s.groups[l.group];
    const Turn& turn = s.turns[l.rope];
    int64_t all = l.heads + 2 * l.kv_heads;
    char* keys = (char*)g.cache + l.place * g.layer_bytes;
    step_multiply(pool, s, l.qkv, i, kQkv, s.out, heads);
    timed(s, kNorm, [&] {
        if (l.query_norm)
            norm_heads(pool, heads, l.query_norm, l.key_norm, s.tokens, all, l.kv_heads, l.head_dim, (float)l.eps);
    });
    timed(s, kWrite, [&] {
        turn_and_write(pool, {heads, turn.cos, turn.sin, keys, keys + g.half_bytes, g.slots, s.tokens, all, l.kv_heads,
                              l.head_dim, turn.turning}, g.kind);
    });
    timed(s, kAttention, [&] {
        attend(pool, {heads, all * l.head_dim, keys, keys + g.half_bytes, g.starts, g.lengths, g.leads, g.tables,
                      g.table_stride, g.table_rows, g.sequences, l.heads, l.kv_heads, l.head_dim, g.block, g.kind,
                      g.window, (float)l.scale, (float)l.cap, attended});
        int64_t own = g.starts[g.sequences], row = l.heads * l.head_dim;
        std::fill(attended + own * row, attended + s.tokens * row, 0.0f);
    });
}

// Adds up a block's output over the ranks, each of which has computed its share of the sum; null: there is one rank.
INLINE void step_sum(Pool& pool, const Step& s, Exchange* ranks, float* out) {
    if (ranks) timed(s, kLinear, [&] { ranks->sum(pool, out, s.tokens * s.width); });
}

// The second part of a layer, up to the middle norm.
static void output_block(Pool& pool, const Layer& l, int64_t i, const Step& s, Exchange* ranks, const float* attended,
                         float* out) {
    step_multiply(pool, s, l.output, i, kOutput, attended, out);
    step_sum(pool, s, ranks, out);
    if (l.attended_norm) step_norm(pool, s, l, out, nullptr, l.attended_norm, out);
}

static void feed_forward_block(Pool& pool, const Layer& l, int64_t i, const Step& s, Exchange* ranks, float* both,
                               float* gated, float* out) {
    if (l.mixture.experts) {
        step_multiply(pool, s, l.router, i, kRouter, s.out, both);
        ExpertAdapters adapters{s.adapted, s.adapted ? s.adapted->first_experts[i] : 0};
        run_experts(pool, s, l.mixture, s.out, both, s.tokens, out, gated, adapters);
        step_sum(pool, s, ranks, out);
        if (l.fed_norm) step_norm(pool, s, l, out, nullptr, l.fed_norm, out);
        return;
    }
    step_multiply(pool, s, l.gate_up, i, kGateUp, s.out, both);
    timed(s, kGate, [&] { gate(pool, both, gated, l.gelu, s.tokens, l.down.inputs); });
    step_multiply(pool, s, l.down, i, kDown, gated, out);
    step_sum(pool, s, ranks, out);
    if (l.fed_norm) step_norm(pool, s, l, out, nullptr, l.fed_norm, out);
}

// Adds the last block's output to the residual, where no norm follows.
static void add_output(Pool& pool, const Step& s, const float* x) {
    timed(s, kNorm, [&] {
        each_row(pool, s.tokens, s.width, [&](int64_t row) {
            for (int64_t i = row * s.width; i < (row + 1) * s.width; i++) s.residual[i] += x[i];
        });
    });
}

// Copies the wanted rows of `from`, [tokens, width].
static void pick(const Step& s, const float* from, int64_t width, float* to) {
    for (int64_t i = 0; i < s.rows; i++) memcpy(to + i * width, from + s.wanted[i] * width, width * sizeof(float));
}

// `ranks`: null if this process computes alone.
static void run_layers(Pool& pool, const Layer* layers, int64_t count, const Step& s, Exchange* ranks) {
    int64_t wide = 0, narrow = 0;
    for (int64_t i = 0; i < count; i++) {
        const Layer& l = layers[i];
        wide = std::max({wide, l.qkv.outputs, l.gate_up.outputs, l.router.outputs});
        narrow = std::max({narrow, l.output.inputs, l.down.inputs});
        if (l.mixture.experts) narrow = std::max(narrow, experts_floats(l.mixture, 1));
    }
    float* memory = pool.step.take(s.tokens * (wide + narrow + 2 * s.width));
    float *a = memory, *b = a + s.tokens * wide, *given = b + s.tokens * narrow;
    Step now = s;
    now.out = given + s.tokens * s.width;
    step_norm(pool, now, layers[0], now.residual, nullptr, layers[0].input_norm, now.out);
    for (int64_t i = 0; i < count; i++) {
        const Layer& l = layers[i];
        float* attended = b;
        attention_block(pool, l, i, now, a, attended);
        if (i + 1 == count && s.norm) {
            // Tokens that are not wanted are done once their keys and values are cached.
            pick(s, attended, l.output.inputs, a);
            pick(s, s.residual, s.width, now.out);
            attended = a;
            now.residual = now.out;
            now.out = s.out;
            now.tokens = s.rows;
            now.adapted = s.adapted_wanted;
        }
        output_block(pool, l, i, now, ranks, attended, given);
        step_norm(pool, now, l, given, now.residual, l.middle_norm, now.out);
        feed_forward_block(pool, l, i, now, ranks, a, b, given);
        const float* after = i + 1 < count ? layers[i + 1].input_norm : s.norm;
        if (after) step_norm(pool, now, l, given, now.residual, after, now.out);
        else add_output(pool, now, given);
    }
}
