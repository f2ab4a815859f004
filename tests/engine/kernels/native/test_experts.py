"""Experts in one native call, by each kind of weight: their products are those of each expert by itself, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import ExpertParts, PreparedLinear
from engine.kernels.native import Native
from engine.kernels.native.product import NativeExperts
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.reference import Reference
from tests.engine.kernels.native.conftest import Make

WIDTH, INNER, COUNT = 160, 96, 12
Prepare = Callable[[Native, Tensor], PreparedLinear]
KINDS: dict[str, Prepare] = {
    "dense": lambda kernels, weight: kernels.prepare_linear(weight.to(kernels.weight_dtype), None),
    "int8": lambda kernels, weight: kernels.prepare_quantised(Int8Weight.quantise(weight), None),
    "int4": lambda kernels, weight: kernels.prepare_quantised(Int4Weight.quantise(weight, 32), None),
    "ordered": lambda kernels, weight: kernels.prepare_ordered(
        Int4Weight.quantise(weight, 32), None, torch.arange(weight.shape[1]).flip(0)
    ),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def mixture(kernels: Native, kinds: list[str], chosen: int, activation: str = "silu") -> ExpertParts:
    """Experts whose weights are of `kinds` in turn."""
    prepare = [KINDS[kinds[i % len(kinds)]] for i in range(COUNT)]
    gate_ups = [prepare[i](kernels, drawn(2 * INNER, WIDTH, seed=i)) for i in range(COUNT)]
    downs = [prepare[i](kernels, drawn(WIDTH, INNER, seed=50 + i)) for i in range(COUNT)]
    router = kernels.prepare_head(drawn(COUNT, WIDTH, seed=99).to(kernels.weight_dtype), None)
    return ExpertParts(router, tuple(gate_ups), tuple(downs), chosen, True, activation)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), list(KINDS)], ids=str)
def test_each_row_goes_through_its_expert_as_if_alone(
    make: Make, dtype: torch.dtype, kinds: list[str], threads: int
) -> None:
    kernels = make(dtype, threads)
    parts = mixture(kernels, kinds, chosen=1)
    run = kernels.prepare_experts(parts)
    assert isinstance(run, NativeExperts)
    for rows in (1, 2, 33, 300):
        x = 3 * drawn(rows, WIDTH, seed=rows)
        logits = parts.router(x)
        found = run(x, logits)
        for row, expert in enumerate(logits.argmax(1).tolist()[:40]):
            inside = kernels.silu_mul(parts.gate_ups[expert](x[row : row + 1]))
            assert torch.equal(parts.downs[expert](inside)[0], found[row])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_results_are_added_up_by_their_shares(make: Make, activation: str) -> None:
    kernels = make(torch.bfloat16, 2)
    parts = mixture(kernels, list(KINDS), chosen=4, activation=activation)
    x = drawn(50, WIDTH, seed=7)
    logits = 9 * parts.router(x)
    expected = Reference.prepare_experts(kernels, parts)(x, logits)
    torch.testing.assert_close(kernels.prepare_experts(parts)(x, logits), expected, rtol=1e-5, atol=1e-6)


def test_a_row_that_is_not_finite_spoils_no_other(make: Make) -> None:
    kernels = make(torch.float32, 2)
    parts = mixture(kernels, ["dense"], chosen=2)
    run = kernels.prepare_experts(parts)
    x = drawn(9, WIDTH, seed=8)
    whole = run(x, parts.router(x))
    for odd in (float("nan"), float("inf"), float("-inf")):
        x[4, 3] = odd
        found = run(x, parts.router(x))
        assert found[4].isnan().all()
        assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], whole[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_experts_of_other_products_run_one_by_one(make: Make) -> None:
    kernels = make(torch.float32, 1)
    parts = mixture(kernels, ["dense"], chosen=2)
    other = ExpertParts(
        parts.router, parts.gate_ups, (*parts.downs[:-1], lambda x: parts.downs[-1](x)), 2, True, "silu"
    )
    run = kernels.prepare_experts(other)
    assert not isinstance(run, NativeExperts)
    x = drawn(20, WIDTH, seed=9)
    logits = parts.router(x)
    torch.testing.assert_close(run(x, logits), kernels.prepare_experts(parts)(x, logits), rtol=1e-5, atol=1e-6)
