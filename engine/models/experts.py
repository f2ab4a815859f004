"""Reads what a mixture of experts adds: its settings, and experts that a checkpoint holds in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from engine.errors import ModelError
from engine.layers import ExpertShape
from engine.text.config import MOST_WIDTH, Config
from engine.text.tensors import LocatedTensor, StoredTensor

#: The most experts of a layer, and of all layers together: some ten times the largest known.
_MOST_EXPERTS, _MOST_IN_ALL = 4096, 1 << 18
#: The ends of the names of tensors that hold all experts of a layer, as transformers 5 holds them in memory.
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def read_experts(config: Config, width: int, *, count: int, normed: bool) -> ExpertShape:
    """Read the shape of a layer's experts. `count`: the architecture's default. Raises ModelError."""
    # transformers 5 writes num_local_experts for all families.
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = config.integer(name, count, high=_MOST_EXPERTS)
    if "num_experts" in config and config.get("num_experts") != experts:
        raise config.wrong("num_experts", f"does not go with {name}={experts}")
    of_row = config.integer("num_experts_per_tok", high=MOST_WIDTH)
    if of_row > experts:
        raise config.wrong("num_experts_per_tok", f"is more than the {experts} experts of {name}")
    return ExpertShape(experts, of_row, width, normed)


def separate(located: Mapping[str, LocatedTensor]) -> dict[str, LocatedTensor]:
    """The tensors of a checkpoint, with an entry for each matrix of each expert, also where all experts of a layer are
    in one tensor: [experts, 2 * inner, width] for gate and up, [experts, width, inner] for down.

    Raises ModelError if there are more experts than a model may have.
    """
    separated: dict[str, LocatedTensor] = {}
    parts = 0
    for name, located_tensor in located.items():
        whole = name.endswith((_GATE_UP, _DOWN)) and len(located_tensor.stored.shape) == 3
        parts += located_tensor.stored.shape[0] if whole else 0
        if parts > 2 * _MOST_IN_ALL:
            raise ModelError(
                f"{located_tensor.path}: {name} has {located_tensor.stored.shape[0]} experts, more than are supported"
            )
        separated |= dict(_matrices(name, located_tensor)) if whole else {name: located_tensor}
    return separated


def _matrices(name: str, located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
    experts, outputs, inputs = located.stored.shape
    base = name.rpartition(".")[0]
    half = outputs // 2
    both = [("gate_proj", 0, half), ("up_proj", half, outputs)]
    kinds = both if name.endswith(_GATE_UP) else [("down_proj", 0, outputs)]
    for i in range(experts):
        for kind, start, end in kinds:
            stored = StoredTensor(located.stored.dtype, (end - start, inputs))
            yield f"{base}.{i}.{kind}.weight", replace(located, stored=stored, part=(i, slice(start, end)))
