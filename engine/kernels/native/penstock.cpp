// The C ABI: pointers and sizes alone, nothing of torch or Python. Built once for each instruction set.
#include "attention.h"
#include "gemm.h"
#include "rows.h"

#pragma GCC visibility push(default)
extern "C" {

// Bumped with every change of what is below.
int penstock_version() { return 2; }
int penstock_columns() { return kColumns; }

void* penstock_pool(int threads, int spin_us) { return new Pool(threads, spin_us); }
void penstock_free(void* pool) { delete (Pool*)pool; }

void penstock_pack(void* pool, const void* weight, void* packed, int half, int64_t inputs, int64_t outputs) {
    if (half) pack(*(Pool*)pool, (const bf16*)weight, (bf16*)packed, inputs, outputs);
    else pack(*(Pool*)pool, (const float*)weight, (float*)packed, inputs, outputs);
}

void penstock_linear(void* pool, const float* x, const void* weight, const float* bias, float* out, int half,
                     int64_t rows, int64_t inputs, int64_t outputs) {
    Gemm g{x, weight, bias, out, rows, inputs, outputs};
    if (half) gemm<bf16>(*(Pool*)pool, g);
    else gemm<float>(*(Pool*)pool, g);
}

// `residual` may be null: no sum then. `out` may be `x`.
void penstock_norm(void* pool, const float* x, float* residual, const float* weight, float* out, int64_t rows,
                   int64_t width, float eps) {
    each_row(*(Pool*)pool, rows, width, [&](int64_t row) {
        norm_row(x + row * width, residual ? residual + row * width : nullptr, weight, out + row * width, width, eps);
    });
}

void penstock_norm_heads(void* pool, float* heads, const float* query_weight, const float* key_weight, int64_t tokens,
                         int64_t all_heads, int64_t kv_heads, int64_t head_dim, float eps) {
    each_row(*(Pool*)pool, tokens, all_heads * head_dim, [&](int64_t token) {
        for (int64_t h = 0; h < all_heads - kv_heads; h++) {
            float* head = heads + (token * all_heads + h) * head_dim;
            norm_row(head, nullptr, h < all_heads - 2 * kv_heads ? query_weight : key_weight, head, head_dim, eps);
        }
    });
}

void penstock_rope_and_write(void* pool, float* heads, const float* cos, const float* sin, void* keys, void* values,
                             int half, const int64_t* slots, int64_t tokens, int64_t all_heads, int64_t kv_heads,
                             int64_t head_dim, int64_t turning) {
    Rotation r{heads, cos, sin, keys, values, slots, tokens, all_heads, kv_heads, head_dim, turning};
    if (half) rotate_and_write<bf16>(*(Pool*)pool, r);
    else rotate_and_write<float>(*(Pool*)pool, r);
}

void penstock_gate(void* pool, const float* x, float* out, int gelu, int64_t rows, int64_t width) {
    if (gelu) gate<true>(*(Pool*)pool, x, out, rows, width);
    else gate<false>(*(Pool*)pool, x, out, rows, width);
}

void penstock_attention(void* pool, const float* query, int64_t query_stride, const void* keys, const void* values,
                        int half, const int32_t* starts, const int32_t* lengths, const int32_t* leads, const int32_t* tables,
                        int64_t table_stride, const int32_t* table_rows, int64_t sequences, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, int64_t block, int64_t window, float scale, float cap,
                        float* out) {
    Attention a{query, query_stride, keys, values, starts, lengths, leads, tables, table_stride, table_rows, sequences,
                heads, kv_heads, head_dim, block, window, scale, cap, out};
    Pool& p = *(Pool*)pool;
    // Heads of a multiple of 8 that is none of a wider vector.
    if (head_dim % LANES) half ? attend<8, bf16>(p, a) : attend<8, float>(p, a);
    else half ? attend<LANES, bf16>(p, a) : attend<LANES, float>(p, a);
}

}
#pragma GCC visibility pop
