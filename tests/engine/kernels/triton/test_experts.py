"""Mixtures of experts on the device: what plain torch finds, and for each row the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels import ExpertParts
from engine.kernels.deterministic import DeterministicGpu
from engine.kernels.gpu import Gpu
from engine.kernels.reference import Reference
from engine.kernels.triton.experts import GroupedProduct, route, sort
from tests.engine.kernels.triton.conftest import noise
from tests.histories import TIMES


def parts(kernels: Reference, where: torch.device, count: int, chosen: int, width: int, inner: int) -> ExpertParts:
    def product(outputs: int, inputs: int, seed: int) -> object:
        weight = noise(outputs, inputs, dtype=kernels.weight_dtype, seed=seed).to(where)
        return kernels.prepare_linear(weight / inputs**0.5, None)

    gate_ups = [product(2 * inner, width, i) for i in range(count)]
    downs = [product(width, inner, 100 + i) for i in range(count)]
    return ExpertParts(product(count, width, 99), tuple(gate_ups), tuple(downs), chosen, True, "silu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "count", "chosen"), [(1, 6, 2), (40, 6, 3), (3, 33, 8), (1100, 5, 1), (7, 4, 4)])
def test_places_are_sorted_by_expert(where: torch.device, rows: int, count: int, chosen: int) -> None:
    experts, shares = route(noise(rows, count).to(where), chosen, True)
    assert all(len(set(row)) == chosen for row in experts.tolist())
    torch.testing.assert_close(shares.sum(1), torch.ones(rows, device=where))
    order, starts = sort(experts, count)
    flat = experts.flatten().long()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    assert starts.tolist() == [0, *flat.bincount(minlength=count).cumsum(0).tolist()]


@pytest.mark.parametrize(("outputs", "inputs"), [(130, 100), (48, 64)])
@pytest.mark.parametrize(("rows", "tile"), [(5, None), (90, None), (20, 32)])
def test_each_place_is_multiplied_with_its_experts_weight(
    where: torch.device, dtype: torch.dtype, outputs: int, inputs: int, rows: int, tile: int | None
) -> None:
    """Of five experts two have no place; others have less than a tile, or several."""
    weights = [noise(outputs, inputs, dtype=dtype, seed=i).to(where) for i in range(5)]
    x = noise(rows, inputs, dtype=dtype, seed=9).to(where)
    experts = torch.tensor([[4, 1] if i % 7 else [1, 2] for i in range(rows)], dtype=torch.int32, device=where)
    found = GroupedProduct(weights)(x, *sort(experts, 5), shared=2, places_of_tile=tile)
    expected = torch.stack([weights[e].double() @ x[i].double() for i, row in enumerate(experts.tolist()) for e in row])
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near * inputs**0.5)


@pytest.mark.usefixtures("in_order")
def test_in_deterministic_mode_a_row_has_the_same_bits_in_any_company(where: torch.device) -> None:
    kernels = DeterministicGpu(torch.bfloat16, multiprocessors=1)
    mixture = parts(kernels, where, 6, 2, 70, 40)
    run = kernels.prepare_experts(mixture)
    x, logits = noise(130, 70, dtype=torch.bfloat16).to(where), noise(130, 6, seed=5).to(where)
    whole = run(x, logits)
    for size in (1, 2, 33, 100) if TIMES else (1, 33):
        assert torch.equal(run(x[-size:], logits[-size:]), whole[-size:]), size


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_is_not_finite_spoils_no_other(where: torch.device) -> None:
    kernels = Gpu(torch.float32, multiprocessors=1)
    mixture = parts(kernels, where, 5, 2, 40, 24)
    run = kernels.prepare_experts(mixture)
    x, logits = noise(7, 40).to(where), noise(7, 5, seed=5).to(where)
    whole = run(x, logits)
    for odd in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[3] = odd
        found = run(x, broken)
        assert found[3].isnan().all()
        kept = [i for i in range(7) if i != 3]
        assert torch.equal(found[kept], whole[kept])


def test_no_rows_are_no_work(where: torch.device) -> None:
    kernels = Gpu(torch.float32, multiprocessors=1)
    empty: Tensor = kernels.prepare_experts(parts(kernels, where, 4, 2, 40, 24))(
        torch.empty(0, 40, device=where), torch.empty(0, 4, device=where)
    )
    assert empty.shape == (0, 40)
