"""Allocates KV blocks to sequences and caches prefixes. Plain Python, no torch.

prefix: hashes each full block of a sequence, chained from the beginning of its prompt
tables: admits a sequence by sharing the cached blocks that its hashes find and taking free ones for the rest
blocks: registers full computed blocks under their hashes; released blocks stay cached until the memory is needed,
       the least recently used evicted first; a sequence gets neighbouring blocks
capacity: what of all this one engine holds, sized once, by groups of layers that see equally far back
table: the blocks of such a group in a sequence; blocks behind a window are released early
"""

from engine.kv.blocks import BlockPool
from engine.kv.capacity import Capacity, KvGroup, KvSpace, first_block, window_blocks
from engine.kv.prefix import block_hash, extend_hashes, long_root, root_hash
from engine.kv.table import Table
from engine.kv.tables import BlockTables, Claim

__all__ = [
    "BlockPool",
    "BlockTables",
    "Capacity",
    "Claim",
    "KvGroup",
    "KvSpace",
    "Table",
    "block_hash",
    "extend_hashes",
    "first_block",
    "long_root",
    "root_hash",
    "window_blocks",
]
