// The product of eight rows and a bf16 panel in AVX-512 assembly. The sums take 24 of the 32 registers.
//
// As in tile_avx2.h, the limit may be the number of instructions that a core decodes: GCC 12 makes 40 for an input,
// this code has 34. Every other row's numbers are memory operands of the multiply-adds, which saves an instruction and
// adds two reads each. If all rows did so, reads would be the limit.
#pragma once

#include "vectors.h"

#if LANES == 16 && defined(__AVX512F__) && defined(__x86_64__) && !defined(DOTS)
#define PENSTOCK_TILE_BY_HAND 1
#include <immintrin.h>

#define LINE(OP, A, B, C) OP(A, "(%[at])") OP(B, "64(%[at])") OP(C, "128(%[at])")
#define EACH_SUM(OP) \
    LINE(OP, "0", "1", "2") NEXT LINE(OP, "3", "4", "5") NEXT LINE(OP, "6", "7", "8") NEXT LINE(OP, "9", "10", "11") NEXT \
    LINE(OP, "12", "13", "14") NEXT LINE(OP, "15", "16", "17") NEXT LINE(OP, "18", "19", "20") NEXT \
    LINE(OP, "21", "22", "23")
#define NEXT "add %[ld], %[at]\n"
#define LOAD(SUM, AT) "vmovups " AT ", %%zmm" SUM "\n"
#define STORE(SUM, AT) "vmovups %%zmm" SUM ", " AT "\n"
#define TWO_ROWS(AT, X, SPLAT, A, B, C, D, E, F) \
    "vfmadd231ps " AT "(%[" X "])%{1to16%}, %%zmm24, %%zmm" A "\n" \
    "vfmadd231ps " AT "(%[" X "])%{1to16%}, %%zmm25, %%zmm" B "\n" \
    "vfmadd231ps " AT "(%[" X "])%{1to16%}, %%zmm26, %%zmm" C "\n" \
    "vbroadcastss " AT "(%[" X "],%[ldx]), %%zmm" SPLAT "\n vfmadd231ps %%zmm24, %%zmm" SPLAT ", %%zmm" D "\n" \
    "vfmadd231ps %%zmm25, %%zmm" SPLAT ", %%zmm" E "\n vfmadd231ps %%zmm26, %%zmm" SPLAT ", %%zmm" F "\n"
#define ROWS(AT) \
    TWO_ROWS(AT, "x", "27", "0", "1", "2", "3", "4", "5") TWO_ROWS(AT, "x2", "28", "6", "7", "8", "9", "10", "11") \
    TWO_ROWS(AT, "x4", "29", "12", "13", "14", "15", "16", "17") TWO_ROWS(AT, "x6", "30", "18", "19", "20", "21", "22", "23")
#define LOWER(A, B, C) \
    "vpslld $16, " A "(%[w]), %%zmm24\n vpslld $16, " B "(%[w]), %%zmm25\n vpslld $16, " C "(%[w]), %%zmm26\n"
#define UPPER(A, B, C) \
    "vpandd " A "(%[w]), %%zmm31, %%zmm24\n vpandd " B "(%[w]), %%zmm31, %%zmm25\n vpandd " C "(%[w]), %%zmm31, %%zmm26\n"
#define VECTORS \
    "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", \
    "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23", "zmm24", "zmm25", "zmm26", \
    "zmm27", "zmm28", "zmm29", "zmm30", "zmm31"

#define ASK_THREE "prefetcht0 (%[ahead])\n prefetcht0 64(%[ahead])\n prefetcht0 128(%[ahead])\n"
#define ASK_SIX ASK_THREE "prefetcht0 192(%[ahead])\n prefetcht0 256(%[ahead])\n prefetcht0 320(%[ahead])\n"
#define PRODUCT(ASK) \
    asm volatile( \
        "vpbroadcastd %[upper], %%zmm31\n" EACH_SUM(LOAD) "0:\n" ASK "add %[step], %[ahead]\n" \
        LOWER("", "64", "128") ROWS("") UPPER("", "64", "128") ROWS("4") \
        LOWER("192", "256", "320") ROWS("8") UPPER("192", "256", "320") ROWS("12") \
        "add $16, %[x]\n add $16, %[x2]\n add $16, %[x4]\n add $16, %[x6]\n add $384, %[w]\n dec %[fours]\n jnz 0b\n" \
        "mov %[to], %[at]\n mov %[ld_after], %[ld]\n" EACH_SUM(STORE) \
        : [x] "+r"(x), [x2] "+r"(x2), [x4] "+r"(x4), [x6] "+r"(x6), [w] "+r"(w), [fours] "+r"(fours), \
          [ahead] "+r"(ahead), [at] "+r"(at), [ld] "+r"(ld) \
        : [step] "r"(step), [ldx] "r"(4 * ldx), [to] "m"(to), [ld_after] "m"(ld_after), [upper] "m"(upper) \
        : VECTORS, "cc", "memory")

// Sets `to`, [8, 48], to `from` plus the product of x, [8, 4 * fours], and this many inputs of a panel. `fours` is at
// least 1. Each four inputs it prefetches at `ahead`, three cache lines or as many as it reads, and advances that by
// `step` bytes.
INLINE void tile_by_hand(const float* x, int64_t ldx, const bf16* w, int64_t fours, const float* from, int64_t from_ld,
                         float* to, int64_t to_ld, const char* ahead, int64_t step) {
    const float *at = from, *x2 = x + 2 * ldx, *x4 = x + 4 * ldx, *x6 = x + 6 * ldx;
    int64_t ld = 4 * from_ld, ld_after = 4 * to_ld;
    static const uint32_t upper = 0xffff0000;
    if (step > 192) PRODUCT(ASK_SIX);
    else PRODUCT(ASK_THREE);
}
#undef PRODUCT
#undef ASK_SIX
#undef ASK_THREE
#undef LINE
#undef EACH_SUM
#undef NEXT
#undef LOAD
#undef STORE
#undef TWO_ROWS
#undef ROWS
#undef LOWER
#undef UPPER
#undef VECTORS
#endif
