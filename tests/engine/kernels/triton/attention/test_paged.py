"""The attention kernels against the same attention in plain torch, on caches that are NaN wherever nobody may look."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.ragged import ragged_attention
from tests.engine.kernels.ragged_cases import Case, Lengths, Shape, ragged_case
from tests.exhaustive import few
from tests.histories import examples

pytest.importorskip("triton")

from engine.kernels.triton.attention import paged as attention
from engine.kernels.triton.attention.paged import Division, PagedAttention, Tiles

#: A decode's tile is 64 places at a head_dim of 128, and 128 at 64; a prompt's 128 both ways.
DECODES = [(1, 1), (1, 64), (1, 65), (1, 150)]
MIXED = [(1, 20), (40, 40), (3, 33), (37, 170), (1, 129)]


def check(case: Case, where: torch.device, softcap: float | None = None, multiprocessors: int = 1) -> Tensor:
    """That the kernels find what the reference finds in fp32; on so small a GPU that no walk is divided."""
    case = case.on(where)
    found = PagedAttention(multiprocessors)(case.query, case.cache, case.batch, case.scale, softcap)
    wide = case.wide()
    expected = ragged_attention(wide.query, wide.cache, wide.batch, wide.scale, softcap)
    assert found.dtype == case.query.dtype
    assert not case.query.is_contiguous() or len(case.query) < 2
    assert found.is_contiguous()
    near = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)
    return found


@pytest.mark.parametrize(
    "dtype", few([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16), ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_ragged_steps_in_every_dtype(where: torch.device, dtype: torch.dtype, lengths: Lengths) -> None:
    check(ragged_case(Shape(heads=4, kv_heads=1, head_dim=128, dtype=dtype), lengths), where)


@pytest.mark.parametrize(("heads", "kv_heads"), few([(3, 3), (6, 2), (7, 1), (8, 1), (20, 1)], (6, 2)))
def test_any_number_of_heads_shares_a_kv_head(where: torch.device, heads: int, kv_heads: int) -> None:
    lengths = [(1, 70), (12, 30), (50, 60)]
    check(ragged_case(Shape(heads, kv_heads, head_dim=32), lengths), where)


@pytest.mark.parametrize("head_dim", few([8, 64, 80, 96, 256], 80))
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16), ids=["fp32", "bf16"])
def test_head_dims_that_fill_no_tile(where: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(ragged_case(Shape(2, 1, head_dim, dtype=dtype), [(1, 50), (20, 200)]), where)


@pytest.mark.parametrize("block", few([1, 7, 16, 32, 48, 130], 7, 130))
def test_block_sizes_that_divide_no_tile(where: torch.device, block: int) -> None:
    # Full pages, one place more, one less.
    lengths = [(1, 2 * block), (1, block + 1), (9, 4 * block + 5), (min(block, 30), block)]
    check(ragged_case(Shape(2, 1, 64, block=block), lengths), where)


@pytest.mark.parametrize(
    ("window", "softcap"), few(itertools.product((1, 5, 64, 100, 1000), (None, 0.8)), (5, 0.8), (100, None))
)
def test_windows_and_caps(where: torch.device, window: int, softcap: float | None) -> None:
    check(ragged_case(Shape(2, 1, 128, window=window), [(1, 150), (1, 7), (70, 300), (130, 130)]), where, softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_a_cap_holds_where_scores_are_far_beyond_it(where: torch.device) -> None:
    case = ragged_case(Shape(2, 1, 64), [(1, 30), (20, 40)])
    case = replace(case, query=case.query * 100)
    assert check(case, where, softcap=30.0).isfinite().all()


@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_rows_of_no_sequence_are_zero(where: torch.device, lengths: Lengths) -> None:
    case = ragged_case(Shape(4, 1, 64), lengths, padding=2, spare_rows=30)
    case.query[-30:] = float("nan")
    found = check(case, where)
    assert (found[-30:] == 0).all()
    assert found.isfinite().all()


def test_a_step_of_padding_alone_is_zero(where: torch.device) -> None:
    case = ragged_case(Shape(4, 1, 64), [], padding=4, spare_rows=4).on(where)
    assert (PagedAttention()(case.query, case.cache, case.batch, case.scale) == 0).all()
    nothing = ragged_case(Shape(4, 1, 64), [], padding=4).on(where)
    assert PagedAttention()(nothing.query, nothing.cache, nothing.batch, 1.0).shape == (0, 4, 64)


@pytest.mark.parametrize("window", few([None, 200], 200), ids=["", "windowed"])
def test_walks_in_parts_are_walks_as_a_whole(where: torch.device, window: int | None) -> None:
    """Walks of one round, of a few and of many beside each other; prompts behind a cached prefix too."""
    shape = Shape(4, 1, 128, window=window)
    case = ragged_case(shape, [(1, 1), (1, 64), (1, 130), (1, 300), (3, 257)], padding=1, spare_rows=1)
    whole = check(case, where)
    torch.testing.assert_close(check(case, where, multiprocessors=10), whole, atol=1e-5, rtol=1e-5)
    check(ragged_case(shape, [(5, 1100), (1, 700)]), where, multiprocessors=30)


def test_more_parts_than_are_joined_at_a_time(where: torch.device) -> None:
    check(ragged_case(Shape(2, 1, 128, dtype=torch.bfloat16), [(1, 64 * 18 + 3)]), where, multiprocessors=132)


@pytest.mark.parametrize("head_dim", few([64, 128, 256], 128))
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.bfloat16), ids=["fp32", "bf16"])
def test_tiles_for_less_shared_memory(
    where: torch.device, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "_limits", lambda: (1, 101_376))
    check(ragged_case(Shape(2, 1, head_dim, dtype=dtype, window=40), [(1, 50), (20, 70)]), where)


def test_bounds_that_are_far_above_what_is_there_change_nothing(where: torch.device) -> None:
    case = ragged_case(Shape(4, 1, 128), [(1, 100), (1, 40)])
    loose = replace(case, batch=replace(case.batch, most_places=9000))
    torch.testing.assert_close(check(loose, where), check(case, where), atol=1e-5, rtol=1e-5)


def test_scratch_memory_stays_where_it_is(where: torch.device) -> None:
    kernels = PagedAttention(132)
    first, second = (ragged_case(Shape(2, 1, 128), [(1, n)], seed=n).on(where) for n in (300, 150))
    outputs, places = [], set()
    for case in (first, second, first):
        outputs.append(kernels(case.query, case.cache, case.batch, case.scale))
        places.add(kernels._scratch.data_ptr())
    assert torch.equal(outputs[0], outputs[2])
    assert len(places) == 1


def test_a_head_dim_without_tiles_is_refused(where: torch.device) -> None:
    case = ragged_case(Shape(2, 1, 264), [(1, 3)]).on(where)
    with pytest.raises(EngineError, match="head_dim of 264"):
        PagedAttention()(case.query, case.cache, case.batch, 1.0)


@given(data=st.data())
@settings(max_examples=examples(4, 10), deadline=None)
def test_any_small_step(where: torch.device, data: st.DataObject) -> None:
    share, kv_heads = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (5, 1)]))
    shape = Shape(
        share * kv_heads,
        kv_heads,
        head_dim=data.draw(st.sampled_from([8, 16, 24])),
        block=data.draw(st.sampled_from([1, 3, 16])),
        window=data.draw(st.sampled_from([None, None, 1, 9, 130])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    queries = st.sampled_from([1, 1, 2, 6, 17, 33])
    ahead = st.sampled_from([0, 0, 1, 30, 127, 200])
    lengths = [
        (count, count + before)
        for count, before in data.draw(st.lists(st.tuples(queries, ahead), min_size=1, max_size=3))
    ]
    padding = data.draw(st.integers(0, 2))
    case = ragged_case(shape, lengths, padding=padding, spare_rows=padding, seed=data.draw(st.integers(0, 99)))
    check(case, where, data.draw(st.sampled_from([None, 0.5])), data.draw(st.sampled_from([1, 8])))


@pytest.mark.cuda
def test_a_graph_serves_other_lengths_tables_and_slots(where: torch.device) -> None:
    """Of up to as many sequences and places as it was recorded for."""
    shape, kernels = Shape(8, 2, 128, dtype=torch.bfloat16), PagedAttention()
    first = ragged_case(shape, [(1, 900), (1, 1), (1, 300)]).on(where)
    query, cache = first.query, torch.zeros(2, 200, *first.cache.shape[2:], dtype=shape.dtype, device=where)
    tables = torch.zeros(8, 100, dtype=torch.int32, device=where)
    batch = replace(first.batch, tables=tables, most_places=1024)
    kernels(query, cache, batch, first.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels(query, cache, batch, first.scale)
    for lengths, padding in (([(1, 900), (1, 1), (1, 300)], 0), ([(1, 65), (1, 1024)], 1), ([(1, 17)], 2)):
        case = ragged_case(shape, lengths, padding=padding, spare_rows=padding, seed=padding).on(where)
        query.copy_(case.query)
        cache[:, : case.cache.shape[1]] = case.cache
        tables[: len(case.batch.tables), : case.batch.tables.shape[1]] = case.batch.tables
        for name in ("query_starts", "kv_lens", "table_rows"):
            getattr(batch, name).copy_(getattr(case.batch, name))
        graph.replay()
        wide = case.wide()
        expected = ragged_attention(wide.query, wide.cache, wide.batch, wide.scale)
        torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)


@given(
    programs=st.integers(1, 20_000),
    rounds=st.integers(1, 3000),
    longest=st.sampled_from([512, 2048, 1 << 30]),
    least=st.integers(1, 8),
    multiprocessors=st.integers(1, 200),
)
def test_every_walk_fits_into_its_parts(
    programs: int, rounds: int, longest: int, least: int, multiprocessors: int
) -> None:
    tiles = Tiles(16, 64, 4, resident=2, least=least, longest=longest)
    division = Division.of(programs, rounds, tiles, multiprocessors)
    for found in {1, 2, least, rounds // 2, rounds} - {0}:
        if found <= rounds:
            length = min(max(-(-found // division.even), least), division.longest)
            assert -(-found // length) <= division.parts
    # Scratch memory has room for all of them, and the grid does not grow without bound.
    assert division.parts == 1 or division.parts * programs * tiles.rows <= 1 << 16
    assert division.parts * programs <= max(programs, 8 * multiprocessors)
    if programs >= 2 * multiprocessors and rounds * 64 <= longest:
        assert division.parts == 1
