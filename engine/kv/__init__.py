"""Where the keys and values of sequences are, block by block; plain Python, no torch.

A sequence's full blocks get hashes, chained from the beginning of its prompt (prefix). A waiting sequence looks its
hashes up, shares the blocks that are cached and takes free ones for the rest (tables). As tokens are computed, the
blocks they fill are registered under their hashes (blocks). When it ends or is preempted it lets go of them; a
registered block that nobody holds stays cached until the memory is wanted, the least recently used first. Layers that
see equally far back form a group (groups) with blocks and tables of its own; behind a window blocks go early (table).
"""

from engine.kv.blocks import BlockPool
from engine.kv.groups import KvGroup, KvSpace, first_block, window_blocks
from engine.kv.prefix import block_hash, extend_hashes, long_root, root_hash
from engine.kv.table import Table
from engine.kv.tables import BlockTables, Claim

__all__ = [
    "BlockPool",
    "BlockTables",
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
