"""The engine's own CPU kernels: C++ below a plain C ABI, called with pointers.

penstock.cpp is the ABI, of gemm.h (packed weights; for AVX2 its heart is tile_avx2.h), attention.h (over the paged
cache as it lies), rows.h (norms, rotation and cache writes, gates), layers.h (all layers of a model in one call),
peaks.h and draws.h (greedy and sampled tokens), all over one vector type (vectors.h) and one pool of threads (pool.h).
setup.py builds it for each instruction set; library.py loads the best build that the CPU runs, and kernels.py makes of
it a kernel set, whose weights lie in large pages (pages.py).
"""

from engine.kernels.native.kernels import Native
from engine.kernels.native.library import load_library

__all__ = ["Native", "load_library"]
