"""Native products with weights of 4 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels.native.product import PackedProduct
from engine.kernels.packed import Int4Weight, Int8Weight
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.native.test_peaks import expected

GIVEN = torch.Generator().manual_seed(3)
#: Outputs and inputs: whole panels and not; whole blocks and not.
SHAPES = [(96, 256), (50, 192), (7, 96), (240, 128)]
Weight = Int4Weight | Int8Weight
WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "int8": Int8Weight.quantise,
    "int8-32": lambda weight: Int8Weight.quantise(weight, 32),
    "int4-32": lambda weight: Int4Weight.quantise(weight, 32),
    "int4-32-zeros": lambda weight: Int4Weight.quantise(weight, 32, symmetric=False),
    "int4-whole-zeros": lambda weight: Int4Weight.quantise(weight, weight.shape[1], symmetric=False),
}


def close(got: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Within what 16 bits lose of the largest in a row, against sums in fp64."""
    dense = weight.dequantise().double()
    wanted = x.double() @ dense.T + (0 if bias is None else bias.double())
    scale = x.abs().amax(1, keepdim=True).double() @ dense.abs().sum(1)[None]
    assert ((got - wanted).abs() <= scale * 2e-5 + 1e-6).all()


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_dequantised_weight(make: Make, kind: str, shape: tuple[int, int]) -> None:
    weight = WEIGHTS[kind](torch.randn(shape, generator=GIVEN))
    bias = torch.randn(shape[0], generator=GIVEN)
    run = make(torch.bfloat16, 1).prepare_quantised(weight, bias)
    assert isinstance(run, PackedProduct)
    for rows in (1, 3, 9, 150):
        x = torch.randn(rows, shape[1], generator=GIVEN) * torch.logspace(-2, 2, shape[1])
        close(run(x), x, weight, bias)


def test_the_largest_numbers_do_not_overflow(make: Make) -> None:
    weight = Int8Weight.pack(torch.full((24, 256), -128, dtype=torch.int8), torch.ones(1, 24), 256)
    x = torch.full((2, 256), 3.0)
    x[1] = -3
    close(make(torch.bfloat16, 1).prepare_quantised(weight, None)(x), x, weight)
    q = torch.zeros(24, 256, dtype=torch.uint8)
    four = Int4Weight.pack(q, torch.ones(2, 24), torch.full((2, 24), 15, dtype=torch.uint8), 128)
    close(make(torch.bfloat16, 1).prepare_quantised(four, None)(x), x, four)


def test_groups_that_no_block_fits_are_written_out(make: Make) -> None:
    weight = Int4Weight.quantise(torch.randn(24, 96, generator=GIVEN), 48)
    x = torch.randn(3, 96, generator=GIVEN)
    order = torch.randperm(96, generator=GIVEN)
    kernels = make(torch.float32, 1)
    dense = weight.dequantise().T
    torch.testing.assert_close(kernels.prepare_quantised(weight, None)(x), x @ dense, rtol=1e-4, atol=1e-4)
    ordered = kernels.prepare_ordered(weight, None, order)
    torch.testing.assert_close(ordered(x), x[:, order] @ dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_is_the_same_in_any_company_and_by_any_threads(kind: str, make: Make) -> None:
    weight = WEIGHTS[kind](torch.randn(100, 192, generator=GIVEN))
    x = torch.randn(140, 192, generator=GIVEN)
    alone = make(torch.bfloat16, 1).prepare_quantised(weight, None)
    shared = make(torch.bfloat16, 2).prepare_quantised(weight, None)
    whole = alone(x)
    assert torch.equal(shared(x), whole)
    for rows in (1, 2, 5, 133):
        assert torch.equal(alone(x[:rows]), whole[:rows])


@pytest.mark.parametrize("kind", ["int8", "int4-32-zeros"])
def test_what_is_no_number_stays_so_and_harms_no_other_row(make: Make, kind: str) -> None:
    weight = WEIGHTS[kind](torch.randn(30, 192, generator=GIVEN))
    run = make(torch.bfloat16, 1).prepare_quantised(weight, None)
    x = torch.randn(4, 192, generator=GIVEN)
    wanted = run(x)
    for odd in (float("nan"), float("inf")):
        broken = x.clone()
        broken[2, 191] = odd
        got = run(broken)
        assert not torch.isfinite(got[2]).any()
        assert torch.equal(got[[0, 1, 3]], wanted[[0, 1, 3]])
    assert not run(torch.zeros(2, 192)).any()
    assert not run(torch.full((2, 192), 1e-40)).any()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_inputs_in_another_order_are_taken_as_rows_are_rounded(make: Make, kind: str) -> None:
    """To the bit as of rows that come in that order; also where the last block is not whole."""
    native = make(torch.bfloat16, 2)
    for shape in SHAPES:
        weight = WEIGHTS[kind](torch.randn(shape, generator=GIVEN))
        order = torch.randperm(shape[1], generator=GIVEN)
        bias = torch.randn(shape[0], generator=GIVEN)
        run, plain = native.prepare_ordered(weight, bias, order), native.prepare_quantised(weight, bias)
        assert isinstance(run, PackedProduct)
        for rows in (1, 9, 70):
            x = torch.randn(rows, shape[1], generator=GIVEN)
            assert torch.equal(run(x), plain(x[:, order]))


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_largest_of_a_quantised_head_are_found_without_its_logits(make: Make, kind: str, threads: int) -> None:
    kernels = make(torch.bfloat16, threads)
    for outputs in (7, 1151):
        bias = torch.randn(outputs, generator=GIVEN) - 100
        head = kernels.prepare_quantised(WEIGHTS[kind](torch.randn(outputs, 96, generator=GIVEN)), bias)
        for rows in (1, 9, 150):
            x = torch.randn(rows, 96, generator=GIVEN)
            x[rows // 2, 3] = float("nan") if rows > 1 else 0
            found = kernels.peaks(head, x)
            assert found is not None
            largest, finite = expected(head(x))
            assert torch.equal(found[1], finite)
            assert torch.equal(found[0][finite], largest[finite])
