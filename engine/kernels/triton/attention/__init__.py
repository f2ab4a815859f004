"""Attention over the paged KV cache in Triton.

rope_kv: rotates queries and keys, and writes K and V into the cache (compressed_kv: in 8 bits)
paged: picks tiles and launches the attention kernels of paged_kernels
fixed: attention in tiles of one size, for deterministic mode
"""
