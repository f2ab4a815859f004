"""Allocates KV blocks to sequences and caches prefixes. Plain Python, no torch.

tables: admits a sequence by sharing the cached blocks that its hashes find and taking free ones for the rest
blocks: hashes each full block of a sequence, chained from the beginning of its prompt, and registers computed ones
       under their hashes; released blocks stay cached until the memory is needed, the least recently used evicted
       first; a sequence gets neighbouring blocks
table: the capacity of one engine, sized once, by groups of layers that see equally far back; the blocks of such a group
       in a sequence; blocks behind a window are released early
"""

from engine.kv.blocks import BlockPool
from engine.kv.table import Capacity, KvGroup, KvSpace, Table, first_block, window_blocks
from engine.kv.tables import BlockTables, Claim

__all__ = [
    "BlockPool",
    "BlockTables",
    "Capacity",
    "Claim",
    "KvGroup",
    "KvSpace",
    "Table",
    "first_block",
    "window_blocks",
]
