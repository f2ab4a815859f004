// AMX's instructions, each alone. On every CPU they can be read, on one with AMX run.
#include "tiles.h"

extern "C" {

void configure(const TileSizes* sizes) { ldtilecfg(*sizes); }
void release() { tilerelease(); }
void zero() { tilezero<5>(); }
void load_tile(const void* from, int64_t stride) { tileloadd<4>(from, stride); }
void store_tile(void* to, int64_t stride) { tilestored<4>(to, stride); }
void add_bf16() { tdpbf16ps<1, 2, 3>(); }
void add_signed() { tdpbssd<1, 2, 3>(); }
void add_unsigned() { tdpbusd<1, 2, 3>(); }
}
