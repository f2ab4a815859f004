"""Cuts texts into windows of tokens, and runs these through a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.kv import KvGroup
from engine.models.decoder import Decoder
from engine.text import Tokenizer

#: The places of a KV block.
_BLOCK = 16
#: The most tokens of a window.
_LONGEST = 1024
#: Shorter ends of texts are left out, because their tokens have too little context.
_SHORTEST = 16


def windows(tokenizer: Tokenizer, texts: Iterable[str], tokens: int, context: int) -> list[list[int]]:
    """Up to `tokens` tokens of `texts`, cut into windows of at most `context` tokens. Each window begins like a prompt,
    with the tokenizer's BOS token if it has one."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = min(_LONGEST, context) - len(first)
    pieces: list[list[int]] = []
    remaining = tokens
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids), length):
            part = ids[start : start + min(length, remaining)]
            if len(part) >= min(_SHORTEST, length):
                pieces.append(first + part)
                remaining -= len(part)
            if remaining < _SHORTEST:
                return pieces
    return pieces


class Walk:
    """A position between two layers, with the next layer's input for all tokens of all windows.

    A layer runs once for all windows, so each of its products is called once. A product that is replaced when it is
    called makes the inputs of all later ones.
    """

    def __init__(self, model: Decoder, windows: Sequence[Sequence[int]]) -> None:
        """`windows`: token ids of whole sequences, each from its first token."""
        self.model = model
        lengths = [len(window) for window in windows]
        positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
        long = None if model.rope_switch is None else _long(lengths, model.rope_switch).to(model.device)
        self._state = model.enter(torch.tensor([token for window in windows for token in window], device=model.device))
        self._rotations = model.rotations(positions, long)
        self._attention = [_batch(lengths, positions, group.window) for group in model.kv_groups]
        self._caches = [_cache(model, group, sum(map(_blocks, lengths))) for group in model.kv_groups]
        self._next = 0

    @property
    def hidden(self) -> Tensor:
        """The current rows [tokens, width] of all windows. After the last layer, these are the last hidden states."""
        return self._state[0]

    def step(self) -> None:
        """Run the next layer and advance past it."""
        self._state = self.model.layer(self._next, *self._state, self._rotations, self._attention, self._caches)
        self._next += 1


@torch.inference_mode()
def hidden(model: Decoder, windows: Sequence[Sequence[int]]) -> Tensor:
    """The last hidden states [tokens, width] of all windows."""
    walk = Walk(model, windows)
    for _ in range(model.depth):
        walk.step()
    return walk.hidden


def _long(lengths: Sequence[int], switch: int) -> Tensor:
    return torch.tensor([length > switch for length in lengths]).repeat_interleave(torch.tensor(lengths))


def _blocks(length: int) -> int:
    return -(-length // _BLOCK)


def _cache(model: Decoder, group: KvGroup, blocks: int) -> Tensor:
    """A cache of one layer that all layers of the group share, because each is done before the next begins."""
    cache = model.kernels.kv_cache(replace(group, layers=1), blocks, _BLOCK, model.device)
    return cache.expand(group.layers, *[-1] * 5)


def _batch(lengths: Sequence[int], positions: Tensor, window: int | None) -> RaggedBatch:
    device, counts = positions.device, torch.tensor(lengths, dtype=torch.int32)
    blocks = torch.tensor([_blocks(length) for length in lengths])
    first = blocks.cumsum(0) - blocks
    slots = torch.cat([start * _BLOCK + torch.arange(length) for start, length in zip(first, lengths, strict=True)])
    return RaggedBatch(
        slots=slots.to(device),
        query_starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32).to(device),
        kv_lens=counts.to(device),
        tables=(first[:, None] + torch.arange(int(blocks.max()))).to(torch.int32).to(device),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        most_queries=max(lengths),
        most_places=max(lengths),
        window=window,
        positions=positions,
    )
