"""Matrices rounded for what they are multiplied with."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import select
from engine.quant.formats import Matrix
from engine.quant.make.rounding import Grid, compensated, input_hessian, nearest

GIVEN = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 128, generator=GIVEN)
#: Inputs that go together, and differ in size: what one column loses, others can make up for.
INPUTS = torch.randn(400, 24, generator=GIVEN) @ torch.randn(24, 128, generator=GIVEN) * torch.logspace(-1, 1, 128)
HESSIAN = INPUTS.T @ INPUTS


def lost(matrix: Matrix) -> float:
    """Of the product with INPUTS."""
    return float((INPUTS @ (matrix.dequantise() - WEIGHT).T).square().mean())


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, None)])
def test_what_is_rounded_is_within_a_step_of_its_scale(bits: int, group: int | None) -> None:
    matrix = nearest(WEIGHT, Grid(bits, group, torch.float32))
    steps = matrix.scales.T.repeat_interleave(matrix.group, 1)
    inner = matrix.q.float().sub(2 ** (bits - 1)).abs() < 2 ** (bits - 1) - 1  # the rest may be cut off
    assert ((matrix.dequantise() - WEIGHT).abs() <= steps * 0.5001)[inner].all()
    assert inner.float().mean() > 0.8
    assert matrix.scales.shape == (128 // (group or 128), 48)


@pytest.mark.parametrize("bits", [4, 8])
def test_making_up_for_what_was_lost_loses_less(bits: int) -> None:
    grid = Grid(bits, 32, torch.float32)
    assert lost(compensated(WEIGHT, HESSIAN, grid)) < 0.3 * lost(nearest(WEIGHT, grid))


def test_scales_keep_the_dtype_that_they_are_stored_in() -> None:
    matrix = compensated(WEIGHT, HESSIAN, Grid(4, 64, torch.bfloat16))
    assert matrix.scales.dtype == torch.bfloat16
    assert lost(matrix) < lost(nearest(WEIGHT, Grid(4, 64, torch.bfloat16)))


def test_inputs_that_never_came_or_are_all_alike_are_rounded_too() -> None:
    for inputs in (torch.zeros(4, 128), torch.ones(4, 128)):
        matrix = compensated(WEIGHT, inputs.T @ inputs, Grid(4, 32, torch.float32))
        assert torch.isfinite(matrix.dequantise()).all()
        assert (matrix.dequantise() - WEIGHT).abs().mean() < 1


def test_a_row_of_zeros_stays_one() -> None:
    weight = WEIGHT.clone()
    weight[3] = 0
    for matrix in (
        nearest(weight, Grid(4, 32, torch.float32)),
        compensated(weight, HESSIAN, Grid(8, None, torch.half)),
    ):
        assert not matrix.dequantise()[3].any()


def test_the_same_is_rounded_the_same() -> None:
    grid = Grid(4, 32, torch.float32)
    assert torch.equal(compensated(WEIGHT, HESSIAN, grid).q, compensated(WEIGHT, HESSIAN, grid).q)


@pytest.mark.parametrize(
    ("name", "dtype", "within"), [("reference", torch.float32, 1e-5), ("auto", torch.bfloat16, 0.01)]
)
def test_inputs_are_added_up_in_parts(name: str, dtype: torch.dtype, within: float) -> None:
    rows = torch.randn(2050, 400, generator=GIVEN)
    found = input_hessian(rows, select(torch.device("cpu"), dtype, name))
    assert torch.equal(found, found.T)
    wanted = rows.T @ rows
    assert (found - wanted).norm() < within * wanted.norm()
