"""Finds the matrices of a model that its checkpoint has quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import ModelError
from engine.layers import Embedding, Linear
from engine.quant.formats import Scheme, Stored, stored_as
from engine.text.tensors import Found, StoredTensor


class Quantisable(Protocol):
    def linears(self) -> Iterable[tuple[str, Linear]]: ...
    def embedding(self) -> tuple[str, Embedding]: ...
    def canonical(self, name: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Adopted:
    exact: frozenset[str]
    """The names of tensors that are copied as stored, without rounding."""
    stored: tuple[Stored, ...]
    canonical: Callable[[str], str | None]
    """The model's `canonical`, which also skips tensors of quantised matrices that nothing uses."""


def adopt(folder: Path, model: Quantisable, scheme: Scheme, located: Mapping[str, Found]) -> Adopted:
    """Set the stored form of each Linear of `model`, and of its embedding. Call it before asking for their weights.

    Raises ModelError if no matrix is quantised, or if one does not fit `scheme`.
    """
    held = _by_matrix(model, located)
    exact: set[str] = set()
    ignored: set[str] = set()
    every: list[Stored] = []

    def form_of(name: str, outputs: int, inputs: int, device: torch.device, *, head: bool) -> Stored | None:
        own = scheme.head if head and scheme.head is not None else scheme
        one = stored_as(own, name, outputs, inputs, held[name], device)
        if one is not None:
            every.append(one)
            exact.update(f"{name}.{end}" for end in one.places)
            ignored.update(f"{name}.{end}" for end in one.ignored() - one.places.keys())
        return one

    for prefix, linear in model.linears():
        stored = {}
        for part, outputs in linear.parts.items():
            one = form_of(prefix + part, outputs, linear.inputs, linear.device, head=not prefix)
            if one is not None:
                stored[part] = one
        linear.store(stored, [part for part in stored if "bias" in held[prefix + part]])
    name, embedding = model.embedding()
    embedding.store(form_of(name, *embedding.shape, embedding.device, head=True))
    if not exact:
        raise ModelError(f"{folder}: config.json has a quantization_config ({scheme.form}), and no matrix is quantised")

    def canonical(name: str) -> str | None:
        ours = model.canonical(name)
        return None if ours in ignored else ours

    return Adopted(frozenset(exact), tuple(every), canonical)


def _by_matrix(model: Quantisable, located: Mapping[str, Found]) -> dict[str, dict[str, StoredTensor]]:
    """The stored tensors by the names of their matrices, then by the ends of their own names."""
    held: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, found in located.items():
        ours = model.canonical(name)
        if ours is not None:
            matrix, _, end = ours.rpartition(".")
            held[matrix][end] = found.stored
    return held
