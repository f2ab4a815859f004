"""Deterministic attention on the device: what plain torch finds, and for each query the same bits however it is met."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.ragged import ragged_attention
from tests.engine.kernels.ragged_cases import Case, Lengths, Shape, ragged_case
from tests.exhaustive import few

pytest.importorskip("triton")

from engine.kernels.triton.attention import fixed as fixed_attention
from engine.kernels.triton.attention.fixed import FixedAttention

MIXED = [(1, 20), (40, 40), (3, 33), (37, 170), (1, 129)]
SHAPES = [Shape(4, 1, 64), Shape(6, 2, 16, window=30), Shape(3, 3, 80, block=7), Shape(4, 2, 256)]


def placed(case: Case, skipped: int = 0) -> Case:
    """With positions: each table begins `skipped` tokens after its sequence."""
    places = [torch.arange(kv_len - count, kv_len) + skipped for count, kv_len in case.lengths]
    spare = torch.zeros(len(case.query) - sum(map(len, places)), dtype=torch.int64)
    return replace(case, batch=replace(case.batch, positions=torch.cat((*places, spare))))


def attended(case: Case, where: torch.device, softcap: float | None = None, enough: int = 264) -> Tensor:
    on = case.on(where)
    assert case.batch.positions is not None
    batch = replace(on.batch, positions=case.batch.positions.to(where))
    return FixedAttention(enough)(on.query, on.cache, batch, on.scale, softcap)


@pytest.mark.parametrize(
    ("shape", "softcap", "dtype"),
    few(
        itertools.product(SHAPES, (None, 0.8), (torch.bfloat16, torch.float16, torch.float32)),
        (SHAPES[0], 0.8, torch.bfloat16),
        (SHAPES[1], None, torch.float32),
        (SHAPES[2], 0.8, torch.float32),
    ),
)
def test_it_is_attention(where: torch.device, shape: Shape, softcap: float | None, dtype: torch.dtype) -> None:
    case = ragged_case(replace(shape, dtype=dtype), MIXED, padding=2, spare_rows=3)
    found = attended(placed(case, 48), where, softcap)
    wide = case.wide()
    expected = ragged_attention(wide.query, wide.cache, wide.batch, wide.scale, softcap)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu().float(), expected, atol=near, rtol=near)


def only(case: Case, sequence: int, count: int, end: int) -> Case:
    """The same cache; of one sequence alone its `count` queries up to place `end`."""
    before = sum(n for n, _ in case.lengths[:sequence])
    n, kv_len = case.lengths[sequence]
    last = before + n - (kv_len - end)
    batch = replace(
        case.batch,
        slots=case.batch.slots[last - count : last],
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([end], dtype=torch.int32),
        table_rows=case.batch.table_rows[sequence : sequence + 1],
        most_queries=count,
        most_places=end,
    )
    alone = replace(case, batch=batch, query=case.query[last - count : last], lengths=[(count, end)])
    return alone


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(
    ("window", "softcap"), few([(None, None), (45, 0.8)], (45, 0.8)), ids=["", "windowed and capped"]
)
def test_a_query_has_the_same_bits_alone_in_chunks_and_in_any_batch(
    where: torch.device, monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(fixed_attention, "SPLIT", 64)
    lengths: Lengths = [(1, 20), (70, 90), (1, 70), (9, 200)]
    case = ragged_case(Shape(4, 2, 16, window=window), lengths)
    together = attended(placed(case), where, softcap)
    for sequence, count, end in [(1, 1, 90), (1, 30, 60), (3, 1, 195)]:
        before, (n, kv_len) = sum(n for n, _ in lengths[:sequence]), lengths[sequence]
        last = before + n - (kv_len - end)
        part = placed(only(case, sequence, count, end))
        for enough in (0, 264):  # walks in one program, and divided
            assert torch.equal(attended(part, where, softcap, enough), together[last - count : last])


@pytest.mark.usefixtures("in_order")
def test_where_a_windowed_table_begins_changes_nothing(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_attention, "SPLIT", 64)
    case = ragged_case(Shape(4, 2, 16, window=45), [(3, 200)])
    whole = attended(placed(case), where)
    for dropped in (1, 9):  # blocks of 16; the first query sees from place 153 on
        row = int(case.batch.table_rows[0])
        tables = case.batch.tables.clone()
        tables[row] = case.batch.tables[row].roll(-dropped)
        later = replace(case, lengths=[(3, 200 - 16 * dropped)])
        lens = torch.tensor([200 - 16 * dropped], dtype=torch.int32)
        later = replace(later, batch=replace(case.batch, tables=tables, kv_lens=lens))
        assert torch.equal(attended(placed(later, 16 * dropped), where), whole)


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 512), (33, 256)])
def test_heads_that_no_tile_holds_are_refused(where: torch.device, heads: int, head_dim: int) -> None:
    case = placed(ragged_case(Shape(heads, 1, head_dim), [(1, 3)]))
    with pytest.raises(EngineError, match=f"head_dim of {head_dim} with {heads} query heads"):
        attended(case, where)
