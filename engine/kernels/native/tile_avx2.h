// Products of four rows and a panel in AVX2 assembly. The sums take 12 of the 16 registers, and the rest is just
// enough. Compilers spill the sums to memory instead (GCC 12: 67 GFLOP/s on a core that reaches 103).
//
// The limit is mostly the number of instructions that a core decodes at a time, half of which its other thread may
// take: 24 for an input with bf16 weights, whose words are read twice and widened, 20 with fp32 weights. So the first
// of many tiles stores the widened weights for the tiles after it.
#pragma once

#include "vectors.h"

#if LANES == 8 && defined(__AVX2__) && defined(__FMA__) && defined(__x86_64__)
#define PENSTOCK_TILE_BY_HAND 1
#define PENSTOCK_WIDEN_BY_HAND 1
#include <immintrin.h>

#define EACH_SUM(OP) \
    OP("0", "(%[at])") OP("1", "32(%[at])") OP("2", "64(%[at])") OP("3", "(%[at],%[ld])") OP("4", "32(%[at],%[ld])") \
    OP("5", "64(%[at],%[ld])") OP("6", "(%[at],%[ld],2)") OP("7", "32(%[at],%[ld],2)") OP("8", "64(%[at],%[ld],2)") \
    OP("9", "(%[at],%[ld3])") OP("10", "32(%[at],%[ld3])") OP("11", "64(%[at],%[ld3])")
#define LOAD(SUM, AT) "vmovups " AT ", %%ymm" SUM "\n"
#define STORE(SUM, AT) "vmovups %%ymm" SUM ", " AT "\n"
#define ROW(AT, A, B, C) \
    "vbroadcastss " AT ", %%ymm15\n vfmadd231ps %%ymm12, %%ymm15, %%ymm" A "\n vfmadd231ps %%ymm13, %%ymm15, %%ymm" B \
    "\n vfmadd231ps %%ymm14, %%ymm15, %%ymm" C "\n"
#define ROWS(AT) \
    ROW(AT "(%[x])", "0", "1", "2") ROW(AT "(%[x],%[ldx])", "3", "4", "5") ROW(AT "(%[x],%[ldx],2)", "6", "7", "8") \
    ROW(AT "(%[x],%[ldx3])", "9", "10", "11")

#define WIDEN_LOWER(A, B, C) \
    "vmovdqu " A "(%[w]), %%ymm12\n vmovdqu " B "(%[w]), %%ymm13\n vmovdqu " C "(%[w]), %%ymm14\n" \
    "vpslld $16, %%ymm12, %%ymm12\n vpslld $16, %%ymm13, %%ymm13\n vpslld $16, %%ymm14, %%ymm14\n"
#define WIDEN_UPPER(A, B, C) \
    "vmovdqa %[upper], %%ymm14\n" \
    "vpand " A "(%[w]), %%ymm14, %%ymm12\n vpand " B "(%[w]), %%ymm14, %%ymm13\n vpand " C "(%[w]), %%ymm14, %%ymm14\n"
#define KEEP(A, B, C) \
    "vmovaps %%ymm12, " A "(%[wide])\n vmovaps %%ymm13, " B "(%[wide])\n vmovaps %%ymm14, " C "(%[wide])\n"
#define WIDE(A, B, C) \
    "vmovups " A "(%[w]), %%ymm12\n vmovups " B "(%[w]), %%ymm13\n vmovups " C "(%[w]), %%ymm14\n"
#define ASK "prefetcht0 (%[ahead])\n prefetcht0 64(%[ahead])\n"
#define AFTER "mov %[to], %[at]\n mov %[ld_after], %[ld]\n lea (%[ld],%[ld],2), %[ld3]\n"
#define VECTORS \
    "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12", "ymm13", \
    "ymm14", "ymm15"

alignas(32) static const uint32_t kUpper[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                               0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// Sets `to`, [4, 24], to `from` plus the product of x, [4, 4 * fours], and this many inputs of a panel. `fours` is at
// least 1. Each four inputs it prefetches at `ahead`, three cache lines here and two below, and advances that by `step`
// bytes.
INLINE void tile_by_hand(const float* x, int64_t ldx, const bf16* w, int64_t fours, const float* from, int64_t from_ld,
                         float* to, int64_t to_ld, const char* ahead, int64_t step) {
    const float* at = from;
    int64_t ld = 4 * from_ld, ld3 = 3 * ld, ld_after = 4 * to_ld;
    asm volatile(
        EACH_SUM(LOAD)
        "0:\n" ASK "prefetcht0 128(%[ahead])\n add %[step], %[ahead]\n"
        WIDEN_LOWER("", "32", "64") ROWS("") WIDEN_UPPER("", "32", "64") ROWS("4")
        WIDEN_LOWER("96", "128", "160") ROWS("8") WIDEN_UPPER("96", "128", "160") ROWS("12")
        "add $16, %[x]\n add $192, %[w]\n dec %[fours]\n jnz 0b\n"
        AFTER EACH_SUM(STORE)
        : [x] "+r"(x), [w] "+r"(w), [fours] "+r"(fours), [ahead] "+r"(ahead), [at] "+r"(at), [ld] "+r"(ld),
          [ld3] "+r"(ld3)
        : [step] "r"(step), [ldx] "r"(4 * ldx), [ldx3] "r"(12 * ldx), [to] "m"(to), [ld_after] "m"(ld_after),
          [upper] "m"(kUpper)
        : VECTORS, "cc", "memory");
}

// The same with a panel in fp32.
INLINE void tile_by_hand(const float* x, int64_t ldx, const float* w, int64_t fours, const float* from, int64_t from_ld,
                         float* to, int64_t to_ld, const char* ahead, int64_t step) {
    const float* at = from;
    int64_t ld = 4 * from_ld, ld3 = 3 * ld, ld_after = 4 * to_ld;
    asm volatile(
        EACH_SUM(LOAD)
        "0:\n" ASK "add %[step], %[ahead]\n"
        WIDE("", "32", "64") ROWS("") WIDE("96", "128", "160") ROWS("4")
        WIDE("192", "224", "256") ROWS("8") WIDE("288", "320", "352") ROWS("12")
        "add $16, %[x]\n add $384, %[w]\n dec %[fours]\n jnz 0b\n"
        AFTER EACH_SUM(STORE)
        : [x] "+r"(x), [w] "+r"(w), [fours] "+r"(fours), [ahead] "+r"(ahead), [at] "+r"(at), [ld] "+r"(ld),
          [ld3] "+r"(ld3)
        : [step] "r"(step), [ldx] "r"(4 * ldx), [ldx3] "r"(12 * ldx), [to] "m"(to), [ld_after] "m"(ld_after)
        : VECTORS, "cc", "memory");
}

// Like the first, but also stores the panel in fp32 at `wide`. It does not prefetch, because the tiles after it do.
INLINE void widen_by_hand(const float* x, int64_t ldx, const bf16* w, int64_t fours, const float* from, int64_t from_ld,
                          float* to, int64_t to_ld, float* wide) {
    const float* at = from;
    int64_t ld = 4 * from_ld, ld3 = 3 * ld, ld_after = 4 * to_ld;
    asm volatile(
        EACH_SUM(LOAD)
        "0:\n"
        WIDEN_LOWER("", "32", "64") KEEP("", "32", "64") ROWS("")
        WIDEN_UPPER("", "32", "64") KEEP("96", "128", "160") ROWS("4")
        WIDEN_LOWER("96", "128", "160") KEEP("192", "224", "256") ROWS("8")
        WIDEN_UPPER("96", "128", "160") KEEP("288", "320", "352") ROWS("12")
        "add $16, %[x]\n add $192, %[w]\n add $384, %[wide]\n dec %[fours]\n jnz 0b\n"
        AFTER EACH_SUM(STORE)
        : [x] "+r"(x), [w] "+r"(w), [fours] "+r"(fours), [wide] "+r"(wide), [at] "+r"(at), [ld] "+r"(ld), [ld3] "+r"(ld3)
        : [ldx] "r"(4 * ldx), [ldx3] "r"(12 * ldx), [to] "m"(to), [ld_after] "m"(ld_after), [upper] "m"(kUpper)
        : VECTORS, "cc", "memory");
}
#undef EACH_SUM
#undef LOAD
#undef STORE
#undef ROW
#undef ROWS
#undef WIDEN_LOWER
#undef WIDEN_UPPER
#undef KEEP
#undef WIDE
#undef ASK
#undef AFTER
#undef VECTORS
#endif
