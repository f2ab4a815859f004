// The operations of a layer: each is one call on the pool, and one of the C ABI.
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
    float* out;  // [rows, width], normed; null without `norm`
    const float* norm;  // after the last layer; null: other layers follow, elsewhere, and `residual` is what enters them
    const Group* groups;
    const Turn* turns;
    const int64_t* wanted;  // [rows]: the tokens to return; the last layer before `norm` computes only these after attention
    int64_t rows, tokens, width;
    int64_t* spent;  // [kClasses], nanoseconds are added; null: nothing is timed
    const struct Adapters *adapted, *adapted_wanted;  // those of the tokens, and of the wanted ones; null: none
};

// The kernel classes for a step's times. layers.py repeats them.
enum Class { kLinear, kNorm, kWrite, kAttention, kGate, kRoute, kAdapters, kClasses };

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

INLINE void layer_norm(Pool& pool, const float* x, float* residual, const float* weight, const float* bias, float* out,
                       int64_t rows, int64_t width, float eps) {
    each_row(pool, rows, width, [&](int64_t row) {
        layer_norm_row(x + row * width, residual ? residual + row * width : nullptr, weight, bias, out + row * width,
                       width, eps);
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

INLINE void gate(Pool& pool, const float* x, float* out, int64_t kind, int64_t rows, int64_t width) {
    activate<true>(pool, (int)kind, x, out, rows, width);
}
