"""Native operations against the reference, over shapes, threads and dtypes; and to the bit against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.ragged import ragged_attention
from engine.kernels.reference import Reference
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.ragged_cases import Case, Shape, ragged_case

REFERENCE = Reference(torch.float32)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def widened(case: Case) -> Case:
    """Queries in fp32, as they come; the cache as it was."""
    return replace(case, query=case.query.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (41, 25), (7, 1), (520, 131)])
def test_products_of_any_shape_are_those_of_the_rounded_weight(
    make: Make, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    kernels = make(dtype, 2)
    weight, bias = noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    linear = kernels.prepare_linear(weight.to(dtype), bias)
    # CPUs that multiply bf16 take rows so as well.
    rows_in = dtype if kernels.rounds_rows else torch.float32
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 300):
        x = noise(rows, inputs, seed=rows)
        expected = x.to(rows_in).double() @ weight.to(dtype).double().T + bias
        torch.testing.assert_close(linear(x).double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [600, 1103])
def test_a_row_of_a_product_is_the_same_beside_any_others(make: Make, dtype: torch.dtype, inputs: int) -> None:
    weight, bias, x = noise(100, inputs).to(dtype), noise(100, seed=2), noise(300, inputs, seed=1)
    whole = make(dtype, 3).prepare_linear(weight, bias)(x)
    alone = make(dtype, 1).prepare_linear(weight, bias)
    for rows in (1, 3, 8, 17, 31, 64):
        assert torch.equal(alone(x[:rows]), whole[:rows])


def test_no_rows_are_no_rows(make: Make) -> None:
    assert make(torch.float32, 2).prepare_linear(noise(8, 8), None)(noise(0, 8)).shape == (0, 8)


LENGTHS = [(1, 1), (1, 700), (7, 7), (40, 300), (3, 33), (1, 256), (1, 257)]
SHAPES = [
    Shape(heads=9, kv_heads=3, head_dim=64),
    Shape(heads=4, kv_heads=4, head_dim=8, block=7),
    Shape(heads=8, kv_heads=1, head_dim=24, block=32),
    Shape(heads=4, kv_heads=2, head_dim=256, window=40),
    Shape(heads=6, kv_heads=3, head_dim=80, block=1, window=1),
    Shape(heads=70, kv_heads=1, head_dim=16, window=300),
]


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("threads", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_references(make: Make, shape: Shape, threads: int, softcap: float | None) -> None:
    case = ragged_case(shape, LENGTHS, padding=1, spare_rows=2)
    found = make(torch.float32, threads).paged_attention(case.query, case.cache, case.batch, case.scale, softcap)
    expected = ragged_attention(case.query, case.cache, case.batch, case.scale, softcap)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


#: Blocks of 8 at most: larger ones in bf16 may be paired, which test_paired.py tests.
NOT_PAIRED = [replace(shape, dtype=torch.bfloat16, block=min(shape.block, 8)) for shape in SHAPES]


@pytest.mark.parametrize("shape", NOT_PAIRED, ids=str)
def test_a_cache_in_bf16_is_attended_to_in_fp32(make: Make, shape: Shape) -> None:
    case = widened(ragged_case(shape, LENGTHS))
    found = make(torch.bfloat16, 2).paged_attention(case.query, case.cache, case.batch, case.scale)
    expected = ragged_attention(case.query, case.cache.float(), case.batch, case.scale)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_row_is_the_same_in_any_batch_and_on_any_threads(make: Make, dtype: torch.dtype) -> None:
    case = widened(ragged_case(Shape(heads=6, kv_heads=2, head_dim=64, block=8, dtype=dtype), [(64, 900), (1, 70)]))
    whole = make(dtype, 1).paged_attention(case.query, case.cache, case.batch, case.scale)
    for threads in (2, 16):
        again = make(dtype, threads).paged_attention(case.query, case.cache, case.batch, case.scale)
        assert torch.equal(again, whole)
    # The last tokens of the first sequence alone, as a smaller chunk and as a decode.
    for count in (1, 5):
        batch = replace(
            case.batch,
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=case.batch.kv_lens[:1],
            table_rows=case.batch.table_rows[:1],
        )
        query = case.query[64 - count : 64]
        found = make(dtype, 4).paged_attention(query, case.cache, batch, case.scale)
        assert torch.equal(found, whole[64 - count : 64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 7, 16])
def test_attention_of_a_row_is_the_same_wherever_its_table_begins(make: Make, dtype: torch.dtype, block: int) -> None:
    """Blocks behind the window are dropped as a sequence grows, and the places that are left are counted anew."""
    case = widened(ragged_case(Shape(head_dim=24, block=block, window=300, dtype=dtype), [(40, 1000)]))
    kernels = make(dtype, 3)
    whole = kernels.paged_attention(case.query, case.cache, case.batch, case.scale)
    for dropped in (1, 255 // block, 270 // block, 600 // block, 660 // block):
        found = kernels.paged_attention(case.query, case.cache, case.later(dropped), case.scale)
        assert torch.equal(found, whole), dropped


def test_heads_of_no_multiple_of_eight_are_attended_to_as_well(make: Make) -> None:
    case = ragged_case(Shape(head_dim=12), LENGTHS)
    found = make(torch.float32, 1).paged_attention(case.query, case.cache, case.batch, case.scale)
    torch.testing.assert_close(found, ragged_attention(case.query, case.cache, case.batch, case.scale))


def test_numbers_that_overflow_stay_with_their_sequence(make: Make) -> None:
    case = ragged_case(Shape(), [(1, 40), (1, 50)])
    flat = case.cache.view(2, -1, 2, 16)
    flat[0, case.batch.slots[0]] = float("inf")
    found = make(torch.float32, 1).paged_attention(case.query, case.cache, case.batch, case.scale)
    assert not found[0].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize(("head_dim", "turning"), [(64, 64), (80, 20), (12, 6), (96, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_turned_and_written_where_slots_say(
    make: Make, head_dim: int, turning: int, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads = 40, 3, 2
    x, angles = noise(tokens, heads + 2 * kv_heads, head_dim), noise(tokens, 1, turning // 2, seed=1)
    cos, sin = (torch.cat(pair, -1) for pair in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    case = ragged_case(Shape(heads, kv_heads, head_dim, block=8), [(tokens - 2, 100)], spare_rows=2)
    expected = case.cache.clone()
    turned = REFERENCE.rope_and_write(x.clone(), cos, sin, expected, case.batch)
    cache = case.cache.to(dtype)
    found = make(dtype, 2).rope_and_write(x.clone(), cos, sin, cache, case.batch)
    torch.testing.assert_close(found, turned, atol=1e-6, rtol=1e-6)
    # Rounded from sums in another order: up to one unit of the last place.
    torch.testing.assert_close(cache.float(), expected.to(dtype).float(), atol=1e-5, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("width", [1, 8, 20, 576])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norms_and_gates_of_any_width_are_the_references(make: Make, rows: int, width: int) -> None:
    kernels = make(torch.float32, 3)
    x, residual, weight = noise(rows, width), noise(rows, width, seed=1), noise(width, seed=2)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    found = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(found, expected)
    both = 20 * noise(rows, 2 * width, seed=3)
    torch.testing.assert_close(kernels.silu_mul(both), REFERENCE.silu_mul(both), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kernels.gelu_tanh_mul(both), REFERENCE.gelu_tanh_mul(both), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_through(make: Make, value: float) -> None:
    kernels = make(torch.float32, 1)
    x = noise(2, 16)
    x[0, 3] = value
    assert not kernels.rms_norm(x, torch.ones(16), 1e-6)[0].isfinite().all()
    assert not kernels.silu_mul(x)[0].isfinite().all()
    assert kernels.silu_mul(x)[1].isfinite().all()
    assert not kernels.prepare_linear(noise(5, 16), None)(x)[0].isfinite().any()
