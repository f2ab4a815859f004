"""Products by AMX tiles, to the bit: emulated on any CPU with AVX2, and by the CPU itself if it has AMX."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.native import Native, library, load_library
from engine.kernels.native.library import _SIGNATURES, Library, Pool
from engine.kernels.native.pages import Pages
from engine.kernels.native.product import PackedProduct
from engine.kernels.native.quantised import quantised_product
from tests.engine.kernels.native.conftest import TILES, compiled
from tests.engine.kernels.native.test_kernels import noise
from tests.engine.kernels.native.test_peaks import expected
from tests.engine.kernels.native.test_quantised import WEIGHTS, Weight

Floats = NDArray[np.float32]
#: Inputs and outputs: whole steps of 32 and panels of 48, and not.
SHAPES = [(576, 96), (64, 48), (95, 145), (33, 47), (1, 1), (256, 100)]


class Products:
    """The products of one build."""

    def __init__(self, path: Path, threads: int) -> None:
        self._found = ctypes.CDLL(str(path))
        for name in ("pack", "linear", "peaks"):
            getattr(self._found, f"penstock_{name}").argtypes = _SIGNATURES[f"penstock_{name}"]
        self._found.penstock_pool.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._found.penstock_pool(threads, 0))

    def __del__(self) -> None:
        self._found.penstock_free(self._pool)

    def pack(self, weight: Tensor) -> Tensor:
        outputs, inputs = weight.shape
        packed = torch.zeros(-(-outputs // 48) * 48, inputs + inputs % 2, dtype=torch.bfloat16)
        self._found.penstock_pack(self._pool, weight.data_ptr(), packed.data_ptr(), 1, inputs, outputs)
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What is beyond the output must stay NaN."""
        (rows, inputs), outputs = x.shape, len(weight)
        packed, out = self.pack(weight), torch.full((rows + 1, outputs), float("nan"))
        added = None if bias is None else bias.data_ptr()
        self._found.penstock_linear(
            self._pool, x.data_ptr(), packed.data_ptr(), added, out.data_ptr(), 1, rows, inputs, outputs
        )
        assert out[rows].isnan().all()
        return out[:rows]

    def quantised(self, weight: Weight, bias: Tensor) -> PackedProduct:
        calls = {"linear": self._found.penstock_linear, "peaks": self._found.penstock_peaks}
        built = cast(Library, SimpleNamespace(columns=48, fours=True, **calls))
        run = quantised_product(built, cast(Pool, SimpleNamespace(address=self._pool)), Pages(), weight, bias)
        assert run is not None
        return run

    def peaks(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        (rows, inputs), packed = x.shape, self.pack(weight)
        places, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        sizes = (rows, inputs, len(weight))
        to = (places.data_ptr(), finite.data_ptr())
        self._found.penstock_peaks(self._pool, x.data_ptr(), packed.data_ptr(), None, 1, *sizes, *to)
        return places, finite


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", [(100, 192), (96, 256), (7, 96)], ids=str)
def test_quantised_products_have_the_bits_of_builds_without_tiles(
    tiles_build: Path, kind: str, shape: tuple[int, int]
) -> None:
    weight, bias = WEIGHTS[kind](noise(*shape)), noise(shape[0])
    plain = Native(torch.bfloat16, Library(Path(library.__file__).parent / "_avx2.so", "avx2"), 1)
    wanted, products = plain.prepare_quantised(weight, bias), Products(tiles_build, 2)
    got = products.quantised(weight, bias)
    for rows in (1, 15, 16, 33, 130):
        x = noise(rows, shape[1]) * torch.logspace(-2, 2, shape[1])
        x[rows // 2, 3] = float("nan") if rows > 1 else 0
        assert same(got(x), wanted(x))
        (places, finite), (other, _) = got.peaks(x), expected(wanted(x))
        assert torch.equal(places[finite], other[finite])


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def flushed(x: NDArray[np.float64]) -> Floats:
    """Rounded to fp32; 0 if it were below 2^-126 once rounded to as many bits as a normal number has."""
    return np.where(np.abs(x) < 2.0**-126 * (1 - 2.0**-25), np.copysign(0.0, x), x).astype(np.float32)


def rounded(x: Tensor) -> Floats:
    """In bf16, filled up to steps of 32 inputs. What is below 2^-126 is 0 even if it would round up to that."""
    wide = torch.where(x.abs() < 2.0**-126, 0 * x, x).bfloat16().double().numpy()
    return flushed(np.pad(wide, ((0, 0), (0, -wide.shape[1] % 32))))


def by_the_manual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """TDPBF16PS of each step of 16 pairs: two chains of fused multiply-adds, added to each other, and then to the sum.
    In fp64 each sum of a product of bf16 and a number of fp32 is exact, or rounds to the same fp32."""
    a, b = rounded(x).astype(np.float64), rounded(weight).astype(np.float64)
    sums = np.broadcast_to(flushed(bias.double().numpy()), (len(a), len(b)))
    for step in range(0, a.shape[1], 32):
        chains = [np.zeros((len(a), len(b)), dtype=np.float32) for _ in range(2)]
        for k in range(step, step + 32):
            chains[k % 2] = flushed(a[:, k, None] * b[:, k] + chains[k % 2])
        sums = flushed(sums.astype(np.float64) + flushed(chains[0].astype(np.float64) + chains[1]))
    return torch.from_numpy(np.array(sums))


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-64])
def test_products_are_the_manuals_to_the_bit(tiles_build: Path, inputs: int, outputs: int, scale: float) -> None:
    """The small scale makes most products and sums numbers below 2^-126, and some inputs."""
    sizes = torch.logspace(-2, 2, inputs) * scale
    x, weight = noise(35, inputs) * scale, (noise(outputs, inputs, seed=1) * sizes).bfloat16()
    x[::3] *= 2.0**-64
    bias = noise(outputs, seed=2) * scale * scale
    assert same(Products(tiles_build, 2).linear(x, weight, bias), by_the_manual(x, weight, bias))


def test_rows_numbers_below_the_normal_ones_are_zero_before_they_are_rounded(tiles_build: Path) -> None:
    """The numbers around 2^-126, of which the largest below it would round up."""
    x = torch.arange(0x7E8000, 0x818000, 0x100, dtype=torch.int32).view(torch.float32)[:, None]
    x, weight = torch.cat((x, -x), 1), torch.full((48, 2), 2.0**100).bfloat16()
    weight[:, 1] = 0
    assert same(Products(tiles_build, 1).linear(x, weight, torch.zeros(48)), by_the_manual(x, weight, torch.zeros(48)))


@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (1103, 100)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_beside_any_others(tiles_build: Path, inputs: int, outputs: int, threads: int) -> None:
    x, weight = noise(520, inputs), noise(outputs, inputs, seed=1).bfloat16()
    bias, products = noise(outputs, seed=2), Products(tiles_build, threads)
    whole = products.linear(x, weight, bias)
    for rows in (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 100, 128, 129, 160, 256, 257, 300):
        assert same(products.linear(x[:rows], weight, bias), whole[:rows]), rows


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 2000), (41, 25)])
def test_the_largest_are_where_the_product_has_them(tiles_build: Path, inputs: int, outputs: int) -> None:
    weight, products = noise(outputs, inputs, seed=1).bfloat16(), Products(tiles_build, 3)
    for rows in (1, 15, 16, 40, 300):
        x = noise(rows, inputs, seed=rows)
        assert all(map(torch.equal, products.peaks(x, weight), expected(products.linear(x, weight))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_its_output(tiles_build: Path, value: float) -> None:
    """Also where a step is filled up: behind it lie the next panel's weights."""
    products = Products(tiles_build, 1)
    for inputs in (40, 41):
        x, weight = noise(20, inputs), noise(100, inputs, seed=1).bfloat16()
        before = products.linear(x, weight)
        x[3, 0], weight[48, 0] = value, value
        after = products.linear(x, weight)
        others = [row for row in range(20) if row != 3]
        assert not after[3].isfinite().any()
        assert not after[:, 48].isfinite().any()
        assert same(after[others][:, [*range(48), *range(49, 100)]], before[others][:, [*range(48), *range(49, 100)]])


@pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
def test_instructions_are_encoded_as_the_manual_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A CPU without AMX cannot run them, but its assembler encodes them. Intel 64 SDM, volume 2, each instruction's
    page: the target is in ModRM.reg, A in ModRM.rm, B in VEX.vvvv, inverted."""
    flags = ("-O1", "-fomit-frame-pointer", "-fcf-protection=none", "-DPENSTOCK_TILES")
    source = TILES.with_name("instructions.cpp")
    found = ctypes.CDLL(str(compiled(tmp_path_factory, "tile_instructions", *flags, source=source)))
    encodings = {
        "configure": "c4 e2 78 49 07",  # ldtilecfg [rdi]
        "release": "c4 e2 78 49 c0",  # tilerelease
        "zero": "c4 e2 7b 49 e8",  # tilezero tmm5
        "load_tile": "c4 e2 7b 4b 24 37",  # tileloadd tmm4, [rdi + rsi]
        "store_tile": "c4 e2 7a 4b 24 37",  # tilestored [rdi + rsi], tmm4
        "add_bf16": "c4 e2 62 5c ca",  # tdpbf16ps tmm1, tmm2, tmm3
        "add_signed": "c4 e2 63 5e ca",  # tdpbssd tmm1, tmm2, tmm3
        "add_unsigned": "c4 e2 61 5e ca",  # tdpbusd tmm1, tmm2, tmm3
    }
    for name, expected_bytes in encodings.items():
        code = bytes.fromhex(expected_bytes) + b"\xc3"  # and ret
        assert ctypes.string_at(ctypes.cast(getattr(found, name), ctypes.c_void_p), len(code)) == code, name
