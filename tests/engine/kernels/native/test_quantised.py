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


def of_integers(shape: tuple[int, ...], low: int, high: int, group: int, *, minima: bool = False) -> Weight:
    """A weight of integers from `low` to `high`, with fp16 scales, as of GGUF's types."""
    outputs, inputs = shape
    q = torch.randint(low, high + 1, (outputs, inputs), generator=GIVEN)
    q[0, :2] = torch.tensor([low, high])
    sizes = (inputs // group, outputs)
    scales = torch.rand(sizes, generator=GIVEN).half()
    lowest = -8 * torch.rand(sizes, generator=GIVEN).half() if minima else None
    if high - low < 16:
        return Int4Weight.pack(q if minima else q + 8, scales, None, group, lowest)
    return Int8Weight.pack(q, scales, group, lowest)


WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "int8": Int8Weight.quantise,
    "int8-32": lambda weight: Int8Weight.quantise(weight, 32),
    "int4-32": lambda weight: Int4Weight.quantise(weight, 32),
    "int4-32-zeros": lambda weight: Int4Weight.quantise(weight, 32, symmetric=False),
    "int4-whole-zeros": lambda weight: Int4Weight.quantise(weight, weight.shape[1], symmetric=False),
    "int4-32-minima": lambda weight: of_integers(weight.shape, 0, 15, 32, minima=True),
    "int4-16": lambda weight: of_integers(weight.shape, -4, 3, 16),
    "int5-32-minima": lambda weight: of_integers(weight.shape, 0, 31, 32, minima=True),
    "int5-32": lambda weight: of_integers(weight.shape, -16, 15, 32),
    "int6-16": lambda weight: of_integers(weight.shape, -32, 31, 16),
    "int6-16-minima": lambda weight: of_integers(weight.shape, -32, 31, 16, minima=True),
    "int8-32-minima": lambda weight: of_integers(weight.shape, -128, 127, 32, minima=True),
}
#: The bits in which they are packed.
BITS = {kind: int(kind.removeprefix("int")[0]) for kind in WEIGHTS}


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


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_take_the_bits_that_hold_their_numbers(make: Make, kind: str) -> None:
    kernels, weight = make(torch.bfloat16, 1), WEIGHTS[kind](torch.randn(96, 192, generator=GIVEN))
    kernels.prepare_quantised(weight, None)
    half = weight.scales.dtype == torch.float16
    numbers = weight.scales.numel() * (1 + (weight.minima is not None))
    zeros = 0 if weight.zeros is None else 2 * weight.zeros.numel()
    assert kernels.weight_bytes == 96 * 192 * BITS[kind] // 8 + numbers * (2 if half else 4) + zeros


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_packed_weight_are_looked_up(make: Make, kind: str, shape: tuple[int, int]) -> None:
    """To the bit: an embedding that is tied to a head is kept once."""
    kernels, weight = make(torch.bfloat16, 1), WEIGHTS[kind](torch.randn(shape, generator=GIVEN))
    outputs = torch.tensor([0, 6, shape[0] - 1, 3, 6])
    rows = kernels.lookup(kernels.prepare_quantised(weight, None))
    assert rows is not None
    assert torch.equal(rows(outputs), weight.dequantise()[outputs])
    assert kernels.lookup(kernels.prepare_ordered(weight, None, torch.randperm(shape[1], generator=GIVEN))) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 33), (96, 64)], ids=str)
def test_rows_of_a_dense_weight_are_looked_up(make: Make, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    kernels, weight = make(dtype, 1), torch.randn(shape, generator=GIVEN).to(dtype)
    outputs = torch.tensor([5, 0, 5])
    rows = kernels.lookup(kernels.prepare_head(weight, None))
    assert rows is not None
    assert torch.equal(rows(outputs), weight[outputs])


def test_minima_smaller_than_the_normal_numbers_of_fp16_are_exact(make: Make) -> None:
    scales = torch.full((1, 24), 2.0**-24, dtype=torch.float16)
    weight = Int4Weight.pack(torch.full((24, 32), 3, dtype=torch.uint8), scales, None, 32, -scales)
    product = make(torch.bfloat16, 1).prepare_quantised(weight, None)(torch.ones(1, 32))
    assert torch.equal(product, torch.full((1, 24), 32 * 2 * 2.0**-24))


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
