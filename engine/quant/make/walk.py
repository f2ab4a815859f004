"""Runs windows of tokens through a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels import RaggedBatch
from engine.models.decoder import Decoder


class Walk:
    """A position between two layers, with the next layer's input for each window. Rows are kept in fp32 or in the
    model's compute dtype."""

    def __init__(self, model: Decoder, windows: Sequence[Sequence[int]]) -> None:
        """`model`: with plain torch kernels. `windows`: token ids of whole sequences, each from its first token."""
        self._model = model
        self._states = [model.enter(torch.tensor(window, device=model.device)) for window in windows]
        self._long = [
            None if model.rope_switch is None else torch.full((len(window),), len(window) > model.rope_switch)
            for window in windows
        ]
        self._next = 0
        self._caches = [_caches(model, max(map(len, windows)))] if windows else []

    @property
    def hidden(self) -> list[Tensor]:
        """The current states [tokens, width] of each window. After the last layer, these are the last hidden states."""
        return [x for x, _ in self._states]

    def look(self) -> None:
        """Run the next layer without advancing."""
        for i in range(len(self._states)):
            self._run(i)

    def step(self) -> None:
        """Run the next layer and advance past it."""
        for i in range(len(self._states)):
            self._states[i] = self._run(i)
        self._next += 1

    def _run(self, i: int) -> tuple[Tensor, Tensor]:
        model, (x, residual), long = self._model, self._states[i], self._long[i]
        attention, positions = _attention(model, len(x))
        rotations = model.rotations(positions, None if long is None else long.to(model.device))
        # Layers may overwrite their inputs.
        return model.layer(self._next, x.clone(), residual.clone(), rotations, attention, self._caches[0])


def hidden(model: Decoder, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last hidden states [tokens, width] of each window."""
    walk = Walk(model, windows)
    for _ in range(model.depth):
        walk.step()
    return walk.hidden


def _caches(model: Decoder, places: int) -> list[Tensor]:
    """A cache of one block that holds a window. All layers of a group share it, because each is done before the next
    begins."""
    return [
        model.kernels.kv_cache(replace(group, layers=1), 1, places, model.device).expand(group.layers, *[-1] * 5)
        for group in model.kv_groups
    ]


def _attention(model: Decoder, length: int) -> tuple[list[RaggedBatch], Tensor]:
    positions = torch.arange(length, device=model.device)
    first = torch.zeros(1, dtype=torch.int32, device=model.device)
    return [
        RaggedBatch(
            slots=positions,
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=model.device),
            kv_lens=first + length,
            tables=first[None],
            table_rows=first,
            most_queries=length,
            most_places=length,
            window=group.window,
            positions=positions,
        )
        for group in model.kv_groups
    ], positions
