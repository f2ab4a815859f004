"""Gated activations against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels.reference import Reference
from tests.engine.kernels.triton.conftest import assert_same, noise

pytest.importorskip("triton")

from engine.kernels.triton.rowwise import gelu_tanh_mul, silu_mul

REFERENCE = Reference(torch.float32)
# The interpreter's numpy says so where 1 + exp(-gate) becomes infinite, as it is meant to.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
BOTH = pytest.mark.parametrize(
    ("kernel", "plain"), [(silu_mul, REFERENCE.silu_mul), (gelu_tanh_mul, REFERENCE.gelu_tanh_mul)]
)


@BOTH
@pytest.mark.parametrize("width", [1, 96, 1024, 1432])
def test_each_rounding_is_in_its_place(
    where: torch.device,
    dtype: torch.dtype,
    kernel: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    width: int,
) -> None:
    gate_up = noise(3, 2 * width, dtype=dtype).to(where)
    # Rounded twice, so a unit may turn twice.
    assert_same(kernel(gate_up), plain(gate_up), units=2)


@BOTH
def test_rows_may_lie_apart(
    where: torch.device, kernel: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> None:
    gate_up = noise(4, 3, 40).to(where)[:, 1]
    assert_same(kernel(gate_up), plain(gate_up))


@BOTH
def test_large_values_saturate(
    where: torch.device, kernel: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> None:
    gate = torch.tensor([-1e30, -300.0, -50.0, -0.0, 0.0, 50.0, 1e4, 1e30])
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None].to(where)
    found = kernel(gate_up)
    assert not found.isnan().any()
    assert_same(found, plain(gate_up))


@BOTH
def test_no_rows_are_no_work(
    where: torch.device, kernel: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> None:
    assert kernel(torch.empty(0, 8, device=where)).shape == plain(torch.empty(0, 8)).shape == (0, 4)
