"""A ragged step is the same step as one in padded groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import Kernels
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fallback.sdpa import Sdpa
from engine.kernels.reference import Reference
from tests.engine.kernels.ragged_cases import Shape, ragged_case

LENGTHS = [(1, 1), (1, 40), (7, 7), (3, 33), (16, 16), (1, 16)]


@pytest.fixture(params=[Reference, Sdpa, Cpu])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return request.param(torch.float32)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(heads=6, kv_heads=3, head_dim=8, block=7), Shape(window=5), Shape(heads=8, kv_heads=1, window=40)],
    ids=str,
)
def test_a_ragged_step_is_the_same_as_in_groups(kernels: Kernels, shape: Shape, softcap: float | None) -> None:
    case = ragged_case(shape, LENGTHS)
    found = kernels.paged_attention(case.query, case.cache, case.batch, case.scale, softcap)
    expected = Reference(torch.float32).paged_attention(case.query, case.cache, case.grouped(), case.scale, softcap)
    torch.testing.assert_close(found, expected)
    assert found.isfinite().all()


def test_rows_of_no_sequence_are_zero_and_change_no_others(kernels: Kernels) -> None:
    plain, padded = ragged_case(Shape(), LENGTHS), ragged_case(Shape(), LENGTHS, padding=3, spare_rows=4)
    padded = replace(padded, cache=plain.cache, batch=replace(padded.batch, tables=plain.batch.tables))
    rows = torch.cat((plain.batch.table_rows, torch.zeros(3, dtype=torch.int32)))
    padded = replace(padded, batch=replace(padded.batch, table_rows=rows))
    query = torch.cat((plain.query, torch.full_like(plain.query[:4], float("nan"))))
    found = kernels.paged_attention(query, padded.cache, padded.batch, padded.scale)
    assert (found[-4:] == 0).all()
    torch.testing.assert_close(
        found[:-4], kernels.paged_attention(plain.query, plain.cache, plain.batch, plain.scale), atol=0, rtol=0
    )


def test_rope_and_write_turns_queries_and_keys_and_writes_where_slots_say(kernels: Kernels) -> None:
    case = ragged_case(Shape(), LENGTHS, padding=1, spare_rows=2)
    tokens = len(case.query)
    heads = torch.randn(tokens, 4 + 2 * 2, 16, generator=torch.Generator().manual_seed(3))
    angles = torch.randn(tokens, 1, 8, generator=torch.Generator().manual_seed(4))
    cos, sin = (torch.cat(pair, -1) for pair in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    rotated = Reference(torch.float32).rope(heads[:, :6], cos, sin)
    expected = case.cache.clone()
    flat = expected.view(2, -1, 2, 16)
    for token, slot in enumerate(case.batch.slots.tolist()):
        if slot >= 0:
            flat[0, slot], flat[1, slot] = rotated[token, 4:], heads[token, 6:]

    for batch, rows in ((case.batch, slice(None)), (case.grouped(), slice(-2))):
        cache = case.cache.clone()
        query = kernels.rope_and_write(heads[rows].clone(), cos[rows], sin[rows], cache, batch)
        torch.testing.assert_close(query, rotated[rows, :4])
        torch.testing.assert_close(cache, expected, equal_nan=True)
        assert query.stride()[1:] == (16, 1)
