"""Turning queries and keys and caching K and V, in one launch, against the reference's steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import Reference
from tests.engine.kernels.triton.conftest import noise
from tests.exhaustive import few
from tests.histories import examples

pytest.importorskip("triton")

from engine.kernels.triton.attention.rope_kv import rope_and_write

REFERENCE = Reference(torch.float32)


def rotation(tokens: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = noise(tokens, 1, rotary_dim // 2, seed=3) * 3
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def check(
    heads: Tensor, rotary_dim: int, kv_heads: int, slots: list[int], block_size: int, where: torch.device
) -> None:
    """Queries, cache and what of `heads` is not theirs are equal: a GPU rounds each product before the sum too."""
    heads = heads.to(where)
    cos, sin = (part.to(where) for part in rotation(len(heads), rotary_dim, heads.dtype))
    cache = noise(2, 4, block_size, kv_heads, heads.shape[2], dtype=heads.dtype, seed=5).to(where)
    places, expected_cache = torch.tensor(slots, dtype=torch.int64, device=where), cache.clone()
    none = torch.empty(0, dtype=torch.int32, device=where)
    batch = RaggedBatch(places, none, none, none, none, 1, 1)
    expected = REFERENCE.rope_and_write(heads.clone(), cos, sin, expected_cache, batch)
    found = rope_and_write(heads, cos, sin, cache, places)
    assert found.shape == expected.shape
    assert found.stride()[1:] == (heads.shape[2], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("queries", "kv_heads", "head_dim", "rotary_dim"),
    few(
        [(4, 2, 16, 16), (32, 8, 128, 128), (7, 1, 80, 80), (6, 3, 32, 8), (3, 1, 96, 72), (8, 4, 256, 256)],
        *[(7, 1, 80, 80), (3, 1, 96, 72)],
    ),
)
def test_queries_turn_and_keys_and_values_are_cached(
    where: torch.device, dtype: torch.dtype, queries: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    heads = noise(5, queries + 2 * kv_heads, head_dim, dtype=dtype)
    check(heads, rotary_dim, kv_heads, [0, 11, 3, 5, 7], 3, where)


@settings(max_examples=examples(6, 20), deadline=None)
@given(
    slots=st.lists(st.integers(0, 27), max_size=6, unique=True),
    padding=st.integers(0, 3),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    half=st.sampled_from([1, 4, 20]),
    still=st.sampled_from([0, 2, 24]),
)
def test_padding_writes_nothing(
    where: torch.device, slots: list[int], padding: int, kv_heads: int, share: int, half: int, still: int
) -> None:
    places = slots + [-1] * padding
    heads = noise(len(places), (share + 2) * kv_heads, 2 * half + still, dtype=torch.bfloat16)
    check(heads, 2 * half, kv_heads, places, 7, where)


def test_heads_may_be_a_view_of_a_wider_product(where: torch.device) -> None:
    wide = noise(4, 9, 16, dtype=torch.bfloat16)
    kept = wide.clone().to(where)
    found = wide.to(where)
    cos, sin = (part.to(where) for part in rotation(4, 16, torch.bfloat16))
    cache = torch.zeros(2, 1, 4, 2, 16, dtype=torch.bfloat16, device=where)
    rope_and_write(found[:, :8], cos, sin, cache, torch.arange(4, device=where))
    assert torch.equal(found[:, :4], REFERENCE.rope(kept[:, :4], cos, sin))
    # Keys and values are read and stay; what is beside them is not even read.
    assert torch.equal(found[:, 4:], kept[:, 4:])
