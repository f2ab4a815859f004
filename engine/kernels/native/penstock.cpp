// The C ABI: only pointers and sizes, without torch or Python. It is built once for each instruction set.
#include <exception>

#include "attention_unmasked.h"
#include "draws.h"
#include "layers.h"
#include "peaks.h"

#pragma GCC visibility push(default)
extern "C" {

// Increased with every change of the functions below.
int penstock_version() { return 24; }
// Returns 0 if the system lets this process use the build's instructions, else errno.
int penstock_refused() {
#ifdef TILES
    return ask_for_tiles();
#else
    return 0;
#endif
}
int penstock_columns() { return kColumns; }
int penstock_lanes() { return LANES; }
// Whether adapters' matrices in bf16 are packed by pairs (adapters.h).
int penstock_adapter_pairs() { return kAdapterPairs<bf16>; }
// Whether products with bf16 weights round the rows to bf16 too.
int penstock_rounds() {
#if defined(DOTS) || defined(TILES)
    return 1;
#else
    return 0;
#endif
}

// Whether weights of 4 and 8 bits are packed as quantised_amx.h says, else as quantised_pairs.h does.
int penstock_fours() {
#ifdef TILES
    return 1;
#else
    return 0;
#endif
}

// Whether a cache may be of the kind kPaired (paired.h).
int penstock_paired() {
#ifdef TILES
    return 1;
#else
    return 0;
#endif
}

// Returns null if the system starts no more threads.
void* penstock_pool(int threads, int spin_us) {
    try {
        return new Pool(threads, spin_us);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void penstock_free(void* pool) { delete (Pool*)pool; }

void penstock_pack(void* pool, const void* weight, void* packed, int half, int64_t inputs, int64_t outputs) {
    if (half) pack(*(Pool*)pool, (const bf16*)weight, (bf16*)packed, inputs, outputs);
    else pack(*(Pool*)pool, (const float*)weight, (float*)packed, inputs, outputs);
}

void penstock_linear(void* pool, const float* x, const void* weight, const float* bias, float* out, int kind,
                     int64_t rows, int64_t inputs, int64_t outputs) {
    multiply(*(Pool*)pool, {weight, bias, inputs, outputs, kind}, x, out, rows);
}

// Finds the place of each row's largest number in the product, the first of equal ones, and whether all are finite.
// Of ranks: see peaks.h.
void penstock_peaks(void* pool, const float* x, const void* weight, const float* bias, int kind, int64_t rows,
                    int64_t inputs, int64_t outputs, int64_t* places, uint8_t* finite) {
    find_peaks(*(Pool*)pool, {x, weight, bias, nullptr, rows, inputs, outputs}, kind, places, finite, nullptr);
}
void penstock_peaks_of_ranks(void* pool, const float* x, const void* weight, const float* bias, int kind, int64_t rows,
                             int64_t inputs, int64_t outputs, int64_t* places, uint8_t* finite, int64_t first,
                             void* ranks) {
    peaks_of_ranks(*(Pool*)pool, {x, weight, bias, nullptr, rows, inputs, outputs}, kind, first, *(Exchange*)ranks,
                   places, finite);
}

// See draws.h. `floors` may be null.
void penstock_candidates(void* pool, const float* scaled, const float* floors, const uint32_t* keys, int64_t rows,
                         int64_t tokens, int64_t most, int64_t* found, int64_t* counts) {
    candidates(*(Pool*)pool, scaled, floors, keys, rows, tokens, most, found, counts);
}

// `residual` may be null, for no sum. `out` may be `x`.
void penstock_norm(void* pool, const float* x, float* residual, const float* weight, float* out, int64_t rows,
                   int64_t width, float eps) {
    norm(*(Pool*)pool, x, residual, weight, out, rows, width, eps);
}

void penstock_norm_heads(void* pool, float* heads, const float* query_weight, const float* key_weight, int64_t tokens,
                         int64_t all_heads, int64_t kv_heads, int64_t head_dim, float eps) {
    norm_heads(*(Pool*)pool, heads, query_weight, key_weight, tokens, all_heads, kv_heads, head_dim, eps);
}

void penstock_rope_and_write(void* pool, float* heads, const float* cos, const float* sin, void* keys, void* values,
                             int kind, const int64_t* slots, int64_t tokens, int64_t all_heads, int64_t kv_heads,
                             int64_t head_dim, int64_t turning) {
    turn_and_write(*(Pool*)pool, {heads, cos, sin, keys, values, slots, tokens, all_heads, kv_heads, head_dim, turning},
                   kind);
}

// `kind`: of Activation (rows.h).
void penstock_gate(void* pool, const float* x, float* out, int kind, int64_t rows, int64_t width) {
    gate(*(Pool*)pool, x, out, kind, rows, width);
}

void penstock_activate(void* pool, const float* x, float* out, int kind, int64_t rows, int64_t width) {
    activate<false>(*(Pool*)pool, kind, x, out, rows, width);
}

// `residual` may be null, for no sum, and so may `bias`. `out` may be `x`.
void penstock_layer_norm(void* pool, const float* x, float* residual, const float* weight, const float* bias,
                         float* out, int64_t rows, int64_t width, float eps) {
    layer_norm(*(Pool*)pool, x, residual, weight, bias, out, rows, width, eps);
}

void penstock_attention(void* pool, const float* query, int64_t query_stride, const void* keys, const void* values,
                        int kind, const int32_t* starts, const int32_t* lengths, const int32_t* leads, const int32_t* tables,
                        int64_t table_stride, const int32_t* table_rows, int64_t sequences, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, int64_t block, int64_t window, float scale, float cap,
                        float* out) {
    Attention a{query, query_stride, keys, values, starts, lengths, leads, tables, table_stride, table_rows, sequences,
                heads, kv_heads, head_dim, block, kind, window, scale, cap, out};
    attend(*(Pool*)pool, a);
}

// See attention_unmasked.h. `biases` may be null.
void penstock_attend_unmasked(void* pool, const float* rows, const int32_t* starts, int64_t sequences, int64_t heads,
                              int64_t head_dim, int64_t reach, const float* biases, int64_t biases_stride,
                              int64_t farthest, float unit, float* out) {
    attend(*(Pool*)pool,
           Unmasked{rows, starts, sequences, heads, head_dim, reach, biases, biases_stride, farthest, unit, out});
}

// See experts.h. `experts` and `shares`: [rows, mixture's chosen].
void penstock_route(void* pool, const void* mixture, const float* logits, int64_t rows, int64_t* experts,
                    float* shares) {
    route(*(Pool*)pool, *(const Mixture*)mixture, logits, rows, experts, shares);
}

// `adapters`: Adapters of adapters.h, whose changes of experts are the mixture's alone; null: none.
void penstock_experts(void* pool, const void* mixture, const float* x, const float* logits, int64_t rows, float* out,
                      const void* adapters) {
    const Mixture& m = *(const Mixture*)mixture;
    float* memory = ((Pool*)pool)->step.take(experts_floats(m, rows));
    run_experts(*(Pool*)pool, Step{}, m, x, logits, rows, out, memory, {(const Adapters*)adapters, 0});
}

// See adapters.h. `rows`: [count], the rows of `x` and `out` that the adapter changes.
void penstock_low_rank(void* pool, const void* low_rank, const float* x, int64_t inputs, float* out, int64_t outputs,
                       const int64_t* rows, int64_t count) {
    AdapterRows of{(const LowRank*)low_rank, rows, count};
    add_adapters(*(Pool*)pool, {&of, 1}, 0, {x, inputs, out, outputs});
}

void penstock_layers(void* pool, const void* layers, int64_t count, const void* step) {
    run_layers(*(Pool*)pool, (const Layer*)layers, count, *(const Step*)step, nullptr);
}

// See ranks.h. `memory`: of kHead bytes and two slots for each rank.
void* penstock_exchange(void* memory, int64_t rank, int64_t ranks, int64_t slot, int64_t spin_us) {
    return new Exchange(memory, rank, ranks, slot, spin_us);
}
void penstock_free_exchange(void* ranks) { delete (Exchange*)ranks; }
int penstock_ranks_failed(void* ranks) { return ((Exchange*)ranks)->failed(); }
void penstock_fail_ranks(void* ranks) { ((Exchange*)ranks)->fail(); }
void penstock_sum(void* ranks, void* pool, float* x, int64_t count) { ((Exchange*)ranks)->sum(*(Pool*)pool, x, count); }
void penstock_send(void* ranks, const char* message, int64_t length) { ((Exchange*)ranks)->send(message, length); }
int64_t penstock_receive(void* ranks, int64_t of) { return ((Exchange*)ranks)->receive(of); }
void penstock_take(void* ranks, int64_t of, char* message, int64_t length) {
    ((Exchange*)ranks)->take(of, message, length);
}
void penstock_gather(void* ranks, int64_t to, const char* own, int64_t length, char* gathered) {
    ((Exchange*)ranks)->gather(to, own, length, gathered);
}
void penstock_carry(void* ranks, int64_t rank, int end) { ((Exchange*)ranks)->carry(rank, end); }
void penstock_deliver(void* ranks, int64_t rank, int end) { ((Exchange*)ranks)->deliver(rank, end); }
// `partial`: what enters is the rank's part of a sum over all ranks.
void penstock_layers_of_rank(void* pool, const void* layers, int64_t count, const void* step, void* ranks,
                             int partial) {
    const Step& s = *(const Step*)step;
    if (partial) step_sum(*(Pool*)pool, s, (Exchange*)ranks, s.residual);
    run_layers(*(Pool*)pool, (const Layer*)layers, count, s, (Exchange*)ranks);
}

}
#pragma GCC visibility pop
