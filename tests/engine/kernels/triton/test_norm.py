"""The norms against the reference: widths that fill no tile, rows that lie apart, each rounding in its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.reference import Reference
from tests.engine.kernels.triton.conftest import assert_same, noise

pytest.importorskip("triton")

from engine.kernels.triton.rowwise import add_rms_norm, norm_heads, rms_norm
from tests.histories import examples

REFERENCE = Reference(torch.float32)
EPS = 1e-5


@pytest.mark.parametrize("width", [1, 48, 576, 1024, 4096])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm_rounds_as_the_reference(
    where: torch.device, dtype: torch.dtype, width: int, wide_weight: bool
) -> None:
    x = noise(3, width, dtype=dtype).to(where)
    weight = noise(width, dtype=torch.float32 if wide_weight else dtype, seed=1).to(where)
    assert_same(rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("wide_weight", [False, True])
def test_the_sum_and_its_norm_replace_what_they_are_made_of(
    where: torch.device, dtype: torch.dtype, wide_weight: bool
) -> None:
    x, residual = (noise(4, 200, dtype=dtype, seed=seed).to(where) for seed in (0, 1))
    weight = noise(200, dtype=torch.float32 if wide_weight else dtype, seed=2).to(where)
    normed, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    found = add_rms_norm(x, residual, weight, EPS)
    assert found[0] is x
    assert found[1] is residual
    assert torch.equal(residual, total)
    assert_same(x, normed)


def test_rows_may_lie_apart(where: torch.device) -> None:
    wide = noise(5, 3, 96, dtype=torch.bfloat16).to(where)
    weight = noise(96, dtype=torch.bfloat16, seed=1).to(where)
    assert_same(rms_norm(wide[:, 1], weight, EPS), REFERENCE.rms_norm(wide[:, 1], weight, EPS))
    x, residual = wide[:, 0], wide[:, 2]
    kept = wide[:, 1].clone()
    normed, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    add_rms_norm(x, residual, weight, EPS)
    assert_same(wide[:, 0], normed)
    assert torch.equal(wide[:, 1], kept)
    assert torch.equal(wide[:, 2], total)


def test_heads_may_be_a_part_of_a_packed_product(where: torch.device, dtype: torch.dtype) -> None:
    packed = noise(5, 9, 80, dtype=dtype).to(where)
    weight, before = noise(80, dtype=dtype, seed=1).to(where), packed.clone()
    x = packed[:, 2:6]
    assert_same(rms_norm(x, weight, EPS), REFERENCE.rms_norm(x, weight, EPS))
    assert torch.equal(packed, before)


@settings(max_examples=examples(6, 20), deadline=None)
@given(
    tokens=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    head_dim=st.sampled_from([2, 64, 80, 256]),
    beside=st.integers(0, 1),
    wide_weight=st.booleans(),
)
def test_queries_and_keys_are_normed_where_they_are(
    where: torch.device, tokens: int, kv_heads: int, share: int, head_dim: int, beside: int, wide_weight: bool
) -> None:
    count = (share + 2) * kv_heads
    packed = noise(tokens, count + beside, head_dim, dtype=torch.bfloat16, seed=share).to(where)
    weights = noise(2, head_dim, dtype=torch.float32 if wide_weight else torch.bfloat16, seed=1).to(where)
    before, heads = packed.clone(), packed[:, :count]
    expected = REFERENCE.norm_heads(heads.clone(), *weights, kv_heads, EPS)
    found = norm_heads(heads, *weights, kv_heads, EPS)
    assert found is heads
    assert_same(found, expected)
    assert torch.equal(packed[:, count - kv_heads :], before[:, count - kv_heads :])


def test_no_rows_are_no_work(where: torch.device) -> None:
    nothing, weight = torch.empty(0, 64, device=where), torch.ones(64, device=where)
    assert rms_norm(nothing, weight, EPS).shape == (0, 64)
    assert add_rms_norm(nothing, nothing.clone(), weight, EPS)[1].shape == (0, 64)


def test_values_that_square_beyond_half_precision_are_normed(where: torch.device) -> None:
    x, weight = torch.full((1, 64), 6e4, dtype=torch.float16, device=where), torch.ones(64, device=where).half()
    assert rms_norm(x, weight, EPS).eq(1).all()
