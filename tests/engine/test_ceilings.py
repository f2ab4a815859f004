"""The least time that a workload takes, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.ceilings import Ceilings, Work
from engine.models import load_model
from engine.quant.make import Recipe, quantise
from tests.engine.random_models import VARIANTS, write_model


@pytest.mark.parametrize(("name", "head"), [("gqa", 320 * 64), ("mha", 320 * 64)])
def test_a_models_work_is_its_products_and_its_cache(tmp_path: Path, name: str, head: int) -> None:
    folder = write_model(tmp_path / "one", **VARIANTS[name])
    model = load_model(folder, "bfloat16", torch.device("cpu"), "reference")
    found = Work.of(model, folder)
    kv_heads = VARIANTS[name].get("num_key_value_heads", 2)
    # q and o, k and v, gate, up and down; a table that is not tied is only looked up.
    layer = 2 * 64 * 64 + 2 * 64 * 16 * kv_heads + 3 * 64 * 96
    itemsize = model.kernels.weight_dtype.itemsize
    assert found == Work(2 * layer + head, head, itemsize, 2 * 2 * kv_heads * 16 * itemsize)


def test_quantised_matrices_are_read_as_they_are_stored(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", tokenizer=False)
    (tmp_path / "out").mkdir()
    quantise(folder, tmp_path / "out", Recipe(4, "nearest", head=8), [], torch.device("cpu"))
    before, found = (
        Work.of(load_model(where, "bfloat16", torch.device("cpu"), "reference"), where)
        for where in (folder, tmp_path / "out")
    )
    assert (found.weights, found.head) == (before.weights, before.head)
    layers = found.weights - found.head
    # Half a byte a number, a scale of four bytes for each group of 32 or row of the head; shapes of 16 bytes each.
    shapes = 16 * (2 * 7 + 1)
    assert round(found.weight_bytes * found.weights) == layers // 2 + layers // 32 * 4 + found.head + 320 * 4 + shapes


def test_a_step_takes_the_longer_of_reading_and_multiplying() -> None:
    work = Work(weights=100, head=20, weight_bytes=2, kv_bytes=3)
    slow_memory = Ceilings(read_bytes_per_s=1.0, operations_per_s=1e9)
    # One read for the prompts, then two steps: of two sequences, with 11 and 6 tokens, and of one with 12.
    assert work.least_s([(10, 3), (5, 2)], slow_memory) == 200 + (200 + 3 * 17) + (200 + 3 * 12)
    slow_sums = Ceilings(read_bytes_per_s=1e12, operations_per_s=1.0)
    found = work.least_s([(10, 3), (5, 2)], slow_sums)
    assert found == 2 * (15 * 80 + 2 * 20) + 2 * 100 * 2 + 2 * 100 * 1


def test_ceilings_are_measured() -> None:
    found = Ceilings.measure(torch.float32)
    assert found.read_bytes_per_s > 1e8
    assert found.operations_per_s > 1e8
