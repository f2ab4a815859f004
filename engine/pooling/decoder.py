"""A decoder as a maker of rows, as embedders such as Qwen3-Embedding have one: each token sees those before it.

Its attention reads keys and values from a paged cache. Texts are computed whole, so that cache is only a step's memory:
it is as large as the largest step so far, and nothing stays in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.models import Model

#: The tokens of a block of the cache.
_BLOCK: Final = 16


class DecoderRows:
    """A loaded decoder with the interface of an Encoder without a head. Used by one thread."""

    head = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kernels, self.device, self.dtype = model.kernels, model.device, model.dtype
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.width = model.embedding()[1].shape[1]
        self._caches: list[Tensor] = []
        self._blocks = 0

    def classify(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Never called: there is no head."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """See Encoder.forward. A decoder has no token types."""
        device, kernels = self.device, self.kernels
        sizes = torch.tensor(lengths)
        blocks = -(-sizes // _BLOCK)
        ends, last = sizes.cumsum(0), blocks.cumsum(0)
        self._reserve(int(last[-1]))
        positions = torch.arange(len(tokens)) - (ends - sizes).repeat_interleave(sizes)
        first = last - blocks
        # The block after the last one is always zero; tables are padded with it.
        columns = torch.arange(int(blocks.max()))
        tables = torch.where(columns < blocks[:, None], first[:, None] + columns, self._blocks).int()
        slots = (first * _BLOCK).repeat_interleave(sizes) + positions
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int()
        rows = torch.arange(len(tokens), device=device)
        switch = self.model.rope_switch
        long = None if switch is None else (sizes > switch).repeat_interleave(sizes).to(device)
        positions = positions.to(device)
        for cache in self._caches:  # masked places of blocks that are not full: 0 x NaN is NaN
            cache.index_fill_(2, (last - 1).to(device), 0)
        attention = [
            kernels.arrange(
                RaggedBatch(
                    slots.to(device),
                    starts.to(device),
                    sizes.int().to(device),
                    tables.to(device),
                    torch.arange(len(lengths), dtype=torch.int32, device=device),
                    max(lengths),
                    max(lengths),
                    group.window,
                    positions,
                ),
                _BLOCK,
                self._blocks,
            )
            for group in self.model.kv_groups
        ]
        return self.model.forward(tokens, positions, long, attention, self._caches, rows)

    def _reserve(self, blocks: int) -> None:
        """Make the caches hold so many blocks, and one more."""
        if blocks <= self._blocks:
            return
        self._caches.clear()  # first, so that there are never two
        self._blocks = blocks
        for group in self.model.kv_groups:
            self._caches.append(self.kernels.kv_cache(group, blocks + 1, _BLOCK, self.device))
        self.kernels.settle()
