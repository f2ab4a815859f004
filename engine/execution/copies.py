"""Copies whole blocks of the KV cache, as a plan asks before its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.kernels.upload import upload

#: The bytes of blocks copied at one time.
_COPIED = 64 << 20


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int, int]]) -> None:
    """`caches`: of each KV group, [layers, 2, blocks, ...]. `copies`: (KV group, source block, destination block)."""
    for group in {group for group, _, _ in copies}:
        pairs = [(source, destination) for of, source, destination in copies if of == group]
        columns = [np.array(column, np.int64) for column in zip(*pairs, strict=True)]
        cache = caches[group]
        sources, destinations = upload(columns, cache.device)
        # Copy a few at a time, because a copy needs memory beside the cache.
        size = max(1, _COPIED * len(cache[0, 0]) // cache.nbytes)
        for some in range(0, len(pairs), size):
            cache[:, :, destinations[some : some + size]] = cache[:, :, sources[some : some + size]]
