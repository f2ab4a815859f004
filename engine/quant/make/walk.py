"""Windows of tokens through a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels import AttentionBatch, AttentionGroup
from engine.models.decoder import Decoder


class Walk:
    """Between two layers: what the next one takes of each window. Rows are kept in fp32 or as the model computes."""

    def __init__(self, model: Decoder, windows: Sequence[Sequence[int]]) -> None:
        """`windows`: token ids of sequences that begin with their first; of a model over plain torch."""
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
        """[tokens, width] of each window; after the last layer, the last hidden states."""
        return [x for x, _ in self._states]

    def look(self) -> None:
        """Run the next layer, and stay before it."""
        for i in range(len(self._states)):
            self._run(i)

    def step(self) -> None:
        """Run the next layer, and go behind it."""
        for i in range(len(self._states)):
            self._states[i] = self._run(i)
        self._next += 1

    def _run(self, i: int) -> tuple[Tensor, Tensor]:
        model, (x, residual), long = self._model, self._states[i], self._long[i]
        attention, positions = _attention(model, len(x))
        rotations = model.rotations(positions, None if long is None else long.to(model.device))
        # Layers may overwrite what they are given.
        return model.layer(self._next, x.clone(), residual.clone(), rotations, attention, self._caches[0])


def hidden(model: Decoder, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last hidden states [tokens, width] of each window."""
    walk = Walk(model, windows)
    for _ in range(model.depth):
        walk.step()
    return walk.hidden


def _caches(model: Decoder, places: int) -> list[Tensor]:
    """One block that holds a window, the same for all layers of a group: each is done with it when the next begins."""
    return [
        model.kernels.kv_cache(replace(group, layers=1), 1, places, model.device).expand(group.layers, *[-1] * 5)
        for group in model.kv_groups
    ]


def _attention(model: Decoder, length: int) -> tuple[list[AttentionBatch], Tensor]:
    positions = torch.arange(length, device=model.device)
    table = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    groups = (AttentionGroup(0, length, (length,), table, None),)
    return [AttentionBatch(positions, groups, group.window) for group in model.kv_groups], positions
