"""Products in fixed tiles: what plain torch finds, and for each row the same bits in any company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.fp8 import fp8_linear
from engine.kernels.triton.products.product import MOST_APART, fixed_fp8_linear, fixed_linear, parts_of, product
from engine.kernels.triton.rowwise import quantise_rows
from tests.engine.kernels.triton.conftest import noise
from tests.exhaustive import few


@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"),
    few(
        [(*shape, bias) for shape in ((130, 1100), (64, 64), (300, 40)) for bias in (False, True)],
        *[(130, 1100, True), (64, 64, False)],
    ),
)
def test_it_is_the_product(where: torch.device, dtype: torch.dtype, outputs: int, inputs: int, bias: bool) -> None:
    x, weight = noise(70, inputs, dtype=dtype).to(where), noise(outputs, inputs, dtype=dtype, seed=1).to(where)
    added = noise(outputs, dtype=dtype, seed=2).to(where) if bias else None
    found = fixed_linear(weight, added)(x)
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near * inputs**0.5 / 8)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16, torch.float32], torch.bfloat16))
def test_a_row_has_the_same_bits_in_any_company(where: torch.device, dtype: torch.dtype) -> None:
    outputs, inputs = 140, 1100
    x, weight = noise(65, inputs, dtype=dtype).to(where), noise(outputs, inputs, dtype=dtype, seed=1).to(where)
    bias = noise(outputs, dtype=dtype, seed=2).to(where)
    whole = product(x, weight, bias, dtype)
    sizes = range(1, 66) if where.type == "cuda" else (1, 33, 64)
    for size in sizes:
        assert torch.equal(product(x[-size:], weight, bias, dtype), whole[-size:]), size


def test_parts_in_one_program_or_in_several_give_the_same_bits(where: torch.device, dtype: torch.dtype) -> None:
    x, weight = noise(5, 1600, dtype=dtype).to(where), noise(130, 1600, dtype=dtype, seed=1).to(where)
    bias = noise(130, dtype=dtype, seed=2).to(where)
    assert parts_of(130, 1600 // 64)[0] > 1
    together, apart = (product(x, weight, bias, dtype, most_apart=most) for most in (0, MOST_APART))
    assert torch.equal(together, apart)


def test_eight_bits_as_the_ordinary_product_of_them(where: torch.device) -> None:
    x, weight = noise(9, 1200, dtype=torch.bfloat16).to(where), noise(48, 1200, dtype=torch.bfloat16, seed=1).to(where)
    bias = noise(48, dtype=torch.bfloat16, seed=2).to(where)
    linear = fixed_fp8_linear(weight, bias, quantise_rows)
    found, expected = linear(x), fp8_linear(weight, bias)(x)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=0.3)
    assert torch.equal(linear(x[3:4]), found[3:4])
    assert linear(x[:0]).shape == (0, 48)
