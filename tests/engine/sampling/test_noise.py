"""The noise is a pure function of its key, known to the bit, and is Gumbel noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.draws import REACH, bits, gumbel, row_keys

U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def plain_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """row_keys in plain integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & U64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
        return x ^ (x >> 31)

    state = mix(mix(mix(seed) ^ choice) ^ position)
    return state & U32, state >> 32


def plain_bits(key: tuple[int, int], token: int) -> int:
    """`bits` in plain integers."""
    x = ((token * 0x9E3779B1) & U32) ^ key[0]
    x ^= x >> 16
    x = (x * 0x7FEB352D) & U32
    x ^= x >> 15
    x = (x + key[1]) & U32
    x = (x * 0x846CA68B) & U32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & U32
    return x ^ (x >> 15)


def keys_of(*rows: tuple[int, int, int]) -> torch.Tensor:
    columns = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    return torch.from_numpy(row_keys(*columns))


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 63), st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 18)))
def test_vector_arithmetic_is_integer_arithmetic(seed: int, choice: int, position: int, tokens: list[int]) -> None:
    keys = keys_of((seed, choice, position))
    key = plain_key(seed, choice, position)
    assert [value & U32 for value in keys[0].tolist()] == list(key)
    found = bits(keys[:, None], torch.tensor(tokens, dtype=torch.int32)[None])
    assert [value & U32 for value in found[0].tolist()] == [plain_bits(key, token) for token in tokens]


def test_known_answers() -> None:
    """Pinned: a change of these changes what every seed gives."""
    keys = keys_of((0, 0, 0), (42, 3, 17))
    assert keys.tolist() == [[956087953, 595752380], [-679037543, -1637890191]]
    tokens = torch.tensor([[0, 1, 49151]], dtype=torch.int32)
    assert bits(keys[:, None], tokens).tolist() == [
        [-1211599901, -268365371, -840836051],
        [-280633904, -1012305801, -1690760731],
    ]


def test_every_device_gives_the_same_bits(device: torch.device) -> None:
    keys = keys_of(*((seed, 0, 5) for seed in range(4)))[:, None]
    tokens = torch.arange(5000, dtype=torch.int32)
    assert torch.equal(bits(keys.to(device), tokens.to(device)).cpu(), bits(keys, tokens))


def test_noise_is_gumbel_distributed_and_within_reach() -> None:
    tokens = torch.arange(200_000, dtype=torch.int32)
    for row in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)):
        noise = gumbel(keys_of(row)[:, None], tokens)[0].double()
        assert noise.isfinite().all()
        assert noise.max() - noise.min() < REACH
        # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is exceeded once in a thousand.
        cdf = (-(-noise.sort().values).exp()).exp()
        grid = torch.arange(1, len(noise) + 1, dtype=torch.float64) / len(noise)
        assert (cdf - grid).abs().max() < 1.95 / math.sqrt(len(noise))


def test_extreme_bits_stay_finite_and_within_reach() -> None:
    """The reach is that of the smallest and the largest u that there are."""
    largest = -math.log(-math.log1p(-0.5 * 2.0**-31))
    smallest = -math.log(-math.log1p(-(1 - 2.0**-23)))
    assert largest - smallest < REACH < largest - smallest + 0.5


def test_rows_that_differ_in_one_place_are_uncorrelated() -> None:
    tokens = torch.arange(50_000, dtype=torch.int32)
    rows = [(7, 0, 100), (7, 0, 101), (7, 1, 100), (8, 0, 100)]
    noise = torch.cat([gumbel(keys_of(row)[:, None], tokens) for row in rows])
    off_diagonal = torch.corrcoef(noise) - torch.eye(len(rows))
    assert off_diagonal.abs().max() < 0.02
    for shift in (1, 2, 64):
        assert torch.corrcoef(torch.stack((noise[0, shift:], noise[0, :-shift])))[0, 1].abs() < 0.02
