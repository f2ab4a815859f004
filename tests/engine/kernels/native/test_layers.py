"""All layers in one call do what the operations do one after another, to the bit, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.kernels import LayerParts
from engine.kernels.native import Native, load_library
from engine.kernels.native.layers import NativeLayers
from engine.models import load_model
from tests.engine.deterministic.logits import SLOTS, Steps
from tests.engine.kernels.native.conftest import Make
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


class Apart(Native):
    """Runs the layers' operations one by one."""

    def prepare_layers(self, layers: Sequence[LayerParts], norm: torch.Tensor | None) -> None:
        return None


CASES = [
    *((name, dtype, "auto") for name in sorted(VARIANTS | FAMILIES) for dtype in ("float32", "bfloat16")),
    *((name, "bfloat16", cache) for name in sorted(FAMILIES) for cache in ("int8", "fp8")),
]
EVERY_FAMILY = [(name, "bfloat16", "auto") for name in sorted(VARIANTS | FAMILIES)]


@pytest.mark.parametrize(
    ("name", "dtype", "cache"),
    few(
        CASES,
        *EVERY_FAMILY,
        *[("gemma3", "float32", "auto"), ("mistral-window", "bfloat16", "int8"), ("gemma2", "bfloat16", "fp8")],
    ),
)
def test_as_the_operations_one_by_one(name: str, dtype: str, cache: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=3, **(VARIANTS | FAMILIES)[name])
    library = load_library()
    assert library is not None
    found = []
    for kind in (Native, Apart):
        kernels = partial(kind, library=library, threads=2, kv_cache_dtype=cache)
        model = load_model(folder, dtype, torch.device("cpu"), kernels)
        assert isinstance(model._together, NativeLayers) == (kind is Native)
        steps = Steps(model)
        own = steps.begin(3, [(7 * i) % 300 + 5 for i in range(90)])
        others = [steps.begin(slot, [(11 * i + slot) % 300 + 5 for i in range(30 + slot)]) for slot in (10, SLOTS - 1)]
        steps.step((own, 0, 60), (others[0], 0, 39))
        # A chunk of a prompt, a whole one and the last token of another.
        found.append(steps.step((own, 60, 90), (others[1], 0, 93), (others[0], 39, 40)))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_layers_with_a_product_of_another_kind_run_one_by_one(make: Make) -> None:
    kernels = make(torch.float32, 1)
    norm, square = torch.ones(16), kernels.prepare_linear(torch.eye(16), None)
    parts = LayerParts(
        *(0, 0, 0),
        *(2, 1, 8),
        *(1.0, None, 1e-6),
        input_norm=norm,
        qkv=square,
        head_norms=None,
        output=square,
        attended_norm=None,
        middle_norm=norm,
        gate_up=square,
        activation="silu",
        down=square,
        fed_norm=None,
    )
    assert kernels.prepare_layers([parts], norm) is not None
    for changes in ({"down": torch.nn.Linear(16, 16)}, {"head_dim": 12}, {"fed_norm": norm.double()}):
        assert kernels.prepare_layers([parts, replace(parts, **changes)], norm) is None
