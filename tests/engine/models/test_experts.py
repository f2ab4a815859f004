"""Experts that a checkpoint holds in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.loader import separate
from engine.text.tensors import LocatedTensor, StoredTensor

LAYER = "model.layers.0.mlp.experts."


def found(*shape: int) -> LocatedTensor:
    return LocatedTensor(Path("file"), "name", StoredTensor("BF16", shape))


def test_each_matrix_is_a_part_of_it() -> None:
    parts = separate({f"{LAYER}gate_up_proj": found(2, 6, 8), f"{LAYER}down_proj": found(2, 8, 3)})
    assert {name.removeprefix(LAYER): (one.stored.shape, one.part) for name, one in parts.items()} == {
        "0.gate_proj.weight": ((3, 8), (0, slice(0, 3))),
        "0.up_proj.weight": ((3, 8), (0, slice(3, 6))),
        "1.gate_proj.weight": ((3, 8), (1, slice(0, 3))),
        "1.up_proj.weight": ((3, 8), (1, slice(3, 6))),
        "0.down_proj.weight": ((8, 3), (0, slice(0, 8))),
        "1.down_proj.weight": ((8, 3), (1, slice(0, 8))),
    }


def test_other_tensors_stay_as_they_are() -> None:
    others = {f"{LAYER}0.down_proj.weight": found(8, 3), "model.layers.0.mlp.down_proj": found(8, 3, 1)}
    assert separate(others) == others


def test_tensors_of_impossibly_many_experts_are_refused() -> None:
    """Of all layers together: of the largest that is taken alone, none is made beside others."""
    with pytest.raises(ModelError, match="has 524280 experts"):
        separate({f"{LAYER}{i}.experts.down_proj": found(count, 0, 1) for i, count in enumerate((10, 524_280))})
