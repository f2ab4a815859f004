"""A cache of 8 bits in the native kernels: written as torch writes it, read for what is in it, and to the bit the
same in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.fp8 import FP8
from engine.kernels.native import load_library
from engine.kernels.ragged import ragged_attention
from engine.models import load_model
from tests.engine.deterministic.logits import Steps
from tests.engine.kernels.narrow import KINDS, narrow, widen, width, write
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.native.test_kernels import LENGTHS, SHAPES
from tests.engine.kernels.ragged_cases import Case, Shape, ragged_case
from tests.engine.random_models import FAMILIES, write_model

CPU = torch.device("cpu")


def packed(case: Case, kind: str) -> tuple[Case, Tensor]:
    """The case over a cache of that kind, by torch; and what is then in it, in fp32."""
    cache = narrow(case.cache, kind)
    return replace(case, query=case.query.float(), cache=cache), widen(cache, kind)


@pytest.mark.parametrize("head_dim", [8, 24, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_torch_writes_to_the_bit(make: Make, kind: str, head_dim: int) -> None:
    tokens, heads, kv_heads = 300, 2, 3
    x = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(1))
    # From numbers too small for either kind to numbers too large for floats of 8 bits.
    x *= torch.logspace(-5, 4, tokens)[:, None, None]
    x[5], x[6], x[7] = 0.0, -0.0, 1e-38
    # Halfway between two of either kind.
    x[8], x[9, :, 1:] = 0.001953125 * 2.5, 0.5
    x[9, :, 0] = 127
    still, none = torch.ones(tokens, 1, head_dim), torch.zeros(tokens, 1, head_dim)
    slots = torch.randperm(tokens + 20, generator=torch.Generator().manual_seed(2))[:tokens]
    expected = torch.zeros(2, 20, 16, kv_heads, width(kind, head_dim), dtype=torch.uint8)
    found = expected.clone()
    write(x[:-1, heads:-kv_heads], x[:-1, -kv_heads:], expected, slots[:-1], kind)
    kernels = make(torch.float32, 2, kv_cache_dtype=kind)
    assert kernels.cache_width(head_dim) == width(kind, head_dim)
    batch = ragged_case(Shape(heads, kv_heads, head_dim), [(tokens, tokens)]).batch
    batch = replace(batch, slots=torch.cat((slots[:-1], torch.tensor([-1]))))
    assert torch.equal(kernels.rope_and_write(x.clone(), still, none, found, batch), x[:, :heads])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_is_none_when_it_is_read(make: Make, kind: str, value: float) -> None:
    """Infinities are numbers to fp8: the largest ones."""
    x = torch.ones(1, 3, 8)
    x[0, 2, 3] = value
    cache = torch.zeros(2, 1, 1, 1, width(kind, 8), dtype=torch.uint8)
    case = ragged_case(Shape(1, 1, 8, block=1), [(1, 1)])
    batch = replace(case.batch, tables=torch.zeros(9, 1, dtype=torch.int32), slots=torch.zeros(1, dtype=torch.int64))
    kernels = make(torch.float32, 1, kv_cache_dtype=kind)
    query = kernels.rope_and_write(x, torch.ones(1, 1, 8), torch.zeros(1, 1, 8), cache, batch)
    found = kernels.paged_attention(query, cache, batch, 1.0)[0, 0, 3].item()
    assert found == (448 if value > 0 else -448) if kind == "fp8" and value == value else found != found


def test_every_float_of_eight_bits_is_read_exactly(make: Make) -> None:
    codes = torch.arange(256).to(torch.uint8)
    case = ragged_case(Shape(1, 1, 256, block=1), [(1, 1)])
    cache = torch.stack((torch.zeros_like(codes), codes)).view(2, 1, 1, 1, 256)
    batch = replace(case.batch, tables=torch.zeros(9, 1, dtype=torch.int32))
    for rows in (1, 5):
        query = torch.zeros(1, rows, 256)
        found = make(torch.float32, 1, kv_cache_dtype="fp8").paged_attention(query, cache, batch, 1.0)
        expected = codes.view(FP8).float().expand(1, rows, 256)
        torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("threads", "softcap"), [(1, None), (3, 0.8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_over_the_widened_cache(
    make: Make, kind: str, shape: Shape, threads: int, softcap: float | None
) -> None:
    case, wide = packed(ragged_case(shape, LENGTHS, padding=1, spare_rows=2), kind)
    kernels = make(torch.bfloat16, threads, kv_cache_dtype=kind)
    found = kernels.paged_attention(case.query, case.cache, case.batch, case.scale, softcap)
    expected = ragged_attention(case.query, wide, case.batch, case.scale, softcap)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_row_is_the_same_in_any_batch_and_wherever_its_table_begins(make: Make, kind: str) -> None:
    """Alone its keys are widened as they are read, in a chunk once for many rows."""
    shape = Shape(heads=6, kv_heads=2, head_dim=24, window=300)
    case, _ = packed(ragged_case(shape, [(64, 900), (1, 70)]), kind)
    whole = make(torch.float32, 1, kv_cache_dtype=kind).paged_attention(case.query, case.cache, case.batch, case.scale)
    for count, threads in ((1, 3), (5, 16), (64, 2)):
        batch = replace(
            case.batch,
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=case.batch.kv_lens[:1],
            table_rows=case.batch.table_rows[:1],
        )
        kernels = make(torch.float32, threads, kv_cache_dtype=kind)
        found = kernels.paged_attention(case.query[64 - count : 64], case.cache, batch, case.scale)
        assert torch.equal(found, whole[64 - count : 64])
    first = replace(case, lengths=case.lengths[:1], batch=batch)
    for dropped in (16, 30):
        step = first.later(dropped)
        assert torch.equal(kernels.paged_attention(case.query[:64], case.cache, step, case.scale), whole[:64])


@pytest.mark.parametrize("kind", KINDS)
def test_in_deterministic_mode_logits_depend_on_no_cut(tmp_path: Path, kind: str) -> None:
    if load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    folder = write_model(tmp_path, **FAMILIES["gemma3"])
    model = load_model(folder, "float32", CPU, "native", deterministic=True, kv_cache_dtype=kind)
    tokens = [(13 * i) % 300 + 5 for i in range(150)]
    steps = Steps(model)
    whole = steps.by_cuts(0, tokens, ())
    for slot, cuts in ((5, (1, 60, 149)), (6, range(100, 150)), (7, (64,))):
        assert torch.equal(steps.by_cuts(slot, tokens, cuts), whole)


def test_heads_of_no_multiple_of_eight_are_refused(make: Make) -> None:
    with pytest.raises(EngineError, match=r"kv_cache_dtype='int8' on native kernels .* heads of 12; serve"):
        make(torch.float32, 1, kv_cache_dtype="int8").prepare_attention(4, 2, 12, None)
