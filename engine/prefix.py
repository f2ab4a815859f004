"""Names of prompts' beginnings: the hash of each block of the prefix cache, and the marks by which tasks are placed.

**The hash** of a full block of tokens names it together with all tokens before it. The format is fixed: caches of other
processes rely on it, and brokers that send a prompt to where it is cached.

    root  = SHA-256(b"penstock/block/1" || field(salt) || field(adapter) || field(model version))
    block = SHA-256(parent || u32le(token) for each token of the block)
       long  = SHA-256(b"penstock/long/1" || root), the root of sequences beyond a model's rope switch: their keys are
               rotated by other frequencies, so they cannot share the blocks of shorter sequences

where field(s) = u32le(length of the UTF-8 of s) || the UTF-8 of s, and the parent of a first block is the root.
Because the root includes the tenant's salt, a tenant cannot learn from timing or from `cached_tokens` what another
tenant has asked.

**Marks** are the first 8 bytes, in 16 hexadecimal digits, of some of a prompt's block hashes: after FIRST tokens, twice
as many, four times as many, up to LAST. Before them stands, of a task with an adapter, the mark of that. So marks are
few, however long the prompt is, and whoever holds one most likely holds those before it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

_DOMAIN: Final = b"penstock/block/1"
_LONG: Final = b"penstock/long/1"
#: Tokens before the first and the last mark, where blocks end there. Shorter prefixes are computed sooner than they are
#: waited for; longer ones share the last mark, and hash no more blocks.
FIRST: Final = 64
LAST: Final = 16_384
#: Hexadecimal digits of a mark, and most marks of a prompt.
DIGITS: Final = 16
MOST_MARKS: Final = 16


def root_hash(salt: str, adapter: str, version: str) -> bytes:
    """The root hash, 32 bytes: the parent of every first block with this salt, adapter and model version."""
    digest = sha256(_DOMAIN)
    for text in (salt, adapter, version):
        data = text.encode("utf-8")
        digest.update(struct.pack("<I", len(data)))
        digest.update(data)
    return digest.digest()


def long_root(root: bytes) -> bytes:
    """The root hash, 32 bytes, of sequences beyond a model's rope switch."""
    return sha256(_LONG + root).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block, 32 bytes. Token ids are from 0 to 2**32 - 1."""
    return sha256(parent + _packer(len(token_ids)).pack(*token_ids)).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, blocks: int) -> None:
    """Extend `hashes`, the hash chain of the first blocks of `tokens`, to `blocks` entries."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), blocks):
        parent = block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


@lru_cache(maxsize=8)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


@lru_cache(maxsize=8)
def marked_blocks(block_size: int) -> tuple[int, ...]:
    """After how many blocks of so many tokens there is a mark, fewest first."""
    blocks = [-(-FIRST // block_size)]
    while (after := 2 * blocks[-1]) * block_size <= LAST and len(blocks) < MOST_MARKS - 1:
        blocks.append(after)
    return tuple(blocks)


def mark_of(name: bytes) -> str:
    """The mark of a block's hash, or of an adapter's root."""
    return name[: DIGITS // 2].hex()


def adapter_mark(adapter: str, version: str) -> str:
    """The mark of an adapter (its version) on a model's version, for all tenants."""
    return mark_of(root_hash("", adapter, version))


def prompt_marks(tokens: Sequence[int], block_size: int, *, salt: str, adapter: str, version: str) -> list[str]:
    """The marks of a prompt, shortest part first; at most MOST_MARKS. `salt`: its tenant; `adapter`: the version of its
    adapter, or empty; `version`: the model's. Token ids that no prompt can have have no mark."""
    marks = [adapter_mark(adapter, version)] if adapter else []
    counts = [count for count in marked_blocks(block_size) if count * block_size <= len(tokens)]
    if counts:
        hashes: list[bytes] = []
        try:
            extend_hashes(hashes, root_hash(salt, adapter, version), tokens, block_size, counts[-1])
        except struct.error:  # ADMIT or the engine refuses them
            return marks
        marks += [mark_of(hashes[count - 1]) for count in counts]
    return marks
