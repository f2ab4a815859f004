// Products of x, [rows, inputs], with weights of 4, 5, 6 or 8 bits. Rows are first rounded to 16 bits, with one scale for
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

// A weight is (value - zero) * scale + minimum. quantised.py repeats this structure. Each field has eight bytes.
struct Quantised {
    const void* values;
    const void* scales;    // [panel][group][column]; fp16 if `half`, else fp32
    const int16_t* zeros;  // [panel][group][column]; null: all are `zero`
    const void* minima;    // like `scales`; null: all are 0
    int64_t zero, half;
    int64_t bits, block;   // block: inputs that share a scale of the row; a multiple of 16 that divides a group
    const int64_t* order;  // [inputs]: the index in the row of each input; null: they are in order
    int64_t blocks, group;  // blocks of a row, the last of which may extend beyond the inputs; blocks of a group
};

// 5 and 6 bits are packed as 4, each chunk of inputs behind the upper bits of its numbers. A chunk has as many inputs as
// have their upper bits in one piece of the size in which four bits of 8 inputs are packed.
constexpr int upper_bits(int bits) { return bits == 8 ? 0 : bits - 4; }
constexpr int chunk_inputs(int bits) { return upper_bits(bits) ? 32 / upper_bits(bits) : 8; }

typedef int16_t Halves __attribute__((vector_size(2 * LANES)));

constexpr int kMostBlock = 128;

struct Rounded {
    char* values;    // as put_numbers writes them
    float* scales;   // [rows, blocks]
    float* offsets;  // [rows, blocks]: scale times sum, which is multiplied with a minimum
    int32_t* sums;   // [rows, blocks], of the values
};

// Exact, also for numbers below fp16's normal ones.
INLINE F<LANES> load_fp16(const uint16_t* from) {
#if LANES == 16 && defined(__AVX512F__)
    return (F<LANES>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    F<LANES> x;
    for (int i = 0; i < LANES; i += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i)));
        memcpy((char*)&x + i * sizeof(float), &wide, sizeof wide);
    }
    return x;
#endif
}

// What a weight has beside scales. Zero points and minima do not occur together.
enum Beside { NOTHING, ZEROS, MINIMA };
template <class Call> INLINE void of_beside(const Quantised& q, Call&& call) {
    if (q.minima) call(std::integral_constant<Beside, MINIMA>{});
    else if (q.zeros) call(std::integral_constant<Beside, ZEROS>{});
    else call(std::integral_constant<Beside, NOTHING>{});
}

// The scales, zero points and minima of a vector of columns of a panel, in one block.
template <Beside B> struct BlockColumns {
    F<LANES> scale, minimum;
    I<LANES> zero;

    INLINE_MEMBER BlockColumns(const Quantised& q, int64_t at) {
        scale = floats(q, q.scales, at);
        if constexpr (B == MINIMA) minimum = floats(q, q.minima, at);
        if constexpr (B == ZEROS) {
            Halves narrow;
            memcpy(&narrow, q.zeros + at, sizeof narrow);
            zero = __builtin_convertvector(narrow, I<LANES>);
        }
    }
    // Adds to `to` the sums of one row, whose scale and sum are number `which`. They are already less q.zero times that
    // sum.
    INLINE_MEMBER void add(I<LANES> sums, const Rounded& x, int64_t which, float* to) const {
        F<LANES> total = load<LANES>(to);
        if constexpr (B == MINIMA) total = fused(minimum, splat<LANES>(x.offsets[which]), total);
        if constexpr (B == ZEROS) sums -= zero * x.sums[which];
        store<LANES>(to, fused(__builtin_convertvector(sums, F<LANES>), scale * x.scales[which], total));
    }

  private:
    static INLINE_MEMBER F<LANES> floats(const Quantised& q, const void* from, int64_t at) {
        return q.half ? load_fp16((const uint16_t*)from + at) : load<LANES>((const float*)from + at);
    }
};
// The index of the first of these for a panel in a block.
INLINE int64_t columns_at(const Quantised& q, int64_t panel, int64_t b) {
    return (panel * (q.blocks / q.group) + b / q.group) * kColumns;
}

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
        float scale = widest / 32767.0f + sum<LANES>(odd);
        int64_t at = row * q.blocks + b;
        to.scales[at] = scale, to.sums[at] = sum_of, to.offsets[at] = scale * (float)sum_of;
    }
}

// The memory of rounded rows, in floats.
INLINE size_t rounded_floats(const Quantised& q, int64_t rows) {
    return ((rounded_bytes(q, rows) + 63) / 64 * 64 + rows * q.blocks * 12) / sizeof(float) + 1;
}

static Rounded round_into(Pool& pool, const Quantised& q, const float* x, int64_t rows, int64_t inputs, float* to) {
    size_t room = (rounded_bytes(q, rows) + 63) / 64 * 64;
    char* memory = (char*)to;
    float* scales = (float*)(memory + room);
    int64_t count = rows * q.blocks;
    Rounded r{memory, scales, scales + count, (int32_t*)(scales + 2 * count)};
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
