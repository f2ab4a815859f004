"""Rows of a ragged step that belong to no sequence."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.reference import Reference
from tests.engine.kernels.ragged_cases import Shape, ragged_case

LENGTHS = [(1, 1), (1, 40), (7, 7), (3, 33), (16, 16), (1, 16)]


def test_rows_of_no_sequence_are_zero_and_change_no_others() -> None:
    kernels = Reference(torch.float32)
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


def test_rope_and_write_turns_queries_and_keys_and_writes_where_slots_say() -> None:
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

    cache = case.cache.clone()
    query = Reference(torch.float32).rope_and_write(heads.clone(), cos, sin, cache, case.batch)
    torch.testing.assert_close(query, rotated[:, :4])
    torch.testing.assert_close(cache, expected, equal_nan=True)
    assert query.stride()[1:] == (16, 1)
