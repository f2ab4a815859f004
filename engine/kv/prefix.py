"""The hash that names a full block of tokens together with all tokens before it.

The format is fixed: caches of other processes rely on it, and routers that send a prompt to where it is cached.

    root  = SHA-256(b"penstock/block/1" || field(salt) || field(adapter) || field(model version))
    block = SHA-256(parent || u32le(token) for each token of the block)
       long  = SHA-256(b"penstock/long/1" || root), the root of sequences beyond a model's rope switch: their keys are
               rotated by other frequencies, so they cannot share the blocks of shorter sequences

where field(s) = u32le(length of the UTF-8 of s) || the UTF-8 of s, and the parent of a first block is the root.
Because the root includes the tenant's salt, a tenant cannot learn from timing or from `cached_tokens` what another
tenant has asked.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import sha256

_DOMAIN = b"penstock/block/1"
_LONG = b"penstock/long/1"


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


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of a full block, 32 bytes. Token ids are from 0 to 2**32 - 1."""
    return sha256(parent + _packer(len(token_ids)).pack(*token_ids)).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: list[int], block_size: int, blocks: int) -> None:
    """Extend `hashes`, the hash chain of the first blocks of `tokens`, to `blocks` entries."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), blocks):
        parent = block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


@lru_cache(maxsize=8)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")
