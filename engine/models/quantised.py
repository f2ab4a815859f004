"""Which of a model's matrices its checkpoint has quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import ModelError
from engine.layers import Linear
from engine.models.loader import Found
from engine.quant.formats import Scheme, stored_as
from engine.text.checkpoint import StoredTensor


class Quantisable(Protocol):
    def linears(self) -> Iterable[tuple[str, Linear]]: ...
    def canonical(self, name: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Adopted:
    exact: frozenset[str]
    """Names of tensors that are copied as they are, without rounding."""
    canonical: Callable[[str], str | None]
    """As the model's, which in addition passes over what nothing uses."""


def adopt(folder: Path, model: Quantisable, scheme: Scheme, located: Mapping[str, Found]) -> Adopted:
    """Tell each Linear of `model`, before its weights are asked for, in which form the checkpoint has it.

    Raises ModelError where no matrix is quantised, or one cannot be as `scheme` says.
    """
    held: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, found in located.items():
        ours = model.canonical(name)
        if ours is not None:
            matrix, _, end = ours.rpartition(".")
            held[matrix][end] = found.stored
    exact, ignored = set(), set()
    for prefix, linear in model.linears():
        stored = {}
        for part, outputs in linear.parts.items():
            name = prefix + part
            one = stored_as(scheme, name, outputs, linear.inputs, held[name], linear.device)
            if one is not None:
                stored[part] = one
                exact |= {f"{name}.{end}" for end in one.places}
                ignored |= {f"{name}.{end}" for end in one.ignored() - one.places.keys()}
        linear.store(stored, [part for part in stored if "bias" in held[prefix + part]])
    if not exact:
        raise ModelError(f"{folder}: config.json has a quantization_config ({scheme.form}), and no matrix is quantised")

    def canonical(name: str) -> str | None:
        ours = model.canonical(name)
        return None if ours in ignored else ours

    return Adopted(frozenset(exact), canonical)
