"""Weights of 4 and 8 bits: what rounding may lose, and where each value lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.packed import Int4Weight, Int8Weight


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)


@settings(max_examples=50, deadline=None)
@given(outputs=st.integers(1, 9), groups=st.integers(1, 5), group=st.sampled_from([16, 32, 48, 64, 96, 128, 256]))
def test_packing_loses_no_value(outputs: int, groups: int, group: int) -> None:
    inputs = groups * group
    generator = torch.Generator().manual_seed(groups)
    q4 = torch.randint(0, 16, (outputs, inputs), generator=generator)
    q8 = torch.randint(-127, 128, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator, dtype=torch.uint8)
    ones = torch.ones(groups, outputs)
    assert torch.equal(Int4Weight.pack(q4, ones, None, group).dequantise(), q4.float() - 8)
    spread = zeros.T.float().repeat_interleave(group, 1)
    assert torch.equal(Int4Weight.pack(q4, ones, zeros, group).dequantise(), q4.float() - spread)
    assert torch.equal(Int8Weight.pack(q8, ones, group).dequantise(), q8.float())


@pytest.mark.parametrize("inputs", [1, 7, 200])
def test_one_group_may_have_any_length(inputs: int) -> None:
    q4 = torch.arange(3 * inputs).view(3, inputs) % 16
    ones = torch.ones(1, 3)
    assert torch.equal(Int4Weight.pack(q4, ones, None, inputs).dequantise(), q4.float() - 8)
    assert torch.equal(Int8Weight.pack(q4, ones, inputs).dequantise(), q4.float())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, 384])
def test_4_bits_are_half_a_step_off_at_most(symmetric: bool, group: int) -> None:
    weight = weights(6, 384)
    found = Int4Weight.quantise(weight, group, symmetric=symmetric)
    step = found.scales.T.repeat_interleave(group, 1)
    # A zero point is rounded too: another half.
    assert ((found.dequantise() - weight).abs() <= step * (0.5 if symmetric else 1.0) + 1e-6).all()


def test_zero_points_halve_the_error_of_what_lies_to_one_side() -> None:
    weight = weights(6, 256).abs()
    errors = [
        (Int4Weight.quantise(weight, 128, symmetric=symmetric).dequantise() - weight).norm().item()
        for symmetric in (False, True)
    ]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("group", [None, 64, 128])
def test_8_bits_are_half_a_step_off_at_most(group: int | None) -> None:
    weight = weights(6, 384)
    found = Int8Weight.quantise(weight, group)
    step = found.scales.T.repeat_interleave(found.group, 1)
    assert ((found.dequantise() - weight).abs() <= step / 2 + 1e-6).all()


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 64)
    assert Int4Weight.quantise(weight, 32).dequantise().eq(0).all()
    assert Int4Weight.quantise(weight, 32, symmetric=False).dequantise().eq(0).all()
    assert Int8Weight.quantise(weight).dequantise().eq(0).all()


def test_half_the_bytes_and_a_quarter() -> None:
    weight = weights(64, 256, torch.bfloat16)
    assert Int8Weight.quantise(weight).packed.nbytes * 2 == weight.nbytes
    assert Int4Weight.quantise(weight, 128).packed.nbytes * 4 == weight.nbytes


@pytest.mark.parametrize("group", [0, -128, 8, 24, 100, 512])
def test_groups_that_tiles_cannot_keep_apart_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group={group} must be a multiple of 16"):
        Int4Weight.quantise(weights(4, 256), group)
    with pytest.raises(ValueError, match=f"group={group} must be a multiple of 16"):
        Int8Weight.quantise(weights(4, 256), group)
