"""Blocks of GGUF's types stand for the numbers that the gguf package reads from them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.quant.formats import Matrix, Scheme, stored_as
from engine.quant.formats.gguf import unpacked
from engine.text.tensors import BLOCKS, EXACT, StoredTensor

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


@pytest.mark.parametrize("kind", HALVES)
def test_a_matrix_keeps_its_integers_or_is_rounded_to_8_bits(kind: str) -> None:
    raw = torch.from_numpy(random_rows(kind))
    inputs = raw.shape[1] // BLOCKS[kind][1] * BLOCKS[kind][0]
    headers = {"weight": StoredTensor(kind, (len(raw), inputs))}
    stored = stored_as(Scheme("gguf", 8), "m", len(raw), inputs, headers, torch.device("cpu"))
    assert stored is not None
    stored.places["weight"].copy_(raw)
    matrix = stored.read()
    assert isinstance(matrix, Matrix)
    assert matrix.bits == (4 if kind == "Q4_0" else 8)
    expected = unpacked(kind, raw).weights()
    if kind in EXACT:
        assert torch.equal(matrix.dequantise(), expected)
    else:
        largest = expected.view(len(raw), -1, 32).abs().amax(-1).repeat_interleave(32, 1)
        assert bool(((matrix.dequantise() - expected).abs() <= largest / 253).all())
    packed = matrix.packed()
    assert torch.equal(packed.dequantise(), matrix.dequantise())


def test_every_type_is_tried() -> None:
    assert {*HALVES} == {*BLOCKS} - UNREAD
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes


def test_q8_k_is_its_scale_times_its_integers() -> None:
    q = np.arange(256, dtype=np.uint8)
    raw = np.concatenate([np.array([0.5], np.float32).view(np.uint8), q, np.zeros(32, np.uint8)])
    weights = unpacked("Q8_K", torch.from_numpy(raw[None])).weights()
    assert np.array_equal(weights[0].numpy(), 0.5 * q.view(np.int8).astype(np.float32))
