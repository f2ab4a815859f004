"""Products with 4-bit and 8-bit weights against the same weights written out, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.layer import PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from tests.engine.kernels.triton.conftest import noise
from tests.exhaustive import few
from tests.histories import examples

pytest.importorskip("triton")

from engine.kernels.gpu import Gpu
from engine.kernels.triton.products.quantised import MOST_ROWS, int4_linear, int8_linear, splits

#: Of the result, against its norm: the rounding of the result, and of partial sums in fp32.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


def on(where: torch.device, weight: Int4Weight | Int8Weight) -> Int4Weight | Int8Weight:
    zeros, minima = (None if of is None else of.to(where) for of in (weight.zeros, weight.minima))
    return replace(weight, packed=weight.packed.to(where), scales=weight.scales.to(where), zeros=zeros, minima=minima)


def prepared(weight: Int4Weight | Int8Weight, bias: Tensor | None, where: torch.device) -> PreparedLinear:
    moved, bias = on(where, weight), None if bias is None else bias.to(where)
    return int4_linear(moved, bias) if isinstance(moved, Int4Weight) else int8_linear(moved, bias)


def check(weight: Int4Weight | Int8Weight, rows: int, dtype: torch.dtype, biased: bool, where: torch.device) -> None:
    outputs, inputs = weight.shape
    x = noise(rows, inputs, dtype=dtype, seed=rows)
    bias = noise(outputs, dtype=dtype, seed=2) if biased else None
    found = prepared(weight, bias, where)(x.to(where)).cpu()
    expected = x.double() @ weight.dequantise().double().T + (0 if bias is None else bias.double())
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("rows", few([1, 17, MOST_ROWS, MOST_ROWS + 1], 17, MOST_ROWS + 1))
@pytest.mark.parametrize("symmetric", [True, False])
def test_4_bit_products_are_those_of_the_weights(
    where: torch.device, dtype: torch.dtype, rows: int, symmetric: bool
) -> None:
    weight = Int4Weight.quantise(noise(72, 640, dtype=dtype), 128, symmetric=symmetric)
    check(weight, rows, dtype, rows == 17, where)


@pytest.mark.parametrize("rows", few([1, 17, MOST_ROWS, MOST_ROWS + 1], 17, MOST_ROWS + 1))
@pytest.mark.parametrize("group", [None, 128])
def test_8_bit_products_are_those_of_the_weights(
    where: torch.device, dtype: torch.dtype, rows: int, group: int | None
) -> None:
    check(Int8Weight.quantise(noise(72, 640, dtype=dtype), group), rows, dtype, rows == 17, where)


@settings(max_examples=examples(6, 20), deadline=None)
@given(
    rows=st.integers(0, 5),
    outputs=st.integers(1, 140),
    groups=st.integers(1, 4),
    group=st.sampled_from([16, 32, 48, 96, 256]),
    biased=st.booleans(),
    bits=st.sampled_from(["symmetric", "zeros", "int8"]),
)
def test_any_group_and_any_width(
    where: torch.device, rows: int, outputs: int, groups: int, group: int, biased: bool, bits: str
) -> None:
    plain = noise(outputs, groups * group, dtype=torch.bfloat16, seed=groups)
    weight = Int8Weight.quantise(plain, group) if bits == "int8" else None
    check(
        weight or Int4Weight.quantise(plain, group, symmetric=bits == "symmetric"), rows, torch.bfloat16, biased, where
    )


@pytest.mark.parametrize("inputs", [40, 200])
def test_inputs_may_end_within_a_tile(where: torch.device, inputs: int) -> None:
    plain = noise(24, inputs, dtype=torch.bfloat16)
    for rows in (3, MOST_ROWS + 1):
        for symmetric in (True, False):
            check(Int4Weight.quantise(plain, inputs, symmetric=symmetric), rows, torch.bfloat16, False, where)
        check(Int8Weight.quantise(plain), rows, torch.bfloat16, False, where)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_lies_behind_a_row_is_not_read(where: torch.device, bits: int) -> None:
    plain = noise(24, 200)
    weight = Int4Weight.quantise(plain, 200) if bits == 4 else Int8Weight.quantise(plain)
    wide = torch.full((3, 256), float("nan"), dtype=torch.float16)
    wide[:, :200] = noise(3, 200)
    found = prepared(weight, None, where)(wide.to(where)[:, :200]).cpu()
    torch.testing.assert_close(found.float(), wide[:, :200].float() @ weight.dequantise().T, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_comes_out_alike_in_any_company(where: torch.device, bits: int) -> None:
    plain = noise(40, 1280, dtype=torch.bfloat16)
    weight = Int4Weight.quantise(plain, 128) if bits == 4 else Int8Weight.quantise(plain)
    linear = prepared(weight, None, where)
    assert splits(40, len(weight.packed)) > 1
    x = noise(20, 1280, dtype=torch.bfloat16, seed=1).to(where)
    together = linear(x)
    assert torch.equal(linear(x), together)
    for rows in (slice(0, 1), slice(3, 12)):
        assert torch.equal(linear(x[rows]), together[rows])


def test_sums_are_split_until_the_device_is_full_and_no_further() -> None:
    # Of Llama 3.1 8B: q, k, v; output; gate and up; down.
    assert [splits(outputs, inputs // 128) for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096))] == [
        6,
        8,
        2,
    ]
    assert splits(4096, 14336 // 128) == 9
    assert splits(128256, 32) == 1
    assert splits(16, 1) == 1


@pytest.mark.parametrize("group", [16, 32])
def test_weights_with_minima_or_small_groups_are_rounded_to_8_bits(where: torch.device, group: int) -> None:
    q = torch.randint(0, 16, (72, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scales = noise(64 // group, 72).abs().half()
    weight = Int4Weight.pack(q, scales, None, group, -8 * scales if group == 32 else None)
    rounded = Int8Weight.quantise(weight.dequantise(), 32)
    x = noise(3, 64, dtype=torch.bfloat16)
    kernels = Gpu(torch.bfloat16, multiprocessors=1)
    product = kernels.prepare_quantised(on(where, weight), None)(x.to(where)).cpu()
    assert torch.equal(product, prepared(rounded, None, where)(x.to(where)).cpu())
    assert kernels.weight_bytes == rounded.nbytes
