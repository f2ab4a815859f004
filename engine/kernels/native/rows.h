// Operations on each row by itself: norms, rotation with the cache writes, gates. All in fp32.
#pragma once

#include <algorithm>
#include <cmath>

#include "pool.h"
#include "stored.h"
#include "vectors.h"

// The most numbers that one thread processes alone. For fewer, waking other threads takes longer.
constexpr int64_t kAlone = 16384;

template <class Call> INLINE void each_row(Pool& pool, int64_t rows, int64_t width, Call&& call) {
    int64_t tasks = std::min<int64_t>({rows, rows * width / kAlone + 1, 4 * (int64_t)pool.threads()});
    pool.spread((int)tasks, [&](int task, int) {
        for (int64_t row = rows * task / tasks; row < rows * (task + 1) / tasks; row++) call(row);
    });
}

// Writes x / sqrt(mean(x^2) + eps) * weight to `out`, which may be x; NaN, not 0, if the mean overflows. With `residual`,
// x is first added to it, and the sum is normed.
INLINE void norm_row(const float* x, float* residual, const float* weight, float* out, int64_t width, float eps) {
    F<LANES> squares{};
    float rest = 0;
    int64_t i = 0;
    const float* from = residual ? residual : x;
    for (; i + LANES <= width; i += LANES) {
        F<LANES> value = load<LANES>(x + i);
        if (residual) {
            value += load<LANES>(residual + i);
            store<LANES>(residual + i, value);
        }
        squares += value * value;
    }
    for (; i < width; i++) {
        float value = x[i];
        if (residual) residual[i] = value += residual[i];
        rest += value * value;
    }
    float square = (sum<LANES>(squares) + rest) / (float)width + eps;
    float factor = (1.0f + (square - square)) / std::sqrt(square);
    for (i = 0; i + LANES <= width; i += LANES)
        store<LANES>(out + i, load<LANES>(from + i) * factor * load<LANES>(weight + i));
    for (; i < width; i++) out[i] = from[i] * factor * weight[i];
}

// out[i] = x[i] * cos[i] + x[i +- half] * sin[i] in place; the first half of `sin` carries the minus.
INLINE void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        F<LANES> a = load<LANES>(x + i), b = load<LANES>(x + half + i);
        store<LANES>(x + i, a * load<LANES>(cos + i) + b * load<LANES>(sin + i));
        store<LANES>(x + half + i, b * load<LANES>(cos + half + i) + a * load<LANES>(sin + half + i));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] + b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

struct Rotation {
    float* heads;  // [tokens, heads + 2 * kv_heads, head_dim]
    const float *cos, *sin;  // [tokens, turning]
    void *keys, *values;  // [slots, kv_heads, bytes of a stored head], or as paired.h says
    const int64_t* slots;  // [tokens]; -1: not written
    int64_t tokens, all_heads, kv_heads, head_dim, turning;
};

// Writes a token's key and value of one KV head.
template <class T>
INLINE void write_head(const Rotation& r, int64_t slot, int64_t head, const float* key, const float* value) {
    int64_t to = (slot * r.kv_heads + head) * Stored<T>::bytes(r.head_dim);
    Stored<T>::write((char*)r.keys + to, key, r.head_dim);
    Stored<T>::write((char*)r.values + to, value, r.head_dim);
}

template <class T> static void rotate_and_write(Pool& pool, const Rotation& r) {
    int64_t width = r.all_heads * r.head_dim;
    each_row(pool, r.tokens, width, [&](int64_t token) {
        float* heads = r.heads + token * width;
        const float *cos = r.cos + token * r.turning, *sin = r.sin + token * r.turning;
        for (int64_t h = 0; h < r.all_heads - r.kv_heads; h++) rotate(heads + h * r.head_dim, cos, sin, r.turning / 2);
        if (r.slots[token] < 0) return;
        for (int64_t h = 0; h < r.kv_heads; h++) {
            const float* key = heads + width - (2 * r.kv_heads - h) * r.head_dim;
            write_head<T>(r, r.slots[token], h, key, key + r.kv_heads * r.head_dim);
        }
    });
}

// Writes (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias to `out`, which may be x (arXiv 1607.06450). `bias`
// may be null. NaN if the mean overflows, as torch's. With `residual`, x is first added to it, and the sum is normed.
INLINE void layer_norm_row(const float* x, float* residual, const float* weight, const float* bias, float* out,
                           int64_t width, float eps) {
    F<LANES> some{};
    float rest = 0;
    int64_t i = 0;
    const float* from = residual ? residual : x;
    for (; i + LANES <= width; i += LANES) {
        F<LANES> value = load<LANES>(x + i);
        if (residual) {
            value += load<LANES>(residual + i);
            store<LANES>(residual + i, value);
        }
        some += value;
    }
    for (; i < width; i++) {
        float value = x[i];
        if (residual) residual[i] = value += residual[i];
        rest += value;
    }
    float mean = (sum<LANES>(some) + rest) / (float)width;
    some = F<LANES>{};
    rest = 0;
    for (i = 0; i + LANES <= width; i += LANES) {
        F<LANES> value = load<LANES>(from + i) - mean;
        some += value * value;
    }
    for (; i < width; i++) rest += (from[i] - mean) * (from[i] - mean);
    float square = (sum<LANES>(some) + rest) / (float)width + eps;
    float factor = (1.0f + (square - square)) / std::sqrt(square);
    for (i = 0; i + LANES <= width; i += LANES) {
        F<LANES> value = (load<LANES>(from + i) - mean) * factor * load<LANES>(weight + i);
        store<LANES>(out + i, bias ? value + load<LANES>(bias + i) : value);
    }
    for (; i < width; i++) out[i] = (from[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

// The error function within 3e-7 (the rational polynomial of Eigen's float erf). NaN stays NaN.
template <int W> INLINE F<W> error_function(F<W> x) {
    F<W> y = larger<W>(splat<W>(-4.0f), x);
    y = y > splat<W>(4.0f) ? splat<W>(4.0f) : y;
    F<W> s = y * y;
    F<W> p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    F<W> q = s * -1.45660718464996e-05f - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return y * p / q;
}

// kernels.py repeats these numbers.
enum Activation { kSilu, kGeluTanh, kGelu, kRelu };

template <int W, int KIND> INLINE F<W> activated(F<W> x) {
    if constexpr (KIND == kRelu) return larger<W>(F<W>{}, x);
    if constexpr (KIND == kGelu) return 0.5f * x * (1.0f + error_function<W>(x * 0.70710678f));
    F<W> inner = x;
    // 0.5 (1 + tanh u) = 1 / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
    if constexpr (KIND == kGeluTanh) inner = x * 1.5957691216f * (1.0f + 0.044715f * x * x);
    return x / (1.0f + exponential<W>(-inner));
}

// The activation of each row, [width]. GATED: of the first half of a row, [2 * width], times the second.
template <int KIND, bool GATED>
static void activate_rows(Pool& pool, const float* x, float* out, int64_t rows, int64_t width) {
    each_row(pool, rows, 4 * width, [&](int64_t row) {
        const float *from = x + row * (GATED ? 2 : 1) * width, *ups = from + width;
        float* to = out + row * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            F<LANES> value = activated<LANES, KIND>(load<LANES>(from + i));
            store<LANES>(to + i, GATED ? value * load<LANES>(ups + i) : value);
        }
        if (i == width) return;
        // The last few numbers are padded to a vector like all others, so that all go through the same code.
        float tail[3][LANES] = {};
        std::copy(from + i, from + width, tail[0]);
        if (GATED) std::copy(ups + i, ups + width, tail[1]);
        F<LANES> value = activated<LANES, KIND>(load<LANES>(tail[0]));
        store<LANES>(tail[2], GATED ? value * load<LANES>(tail[1]) : value);
        std::copy(tail[2], tail[2] + width - i, to + i);
    });
}

template <bool GATED>
static void activate(Pool& pool, int kind, const float* x, float* out, int64_t rows, int64_t width) {
    if (kind == kSilu) activate_rows<kSilu, GATED>(pool, x, out, rows, width);
    else if (kind == kGeluTanh) activate_rows<kGeluTanh, GATED>(pool, x, out, rows, width);
    else if (kind == kGelu) activate_rows<kGelu, GATED>(pool, x, out, rows, width);
    else activate_rows<kRelu, GATED>(pool, x, out, rows, width);
}
