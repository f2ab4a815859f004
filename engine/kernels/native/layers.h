// Runs all layers of a decoder in one call, from a table of their parts. The operations are the same as the ABI's
// single ones, in the same order, so that both ways give the same bits.
#pragma once

#include <chrono>

#include "attention.h"
#include "gemm.h"
#ifdef TILES
#include "attention_amx.h"
#endif
#include "quantised.h"
#include "rows.h"

// layers.py repeats these structures. Each field has eight bytes, so that nothing depends on padding.
struct Product {
    const void* weight;
    const float* bias;  // may be null
    int64_t inputs, outputs, kind;  // 0: fp32, 1: bf16, 2: `weight` is a Quantised
};

struct Layer {
    const float* input_norm;  // before attention
    Product qkv;
    const float *query_norm, *key_norm;  // for each head; null: none
    Product output;
    const float* attended_norm;  // for attention's output, before it is added; null: none
    const float* middle_norm;  // before the feed-forward block
    Product gate_up;
    int64_t gelu;
    Product down;
    const float* fed_norm;  // for the feed-forward block's output, before it is added; null: none
    int64_t heads, kv_heads, head_dim;
    double eps, scale, cap;  // cap 0: none
    int64_t group, place, rope;  // the KV group, the layer's index in its cache, the index of its rotation
};

// A step of one KV group.
struct Group {
    void* cache;  // [layers, 2, blocks, block, kv_heads, bytes of a stored head], or as paired.h says
    int64_t layer_bytes, half_bytes;  // the distance from one layer to the next, and from keys to values
    int64_t kind, block;
    const int64_t* slots;
    const int32_t *starts, *lengths, *leads, *tables, *table_rows;
    int64_t table_stride, sequences, window;
};

struct Turn {
    const float *cos, *sin;  // [tokens, turning]
    int64_t turning;
};

struct Step {
    float* residual;  // [tokens, width]: holds embeddings at first, and is overwritten
    float* out;  // [rows, width], normed
    const float* norm;  // after the last layer
    const Group* groups;
    const Turn* turns;
    const int64_t* wanted;  // [rows]: the tokens to return; the last layer computes only these after attention
    int64_t rows, tokens, width;
    int64_t* spent;  // [kClasses], nanoseconds are added; null: nothing is timed
};

// The kernel classes for a step's times. layers.py repeats them.
enum Class { kLinear, kNorm, kWrite, kAttention, kGate, kClasses };

// Adds the time of its own life to a class.
class Watch {
  public:
    Watch(const Step& s, Class which) : to_(s.spent ? s.spent + which : nullptr) {
        if (to_) began_ = Clock::now();
    }
    ~Watch() {
        if (to_) *to_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_).count();
    }

  private:
    using Clock = std::chrono::steady_clock;
    int64_t* to_;
    Clock::time_point began_;
};

template <class Call> INLINE void timed(const Step& s, Class which, Call&& call) {
    Watch watch(s, which);
    call();
}

INLINE void multiply(Pool& pool, const Product& p, const float* x, float* out, int64_t rows) {
    Gemm g{x, p.weight, p.bias, out, rows, p.inputs, p.outputs};
    if (p.kind == 2) quantised_product(pool, g);
    else if (p.kind) gemm<bf16>(pool, g);
    else gemm<float>(pool, g);
}

INLINE void norm(Pool& pool, const float* x, float* residual, const float* weight, float* out, int64_t rows,
                 int64_t width, float eps) {
    each_row(pool, rows, width, [&](int64_t row) {
        norm_row(x + row * width, residual ? residual + row * width : nullptr, weight, out + row * width, width, eps);
    });
}

INLINE void norm_heads(Pool& pool, float* heads, const float* query_weight, const float* key_weight, int64_t tokens,
                       int64_t all_heads, int64_t kv_heads, int64_t head_dim, float eps) {
    each_row(pool, tokens, all_heads * head_dim, [&](int64_t token) {
        for (int64_t h = 0; h < all_heads - kv_heads; h++) {
            float* head = heads + (token * all_heads + h) * head_dim;
            norm_row(head, nullptr, h < all_heads - 2 * kv_heads ? query_weight : key_weight, head, head_dim, eps);
        }
    });
}

INLINE void turn_and_write(Pool& pool, const Rotation& r, int64_t kind) {
#ifdef TILES
    if (kind == kPaired) return rotate_and_write<Paired>(pool, r);
#endif
    of_kind(kind, [&](auto stored) { rotate_and_write<decltype(stored)>(pool, r); });
}

INLINE void attend(Pool& pool, const Attention& a) {
#ifdef TILES
    if (a.kind == kPaired) return attend<PairedWalk>(pool, a);
#endif
    // A head size that is a multiple of 8 but not of a wider vector.
    if (a.head_dim % LANES) attend<Walk<8>>(pool, a);
    else attend<Walk<LANES>>(pool, a);
}

INLINE void activate(Pool& pool, const float* x, float* out, bool gelu, int64_t rows, int64_t width) {
    if (gelu) gate<true>(pool, x, out, rows, width);
    else gate<false>(pool, x, out, rows, width);
}

INLINE void step_norm(Pool& pool, const Step& s, const Layer& l, const float* x, float* residual, const float* weight,
                      float* out) {
    timed(s, kNorm, [&] { norm(pool, x, residual, weight, out, s.tokens, s.width, (float)l.eps); });
}

// The first part of a layer, up to and including attention.
static void attention_block(Pool& pool, const Layer& l, const Step& s, float* heads, float* attended) {
    const Group& g = s.groups[l.group];
    const Turn& turn = s.turns[l.rope];
    int64_t all = l.heads + 2 * l.kv_heads;
    char* keys = (char*)g.cache + l.place * g.layer_bytes;
    timed(s, kLinear, [&] { multiply(pool, l.qkv, s.out, heads, s.tokens); });
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

// The second part of a layer, up to the middle norm.
static void output_block(Pool& pool, const Layer& l, const Step& s, const float* attended, float* out) {
    timed(s, kLinear, [&] { multiply(pool, l.output, attended, out, s.tokens); });
    if (l.attended_norm) step_norm(pool, s, l, out, nullptr, l.attended_norm, out);
}

static void feed_forward_block(Pool& pool, const Layer& l, const Step& s, float* both, float* gated, float* out) {
    timed(s, kLinear, [&] { multiply(pool, l.gate_up, s.out, both, s.tokens); });
    timed(s, kGate, [&] { activate(pool, both, gated, l.gelu, s.tokens, l.down.inputs); });
    timed(s, kLinear, [&] { multiply(pool, l.down, gated, out, s.tokens); });
    if (l.fed_norm) step_norm(pool, s, l, out, nullptr, l.fed_norm, out);
}

// Copies the wanted rows of `from`, [tokens, width].
static void pick(const Step& s, const float* from, int64_t width, float* to) {
    for (int64_t i = 0; i < s.rows; i++) memcpy(to + i * width, from + s.wanted[i] * width, width * sizeof(float));
}

static void run_layers(Pool& pool, const Layer* layers, int64_t count, const Step& s) {
    int64_t wide = 0, narrow = 0;
    for (int64_t i = 0; i < count; i++) {
        wide = std::max({wide, layers[i].qkv.outputs, layers[i].gate_up.outputs});
        narrow = std::max({narrow, layers[i].output.inputs, layers[i].down.inputs});
    }
    float* memory = pool.step.take(s.tokens * (wide + narrow + 2 * s.width));
    float *a = memory, *b = a + s.tokens * wide, *given = b + s.tokens * narrow;
    Step now = s;
    now.out = given + s.tokens * s.width;
    step_norm(pool, now, layers[0], now.residual, nullptr, layers[0].input_norm, now.out);
    for (int64_t i = 0; i < count; i++) {
        const Layer& l = layers[i];
        float* attended = b;
        attention_block(pool, l, now, a, attended);
        if (i + 1 == count) {
            // Tokens that are not wanted are done once their keys and values are cached.
            pick(s, attended, l.output.inputs, a);
            pick(s, s.residual, s.width, now.out);
            attended = a;
            now.residual = now.out;
            now.out = s.out;
            now.tokens = s.rows;
        }
        output_block(pool, l, now, attended, given);
        step_norm(pool, now, l, given, now.residual, l.middle_norm, now.out);
        feed_forward_block(pool, l, now, a, b, given);
        const float* after = i + 1 < count ? layers[i + 1].input_norm : s.norm;
        step_norm(pool, now, l, given, now.residual, after, now.out);
    }
}
