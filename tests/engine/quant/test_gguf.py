"""Blocks of GGUF's types stand for the numbers that the gguf package reads from them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelError
from engine.kernels import select
from engine.kernels.native import load_library
from engine.quant.formats import Matrix, Scheme, stacked, stored_as
from engine.quant.formats.gguf import unpacked
from engine.text.tensors import BLOCKS, KEPT, StoredTensor

#: Where a type has its scale and minimum, in fp16.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
#: What the package does not read.
UNREAD = {"Q8_K"}


def random_rows(kind: str, rows: int = 3, blocks: int = 5) -> np.ndarray:
    """Rows of random blocks with finite scales, uint8 [rows, bytes]."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, BLOCKS[kind][1]), dtype=np.uint8)
    for at in HALVES[kind]:
        raw[..., at : at + 2] = rng.normal(size=(rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_of_random_bytes_are_the_same_numbers(kind: str) -> None:
    raw = random_rows(kind)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(unpacked(kind, torch.from_numpy(raw)).weights().numpy(), expected)


#: The types whose scales and minima are fp16 numbers, and not products with one.
EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}


def matrix_of(kind: str, raw: np.ndarray) -> Matrix:
    inputs = raw.shape[1] // BLOCKS[kind][1] * BLOCKS[kind][0]
    headers = {"weight": StoredTensor(kind, (len(raw), inputs))}
    stored = stored_as(Scheme("gguf", 8), "m", len(raw), inputs, headers, torch.device("cpu"))
    assert stored is not None
    stored.places["weight"].copy_(torch.from_numpy(raw))
    matrix = stored.read()
    assert isinstance(matrix, Matrix)
    return matrix


@pytest.mark.parametrize("kind", HALVES)
def test_a_matrix_keeps_its_integers(kind: str) -> None:
    raw = random_rows(kind)
    matrix, groups = matrix_of(kind, raw), unpacked(kind, torch.from_numpy(raw))
    assert torch.equal(matrix.q.int() - matrix.middle, groups.q.flatten(1).int())
    assert (matrix.group, matrix.minima is not None) == (KEPT[kind].group, KEPT[kind].minima)
    assert bool((matrix.scales.float().T - groups.scales).abs().le(groups.scales.abs() / 2048).all())
    if kind in EXACT:
        assert torch.equal(matrix.dequantise(), groups.weights())
    assert torch.equal(matrix.packed().dequantise(), matrix.dequantise())


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
def test_a_type_takes_the_memory_that_is_said(kind: str) -> None:
    matrix, kernels = matrix_of(kind, random_rows(kind, rows=16)), select(torch.device("cpu"), torch.bfloat16)
    matrix.prepare(kernels, None)
    assert kernels.weight_bytes == kernels.weights * KEPT[kind].bits_per_weight / 8


@pytest.mark.parametrize("other", HALVES)
def test_matrices_of_two_types_are_stacked_without_changing_a_weight(other: str) -> None:
    parts = [matrix_of(kind, random_rows(kind, blocks=256 // BLOCKS[kind][0])) for kind in ("Q4_0", other)]
    whole = stacked(parts)
    assert isinstance(whole, Matrix)
    torch.testing.assert_close(whole.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_minima_that_are_no_numbers_are_refused() -> None:
    raw = random_rows("Q4_1")
    raw[1, 2:4] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=r"m\.weight has minima that are no finite numbers"):
        matrix_of("Q4_1", raw)


def test_every_type_is_tried() -> None:
    assert {*HALVES} == {*BLOCKS} - UNREAD
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes


def test_q8_k_is_its_scale_times_its_integers() -> None:
    q = np.arange(256, dtype=np.uint8)
    raw = np.concatenate([np.array([0.5], np.float32).view(np.uint8), q, np.zeros(32, np.uint8)])
    weights = unpacked("Q8_K", torch.from_numpy(raw[None])).weights()
    assert np.array_equal(weights[0].numpy(), 0.5 * q.view(np.int8).astype(np.float32))
