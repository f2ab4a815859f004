// The product of four rows and a panel in bf16, in AVX2's assembly. Its sums take 12 of the 16 registers, and what is
// left is just enough where each word of weights is read twice; compilers move the sums between registers and memory
// instead (GCC 12: 67 GFLOP/s on a core that does 103, against 92).
#pragma once

#include "vectors.h"

#if LANES == 8 && defined(__AVX2__) && defined(__FMA__) && defined(__x86_64__)
#define PENSTOCK_TILE_BY_HAND 1
#include <immintrin.h>

#define EACH_SUM(OP) \
    OP("0", "(%[c])") OP("1", "32(%[c])") OP("2", "64(%[c])") OP("3", "(%[c],%[ldc])") OP("4", "32(%[c],%[ldc])") \
    OP("5", "64(%[c],%[ldc])") OP("6", "(%[c],%[ldc],2)") OP("7", "32(%[c],%[ldc],2)") OP("8", "64(%[c],%[ldc],2)") \
    OP("9", "(%[c],%[ldc3])") OP("10", "32(%[c],%[ldc3])") OP("11", "64(%[c],%[ldc3])")
#define LOAD(SUM, AT) "vmovups " AT ", %%ymm" SUM "\n"
#define STORE(SUM, AT) "vmovups %%ymm" SUM ", " AT "\n"
#define ROW(AT, A, B, C) \
    "vbroadcastss " AT ", %%ymm15\n vfmadd231ps %%ymm12, %%ymm15, %%ymm" A "\n vfmadd231ps %%ymm13, %%ymm15, %%ymm" B \
    "\n vfmadd231ps %%ymm14, %%ymm15, %%ymm" C "\n"
#define ROWS(AT) \
    ROW(AT "(%[x])", "0", "1", "2") ROW(AT "(%[x],%[ldx])", "3", "4", "5") ROW(AT "(%[x],%[ldx],2)", "6", "7", "8") \
    ROW(AT "(%[x],%[ldx3])", "9", "10", "11")

// c [4, 24] plus x [4, 2 * pairs] times so many pairs of a panel; `pairs` is 1 at least. At each it asks for what is at
// `ahead`, and goes on there by `step` bytes.
INLINE void tile_by_hand(const float* x, int64_t ldx, const bf16* w, int64_t pairs, float* c, int64_t ldc,
                         const char* ahead, int64_t step) {
    alignas(32) static const uint32_t upper[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                  0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    asm volatile(
        EACH_SUM(LOAD)
        "0:\n"
        "prefetcht0 (%[ahead])\n prefetcht0 64(%[ahead])\n add %[step], %[ahead]\n"
        "vmovdqu (%[w]), %%ymm12\n vmovdqu 32(%[w]), %%ymm13\n vmovdqu 64(%[w]), %%ymm14\n"
        "vpslld $16, %%ymm12, %%ymm12\n vpslld $16, %%ymm13, %%ymm13\n vpslld $16, %%ymm14, %%ymm14\n"
        ROWS("")
        "vmovdqa %[upper], %%ymm14\n"
        "vpand (%[w]), %%ymm14, %%ymm12\n vpand 32(%[w]), %%ymm14, %%ymm13\n vpand 64(%[w]), %%ymm14, %%ymm14\n"
        ROWS("4")
        "add $8, %[x]\n add $96, %[w]\n dec %[pairs]\n jnz 0b\n"
        EACH_SUM(STORE)
        : [x] "+r"(x), [w] "+r"(w), [pairs] "+r"(pairs), [ahead] "+r"(ahead)
        : [step] "r"(step), [ldx] "r"(4 * ldx), [ldx3] "r"(12 * ldx), [c] "r"(c), [ldc] "r"(4 * ldc), [ldc3] "r"(12 * ldc), [upper] "m"(upper)
        : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
          "ymm13", "ymm14", "ymm15", "cc", "memory");
}
#undef EACH_SUM
#undef LOAD
#undef STORE
#undef ROW
#undef ROWS
#endif
