"""The product of a single row against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.fp8 import multiplies_fp8, quantise_rows
from tests.engine.kernels.triton.conftest import assert_same, noise

pytest.importorskip("triton")

from engine.kernels.gpu import Gpu
from engine.kernels.triton.products.one_row import one_row_product


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (7, 1024), (12, 2304), (8, 1000)])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_it_is_the_product(where: torch.device, dtype: torch.dtype, outputs: int, inputs: int, biased: bool) -> None:
    x, weight = noise(1, inputs, dtype=dtype), noise(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    bias = noise(outputs, dtype=dtype, seed=2) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
    found = one_row_product(x.to(where), weight.to(where), None if bias is None else bias.to(where))
    assert_same(found, expected)


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 4096), (5, 1000)])
def test_8_bit_floats_are_widened_and_scaled(where: torch.device, outputs: int, inputs: int) -> None:
    if where.type == "cuda" and not multiplies_fp8(where):
        pytest.skip("no 8-bit floats")
    x, bias = noise(1, inputs, dtype=torch.bfloat16), noise(outputs, dtype=torch.bfloat16, seed=2)
    values, scales = quantise_rows(noise(outputs, inputs, seed=1))
    expected = x.double() @ (values.double()[:, :inputs] * scales).T + bias.double()
    found = one_row_product(x.to(where), values.to(where), bias.to(where), scales.to(where))
    assert_same(found, expected.bfloat16())


@pytest.mark.cuda
def test_one_row_and_several_have_the_same_product() -> None:
    linear = Gpu(torch.bfloat16).prepare_linear(noise(64, 256, dtype=torch.bfloat16).cuda(), None)
    rows = noise(3, 256, dtype=torch.bfloat16, seed=1).cuda()
    assert_same(linear(rows[1:2]), linear(rows)[1:2], units=2)
