// Products of x, [rows, inputs], with weights of 4 or 8 bits. Rows are first rounded to 16 bits, with one scale for
// each block of inputs. So products are exact sums of integers, and this rounding is far finer than that of the
// weights. Each block is then scaled once. As in gemm.h, each output is summed in one order, whatever the other rows.
// All builds give the same bits.
//
// quantised_pairs.h or, on CPUs with AMX, quantised_amx.h multiplies the integers and says how weights are packed.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "gemm.h"
#include "rows.h"

// quantised.py repeats this structure. Each field has eight bytes.
struct Quantised {
    const void* values;
    const float* scales;   // [panel][group][column]
    const int16_t* zeros;  // [panel][group][column]; null: all are 8. Only for 4 bits
    int64_t bits, block;   // block: inputs that share a scale of the row; a multiple of 8 that divides a group
    const int64_t* order;  // [inputs]: the index in the row of each input; null: they are in order
    int64_t blocks, group;  // blocks of a row, the last of which may extend beyond the inputs; blocks of a group
};

typedef int16_t Halves __attribute__((vector_size(2 * LANES)));

constexpr int kMostBlock = 128;

struct Rounded {
    char* values;   // as put_numbers writes them
    float* scales;  // [rows, blocks]
    int32_t* sums;  // [rows, blocks], of the values
};

// The scales and zero points of a vector of columns of a panel, in one block.
struct BlockColumns {
    F<LANES> scale;
    I<LANES> zero;

    INLINE_MEMBER BlockColumns(const Quantised& q, int64_t panel, int64_t b, int j) {
        int64_t at = (panel * (q.blocks / q.group) + b / q.group) * kColumns + j * LANES;
        scale = load<LANES>(q.scales + at);
        zero = (q.bits == 4 ? 8 : 0) - I<LANES>{};
        if (!q.zeros) return;
        Halves narrow;
        memcpy(&narrow, q.zeros + at, sizeof narrow);
        zero = __builtin_convertvector(narrow, I<LANES>);
    }
    // Adds to `to` the sums of one row, whose scale and sum are number `which`.
    INLINE_MEMBER void add(I<LANES> sums, const Rounded& x, int64_t which, float* to) const {
        F<LANES> sum = __builtin_convertvector(sums - zero * x.sums[which], F<LANES>);
        store<LANES>(to, fused(sum, scale * x.scales[which], load<LANES>(to)));
    }
};

// Sets c, [part.rows, kColumns], to the bias.
INLINE void begin_panel(const Gemm& g, const Part& part, int64_t p, float* c, int64_t ldc) {
    int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
    for (int64_t i = 0; i < part.rows; i++) {
        memset(c + i * ldc, 0, kColumns * sizeof(float));
        if (g.bias) memcpy(c + i * ldc, g.bias + column, columns * sizeof(float));
    }
}

// Both have put_numbers, which stores LANES numbers of a row from input `at` on; QuantisedPanels, which computes whole
// panels of one part, like gemm.h's PanelProduct; and kStraightToRows: whether it may add up in the output itself.
#ifdef TILES
#include "quantised_amx.h"
#else
#include "quantised_pairs.h"
#endif

// Rounds one row, with zeros beyond its inputs. With 16 bits, 128 products with 8 bits are still far from overflow. A
// block with a NaN or infinity gets a scale of NaN.
INLINE void round_row(const float* x, int64_t inputs, const Quantised& q, const Rounded& to, int64_t row) {
    alignas(64) float last[kMostBlock];
    for (int64_t b = 0; b < q.blocks; b++) {
        const float* from = x + b * q.block;
        int64_t count = std::min(q.block, inputs - b * q.block);
        if (count < q.block) memset(last, 0, sizeof last);
        if (q.order) {
            for (int64_t k = 0; k < count; k++) last[k] = x[q.order[b * q.block + k]];
            from = last;
        } else if (count < q.block) {
            memcpy(last, from, count * sizeof(float));
            from = last;
        }
        F<LANES> most{}, odd{};
        for (int64_t k = 0; k < q.block; k += LANES) {
            F<LANES> value = load<LANES>(from + k);
            most = larger<LANES>(larger<LANES>(value, -value), most);
            odd += value * 0.0f;
        }
        float widest = largest<LANES>(most);
        float inverse = widest > 1e-30f ? 32767.0f / widest : 0.0f;
        const F<LANES> magic = splat<LANES>(12582912.0f);
        I<LANES> total{};
        for (int64_t k = 0; k < q.block; k += LANES) {
            // Adding and subtracting `magic` rounds to an integer, ties to even.
            F<LANES> rounded = fused(load<LANES>(from + k), splat<LANES>(inverse), magic) - magic;
            I<LANES> number = __builtin_convertvector(rounded, I<LANES>);
            total += number;
            put_numbers(q, to, row, b * q.block + k, number);
        }
        int32_t sum_of = 0;
        for (int i = 0; i < LANES; i++) sum_of += total[i];
        to.scales[row * q.blocks + b] = widest / 32767.0f + sum<LANES>(odd);
        to.sums[row * q.blocks + b] = sum_of;
    }
}

// The memory of rounded rows, in floats.
INLINE size_t rounded_floats(const Quantised& q, int64_t rows) {
    return ((rounded_bytes(q, rows) + 63) / 64 * 64 + rows * q.blocks * 8) / sizeof(float) + 1;
}

static Rounded round_into(Pool& pool, const Quantised& q, const float* x, int64_t rows, int64_t inputs, float* to) {
    size_t room = (rounded_bytes(q, rows) + 63) / 64 * 64;
    char* memory = (char*)to;
    Rounded r{memory, (float*)(memory + room), (int32_t*)(memory + room) + rows * q.blocks};
    each_row(pool, rows, inputs, [&](int64_t row) { round_row(x + row * inputs, inputs, q, r, row); });
    return r;
}

static Rounded rounded_rows(Pool& pool, const Quantised& q, const float* x, int64_t rows, int64_t inputs) {
    return round_into(pool, q, x, rows, inputs, pool.shared.take(rounded_floats(q, rows)));
}

// Computes one task of a product whose rows are rounded.
static void quantised_part(const Quantised& q, const Rounded& r, const Gemm& g, const Part& part) {
    QuantisedPanels product{q, r, g, part};
    for (int64_t p = part.begin; p < part.end; p++) {
        int64_t column = p * kColumns, columns = std::min<int64_t>(kColumns, g.outputs - column);
        float* to = g.out + part.first * g.outputs + column;
        if (kStraightToRows && columns == kColumns) {
            product(p, to, g.outputs);
            continue;
        }
        alignas(64) float edge[kTaskRows * kColumns];
        product(p, edge);
        for (int64_t i = 0; i < part.rows; i++)
            memcpy(to + i * g.outputs, edge + i * kColumns, columns * sizeof(float));
    }
}

static void quantised_product(Pool& pool, const Gemm& g) {
    const Quantised& q = *(const Quantised*)g.weight;
    Rounded r = rounded_rows(pool, q, g.x, g.rows, g.inputs);
    Cut cut(pool, g);
    pool.spread(cut.tasks(), [&](int task, int) { quantised_part(q, r, g, cut.part(g, task)); });
}
