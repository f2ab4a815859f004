// AMX's tile instructions (Intel 64 SDM, volume 2, "TDPBF16PS" and its neighbours) as functions named after them.
//
// A tile is a register of up to 16 rows of up to 64 bytes. Its number is part of the instruction, so it is a template
// argument here. C is [rows, columns] of 32 bits. A holds C's rows, B its columns: B's row k has, for each column, the
// numbers that are multiplied with word k of A's rows, as pairs of bf16 or fours of 8 bits.
#pragma once

#include "vectors.h"

// The sizes of the tiles: the 64 bytes that `ldtilecfg` reads.
struct alignas(64) TileSizes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};

    void set(int tile, int64_t its_rows, int64_t its_bytes = 64) {
        rows[tile] = (uint8_t)its_rows;
        bytes[tile] = (uint16_t)its_bytes;
    }
};
static_assert(sizeof(TileSizes) == 64, "a register of the CPU");

// The rounding of TDPBF16PS while this object lives: to nearest, ties to even; numbers below 2^-126 are 0 where they
// come in and where they go out. The CPU's own flags do that exactly.
class TileRounding {
  public:
    TileRounding() { set(0x9fc0); }  // FTZ, DAZ, all exceptions masked
    ~TileRounding() { set(before_); }

  private:
    // No load or store passes this, nor does arithmetic between them.
    static void set(unsigned flags) { asm volatile("ldmxcsr %0" : : "m"(flags) : "memory"); }
    unsigned before_ = _mm_getcsr();
};

#ifdef PENSTOCK_EMULATED_TILES
#include "tiles_emulated.h"
#else
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Asks Linux to let all threads of this process use tiles. Returns 0, or errno: an old kernel, a sandbox or a thread's
// small signal stack may forbid it. Without this, the first use of a tile ends the process.
INLINE int ask_for_tiles() {
    constexpr unsigned kBf16 = 1 << 22, kTile = 1 << 24, kInt8 = 1 << 25, kAll = kBf16 | kTile | kInt8;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAll) != kAll) return ENOTSUP;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? errno : 0;
}

// The mnemonics are the assembler's. The compiler needs to know nothing of AMX.
INLINE void ldtilecfg(const TileSizes& sizes) { asm volatile("ldtilecfg %0" : : "m"(sizes)); }
INLINE void tilerelease() { asm volatile("tilerelease"); }

template <int T> INLINE void tilezero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }

// Rows are `stride` bytes apart.
template <int T> INLINE void tileloadd(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T> INLINE void tilestored(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
}

// C += A B, of pairs of bf16; sums in fp32, rounded as tiles_emulated.h says.
template <int C, int A, int B> INLINE void tdpbf16ps() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// C += A B, of fours of 8 bits; sums in 32 bits, which wrap around. A and B are signed.
template <int C, int A, int B> INLINE void tdpbssd() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// The same, and A is unsigned.
template <int C, int A, int B> INLINE void tdpbusd() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

// Tiles of these sizes for as long as this object lives. Nothing stays in the thread for other users of tiles.
class ConfiguredTiles {
  public:
    explicit ConfiguredTiles(const TileSizes& sizes) { ldtilecfg(sizes); }
    ~ConfiguredTiles() { tilerelease(); }
    ConfiguredTiles(const ConfiguredTiles&) = delete;
    ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};
