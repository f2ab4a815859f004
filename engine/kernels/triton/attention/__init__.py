"""Attention over the paged KV cache in Triton.

rope_kv turns queries and keys and writes K and V into the cache (compressed_kv: in 8 bits)
paged launches attention with the kernels of paged_kernels; fixed attends in tiles of one size, for deterministic mode
"""
