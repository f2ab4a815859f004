// The paired layout of a KV cache in bf16, for AMX's tiles (attention_amx.h). A build with TILES includes this.
//
// The cache is [places / 16][kv_heads] panels: the keys, or values, of one KV head at 16 neighbouring places. A panel
// of keys is [dim / 2][16][2]: a row has two dimensions of each place. A panel of values is [8][dim][2]: a row has two
// places. So a panel's rows are those of tiles. A KV block has whole panels and as many bytes as without pairs.
#pragma once

#include "rows.h"
#include "walk.h"

constexpr int kPanelPlaces = 16;

// The storage type of a paired cache.
struct Paired {};

// The first number of the panel with this slot.
INLINE int64_t panel_at(int64_t slot, int64_t kv_heads, int64_t head, int64_t dim) {
    return (slot / kPanelPlaces * kv_heads + head) * kPanelPlaces * dim;
}

// Writes every second number from `to` on. Those between are other places', which another thread may be writing.
INLINE void write_halves(bf16* to, H<LANES> numbers) {
#ifdef __AVX512BW__
    _mm512_mask_storeu_epi16(to, 0x55555555, (__m512i)__builtin_convertvector(numbers, U<LANES>));
#else
    for (int i = 0; i < LANES; i++) to[2 * i] = numbers[i];
#endif
}

template <>
INLINE_MEMBER void write_head<Paired>(const Rotation& r, int64_t slot, int64_t head, const float* key,
                                      const float* value) {
    int64_t panel = panel_at(slot, r.kv_heads, head, r.head_dim), place = slot % kPanelPlaces;
    bf16* keys = (bf16*)r.keys + panel + 2 * place;
    bf16* values = (bf16*)r.values + panel + place / 2 * 2 * r.head_dim + place % 2;
    for (int64_t i = 0; i < r.head_dim; i += LANES, keys += LANES * kPanelPlaces, values += 2 * LANES) {
        H<LANES> k = narrow<LANES>(load<LANES>(key + i));
        for (int j = 0; j < LANES; j += 2) memcpy(keys + j * kPanelPlaces, (const bf16*)&k + j, 2 * sizeof(bf16));
        write_halves(values, narrow<LANES>(load<LANES>(value + i)));
    }
}

// The panels of a step of attention, up to kStep places.
constexpr int kStepPanels = 4, kStep = kStepPanels * kPanelPlaces;

struct StepPanels {
    int64_t at[kStepPanels] = {};  // as panel_at says; a panel that is not there repeats another one
    int first, end;  // those that are there; the window has dropped those before
    int places;  // from the step's first place on, that the last row sees

    // The step at place `t`, of which the rows see what is before `to`.
    StepPanels(const Attention& a, const Piece& p, int t, int to) : places(std::min(to - t, kStep)) {
        const int32_t* table = a.tables + (int64_t)a.table_rows[p.sequence] * a.table_stride;
        int from = t - a.leads[p.sequence], block = (int)a.block;
        first = from < 0 ? -from / kPanelPlaces : 0;
        end = (places + kPanelPlaces - 1) / kPanelPlaces;
        for (int i = first; i < kStepPanels; i++) {
            int place = from + std::min(i, end - 1) * kPanelPlaces;
            int64_t slot = (int64_t)table[place / block] * block + place % block;
            at[i] = panel_at(slot, a.kv_heads, p.kv_head, a.head_dim);
        }
        for (int i = 0; i < first; i++) at[i] = at[first];
    }
};
