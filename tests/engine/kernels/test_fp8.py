"""Products of 8-bit floats: what they are by their definition, and how far that is from the weights' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.fp8 import FP8, LARGEST, fp8_linear, quantise_rows

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no tensor cores for 8-bit floats")
    if device.type == "cpu" and TORCH < (2, 13):
        pytest.skip("torch has one scale for a whole matrix here")
    return device


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_largest_of_each_row_becomes_the_largest_there_is(device: torch.device) -> None:
    x = torch.stack((noise(48), noise(48) * 1e3, noise(48) * 1e-3, torch.zeros(48).bfloat16())).to(device)
    values, scales = quantise_rows(x)
    assert values.dtype == FP8
    assert values.float().abs().amax(-1).tolist() == [LARGEST, LARGEST, LARGEST, 0]
    # Three bits of mantissa: 1/16 of a value, or half the step between the smallest.
    error = (values.float() * scales - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scales * 2**-10).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (72, 50), (8, 1)])
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_rounded_values(
    device: torch.device, inputs: int, outputs: int, rows: int, biased: bool
) -> None:
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1), noise(outputs, seed=2) if biased else None
    found = fp8_linear(weight.to(device), None if bias is None else bias.to(device))(x.to(device)).cpu()
    (a, a_scales), (b, b_scales) = quantise_rows(x), quantise_rows(weight)
    exact = (a.double() * a_scales) @ (b.double() * b_scales).T + (0 if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)


def test_a_product_is_near_that_of_the_weights(device: torch.device) -> None:
    x, weight = noise(16, 512), noise(256, 512, seed=1)
    # Outputs and rows of very different sizes, each with a scale of its own.
    weight *= torch.logspace(-3, 3, 256)[:, None]
    x *= torch.logspace(-3, 3, 16)[:, None]
    found = fp8_linear(weight.to(device), None)(x.to(device)).cpu().double()
    exact = x.double() @ weight.double().T
    # One scale for all of a matrix would leave nothing of its small rows: an error of 0.04.
    lengths = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((found - exact).abs() / lengths).max() < 0.01


def test_no_rows_are_no_work(device: torch.device) -> None:
    assert fp8_linear(noise(24, 40).to(device), None)(torch.empty(0, 40, device=device)).shape == (0, 24)
