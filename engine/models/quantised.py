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
from engine.text.tensors import LocatedTensor, StoredTensor


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


def adopt(folder: Path, model: Quantisable, scheme: Scheme, located: Mapping[str, LocatedTensor]) -> Adopted:
    """Set the stored form of each Linear of `model`, and of its embedding. Call it before asking for their weights.

    Raises ModelError if no matrix is quantised, or if one does not fit `scheme`.
    """
    stored_tensors = _by_matrix(model, located)
    exact: set[str] = set()
    ignored: set[str] = set()
    every: list[Stored] = []

    def form_of(name: str, outputs: int, inputs: int, device: torch.device, *, head: bool) -> Stored | None:
        part_scheme = scheme.head if head and scheme.head is not None else scheme
        form = stored_as(part_scheme, name, outputs, inputs, stored_tensors[name], device)
        if form is not None:
            every.append(form)
            exact.update(f"{name}.{end}" for end in form.places)
            ignored.update(f"{name}.{end}" for end in form.ignored() - form.places.keys())
        return form

    for prefix, linear in model.linears():
        stored = {}
        for part, outputs in linear.parts.items():
            form = form_of(prefix + part, outputs, linear.inputs, linear.device, head=not prefix)
            if form is not None:
                stored[part] = form
        linear.store(stored, [part for part in stored if "bias" in stored_tensors[prefix + part]])
    name, embedding = model.embedding()
    embedding.store(form_of(name, *embedding.shape, embedding.device, head=True))
    if not exact:
        raise ModelError(f"{folder}: config.json has a quantization_config ({scheme.form}), and no matrix is quantised")

    def canonical(name: str) -> str | None:
        ours = model.canonical(name)
        return None if ours in ignored else ours

    return Adopted(frozenset(exact), tuple(every), canonical)


def _by_matrix(model: Quantisable, located: Mapping[str, LocatedTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The stored tensors by the names of their matrices, then by the ends of their own names."""
    by_matrix: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, located_tensor in located.items():
        ours = model.canonical(name)
        if ours is not None:
            matrix, _, end = ours.rpartition(".")
            by_matrix[matrix][end] = located_tensor.stored
    return by_matrix
