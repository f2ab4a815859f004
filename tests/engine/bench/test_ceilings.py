"""The least time that a workload takes, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.bench.ceilings import Ceilings, Work
from engine.kernels import select
from engine.kernels.fallback import computes_natively
from engine.kernels.fp8 import FP8
from engine.kernels.native import Native, load_library
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.models import load_model
from engine.quant.make import Recipe, quantise
from tests.engine.random_models import FAMILIES, VARIANTS, write_model

CPU = torch.device("cpu")
NATIVE = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


@pytest.mark.parametrize(("name", "head"), [("gqa", 320 * 64), ("mha", 320 * 64)])
def test_a_models_work_is_its_products_and_its_cache(tmp_path: Path, name: str, head: int) -> None:
    folder = write_model(tmp_path / "one", **VARIANTS[name])
    model = load_model(folder, "bfloat16", CPU, "reference")
    kv_heads = VARIANTS[name].get("num_key_value_heads", 2)
    # q and o, k and v, gate, up and down; a table that is not tied is only looked up.
    layer = 2 * 64 * 64 + 2 * 64 * 16 * kv_heads + 3 * 64 * 96
    itemsize = model.kernels.weight_dtype.itemsize
    weights = 2 * layer + head
    assert Work.of(model, folder) == Work(
        weights, head, weights * itemsize, ((2 * 2 * kv_heads * 16 * itemsize, None),), layers=2
    )


def test_of_experts_those_count_that_a_row_goes_through(tmp_path: Path) -> None:
    """Three of six, in three of four layers; the router counts as a whole."""
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES["qwen3-moe"])
    model = load_model(folder, "bfloat16", CPU, "reference")
    found = Work.of(model, folder)
    attention, dense, sparse = 2 * 64 * 128 + 2 * 64 * 64, 3 * 64 * 96, 6 * 64 + 3 * 3 * 64 * 32
    assert found.weights == 320 * 64 + 4 * attention + dense + 3 * sparse
    assert found.weight_bytes == found.weights * model.kernels.weight_dtype.itemsize


@pytest.mark.parametrize(
    ("kernels", "kind", "bytes_of_a_head"),
    [
        pytest.param("native", "auto", 2 * 16, marks=NATIVE),
        pytest.param("native", "int8", 16 + 4, marks=NATIVE),
        pytest.param("native", "fp8", 16, marks=NATIVE),
    ],
)
def test_a_cache_counts_as_it_is_stored(tmp_path: Path, kernels: str, kind: str, bytes_of_a_head: int) -> None:
    """Four layers, every other one with a window of 24; a key and a value of two heads each."""
    folder = write_model(tmp_path, tokenizer=False, **FAMILIES["gemma2"])
    model = load_model(folder, "bfloat16", CPU, kernels, kv_cache_dtype=kind)
    groups = {group.window: group.layers for group in model.kv_groups}
    found = Work.of(model, folder).kv
    assert found == tuple((2 * layers * 2 * bytes_of_a_head, window) for window, layers in groups.items())


@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=NATIVE)])
def test_quantised_weights_count_with_their_scales(kernels: str) -> None:
    """Of 40 x 256 numbers; the plain sets keep scales as they come, native ones in fp32."""
    dense = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = 4 if kernels == "native" else 2
    zero = 2 if kernels == "native" else 1
    for weight, expected in (
        (Int8Weight.quantise(dense), 40 * 256 + 40 * scale),
        (Int8Weight.quantise(dense, 128), 40 * 256 + 40 * 2 * scale),
        (Int4Weight.quantise(dense, 128), 40 * 128 + 40 * 2 * scale),
        (Int4Weight.quantise(dense, 128, symmetric=False), 40 * 128 + 40 * 2 * (scale + zero)),
    ):
        one = select(CPU, torch.bfloat16, kernels)
        one.prepare_quantised(weight, None)
        assert (one.weights, one.weight_bytes) == (40 * 256, expected)
        one.prepare_ordered(weight, None, torch.arange(255, -1, -1))
        assert (one.weights, one.weight_bytes) == (2 * 40 * 256, 2 * expected)


@pytest.mark.parametrize("kernels", ["reference", "cpu", pytest.param("native", marks=NATIVE)])
def test_weights_that_are_written_out_count_in_the_dtype_that_they_are_held_in(kernels: str) -> None:
    """Floats of 8 bits on a CPU, and the head. Native kernels hold bf16 as it is, others where the CPU has it."""
    one = select(CPU, torch.bfloat16, kernels)
    itemsize = 2 if kernels == "native" or computes_natively(torch.bfloat16) else 4
    assert one.weight_dtype.itemsize == itemsize
    one.prepare_fp8(torch.ones(40, 256).to(FP8), torch.ones(40, 1), None)
    one.prepare_head(torch.ones(300, 256, dtype=one.weight_dtype), None)
    assert (one.weights, one.weight_bytes) == (340 * 256, 340 * 256 * itemsize)


def test_groups_of_any_multiple_of_16_count_as_they_are_packed() -> None:
    library = load_library()
    if library is None:
        pytest.skip("native kernels are not built for this CPU")
    kernels = Native(torch.bfloat16, library, 1)
    kernels.prepare_quantised(Int4Weight.quantise(torch.randn(24, 96), 48), None)
    assert kernels.weights == 24 * 96
    assert 24 * 96 // 2 < kernels.weight_bytes < 24 * 96


def test_the_limit_of_a_quantised_checkpoint_counts_its_head_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one", tokenizer=False)
    (tmp_path / "out").mkdir()
    quantise(folder, tmp_path / "out", Recipe(4, "nearest", head=8), [], torch.device("cpu"))
    before, found = (
        Work.of(load_model(where, "bfloat16", torch.device("cpu"), "reference"), where)
        for where in (folder, tmp_path / "out")
    )
    assert (found.weights, found.head) == (before.weights, before.head)
    layers = found.weights - found.head
    # Half a byte a number, a scale of four bytes for each group of 32 or row of the head.
    assert found.weight_bytes == layers // 2 + layers // 32 * 4 + found.head + 320 * 4


def test_a_step_takes_the_longer_of_reading_and_multiplying() -> None:
    work = Work(weights=100, head=20, weight_bytes=200, kv=((3, None), (10, 8)), layers=4)
    slow_memory = Ceilings(read_bytes_per_s=1.0, operations_per_s=1e9)
    # One read for the prompts, then two steps: of two sequences, with 11 and 6 tokens, and of one with 12. Of layers
    # with a window, 8 tokens at most.
    first, second = 200 + 3 * 17 + 10 * (8 + 6), 200 + 3 * 12 + 10 * 8
    assert work.least_s([(10, 3), (5, 2)], slow_memory) == 200 + first + second
    slow_sums = Ceilings(read_bytes_per_s=1e12, operations_per_s=1.0)
    found = work.least_s([(10, 3), (5, 2)], slow_sums)
    assert found == 2 * (15 * 60 + 2 * (20 + 20)) + 2 * 100 * 2 + 2 * 100 * 1
