"""The native call of all layers adds adapters' changes to the bits of the operations one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters import Adapter, load_adapter
from engine.kernels.native import load_library
from engine.models import Model, load_model
from tests.engine.adapters.folders import write_adapter
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of, recorded

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


def adapter_of(model: Model, folder: Path, *, rank: int, seed: int, every: int = 1) -> Adapter:
    """A random adapter of every `every`-th matrix that may have one, with ranks from `rank` on."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    matrices = [
        (prefix + part, linear.inputs, outputs)
        for prefix, linear in model.linears()
        for part, outputs in linear.parts.items()
        if prefix
    ]
    for i, (name, inputs, outputs) in enumerate(matrices[seed % every :: every]):
        own = rank + i % 3
        values[f"base_model.model.{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) * 0.2
        values[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.2
    return load_adapter(write_adapter(folder, values), model)


def run(model: Model, adapters: list[Adapter | None]) -> tuple[dict[str, list[int]], list[Tensor]]:
    driver = Driver(model, tokens=24, sequences=6)
    logits = recorded(model)
    prompts = prompts_of([20, 1, 33, 7, 12, 5], model.vocab_size)
    for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        driver.add(str(i), prompt, greedy(6), adapter)
    return driver.run(), logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", few(["gqa", "phi3", "gemma2", "qwen3-moe"], "gqa", "qwen3-moe"))
def test_together_as_one_by_one(variant: str, dtype: str, tmp_path: Path) -> None:
    """Prompts and decodes of four adapters and of none, some of which change some matrices only."""
    changes: dict[str, Any] = (VARIANTS | FAMILIES)[variant]
    folder = write_model(tmp_path / "base", tokenizer=False, **changes)
    model = load_model(folder, dtype, torch.device("cpu"), "native")
    some = [adapter_of(model, tmp_path / str(i), rank=1 + 5 * i, seed=i, every=1 + i) for i in range(4)]
    adapters = [some[0], some[1], None, some[2], some[1], some[3]]
    assert model._together is not None  # type: ignore[attr-defined]
    found, logits = run(model, adapters)
    model = load_model(folder, dtype, torch.device("cpu"), "native")
    some = [adapter_of(model, tmp_path / str(i), rank=1 + 5 * i, seed=i, every=1 + i) for i in range(4)]
    model._together = None  # type: ignore[attr-defined]
    expected, expected_logits = run(model, [some[0], some[1], None, some[2], some[1], some[3]])
    assert found == expected
    assert all(map(torch.equal, logits, expected_logits))
