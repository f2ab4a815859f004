// The products of a build with AMX, and its attention over a paired cache, by the names of penstock.cpp. They compile
// in seconds, the whole library does not.
#include "attention_amx.h"
#include "peaks.h"

extern "C" {

void* penstock_pool(int threads, int spin_us) { return new Pool(threads, spin_us); }
void penstock_free(void* pool) { delete (Pool*)pool; }

void penstock_pack(void* pool, const void* weight, void* packed, int, int64_t inputs, int64_t outputs) {
    pack(*(Pool*)pool, (const bf16*)weight, (bf16*)packed, inputs, outputs);
}

void penstock_linear(void* pool, const float* x, const void* weight, const float* bias, float* out, int kind,
                     int64_t rows, int64_t inputs, int64_t outputs) {
    Gemm g{x, weight, bias, out, rows, inputs, outputs};
    if (kind == 2) quantised_product(*(Pool*)pool, g);
    else gemm<bf16>(*(Pool*)pool, g);
}

void penstock_peaks(void* pool, const float* x, const void* weight, const float* bias, int kind, int64_t rows,
                    int64_t inputs, int64_t outputs, int64_t* places, uint8_t* finite) {
    Gemm g{x, weight, bias, nullptr, rows, inputs, outputs};
    if (kind == 2) quantised_peaks(*(Pool*)pool, g, places, finite, nullptr);
    else peaks<bf16>(*(Pool*)pool, g, places, finite, nullptr);
}

void penstock_rope_and_write(void* pool, float* heads, const float* cos, const float* sin, void* keys, void* values, int,
                             const int64_t* slots, int64_t tokens, int64_t all_heads, int64_t kv_heads,
                             int64_t head_dim, int64_t turning) {
    rotate_and_write<Paired>(
        *(Pool*)pool, {heads, cos, sin, keys, values, slots, tokens, all_heads, kv_heads, head_dim, turning});
}

void penstock_attention(void* pool, const float* query, int64_t query_stride, const void* keys, const void* values,
                        int kind, const int32_t* starts, const int32_t* lengths, const int32_t* leads, const int32_t* tables,
                        int64_t table_stride, const int32_t* table_rows, int64_t sequences, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, int64_t block, int64_t window, float scale, float cap,
                        float* out) {
    attend<PairedWalk>(*(Pool*)pool,
                       {query, query_stride, keys, values, starts, lengths, leads, tables, table_stride, table_rows,
                        sequences, heads, kv_heads, head_dim, block, kind, window, scale, cap, out});
}
}
