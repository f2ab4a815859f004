"""The engine's own CPU kernels: C++ behind a plain C ABI, called with pointers.

penstock.cpp: the ABI; gemm.h: products with packed weights (tile_avx2.h, tile_avx512.h)
quantised.h: products with weights of 4 and 8 bits (quantised_pairs.h, or quantised_amx.h on CPUs with AMX)
gemm_amx.h: products on CPUs with AMX; tiles.h: its instructions, tiles_emulated.h: the same for tests on any CPU
attention.h: attention over the paged KV cache; rows.h: norms, rotation and cache writes, gates
attention_amx.h: the same on CPUs with AMX, over a cache in pairs (paired.h; Storage in library.py decides which)
operations.h: the calls on the pool; experts.h: mixtures of experts; layers.h: all layers of a model in one call
peaks.h, draws.h: greedy and sampled tokens
ranks.h: sums and messages between processes that compute a model together; exchange: the same for Python
vectors.h, pool.h: the vector type and the thread pool that all of these use
setup.py builds the library for each instruction set; library loads the best build that the CPU can run
kernels: the kernel set; pages: large pages for its weights and KV cache
"""

from engine.kernels.native.kernels import Native
from engine.kernels.native.library import load_library

__all__ = ["Native", "load_library"]
