"""The kernels' noise is engine.sampling's: its keys to the bit, its numbers to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.draws import choice_state, gumbel, row_keys

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.kernels.triton.sampling.sampler import gumbel as kernel_gumbel
from engine.kernels.triton.sampling.sampler import position_key

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

COUNT = 1 << 15
SEEDS = np.array([0, 42, (1 << 63) - 1, 7], np.uint64)
CHOICES = np.array([0, 3, 63, 1], np.uint64)
POSITIONS = np.array([1, 17, 131071, (1 << 33) + 5], np.uint64)


@triton.jit
def noise_kernel(state, positions, keys, noise, first, COUNT: tl.constexpr):
    row = tl.program_id(0)
    low, high = position_key(tl.load(state + 2 * row), tl.load(state + 2 * row + 1), tl.load(positions + row))
    tl.store(keys + 2 * row, low.to(tl.int32, bitcast=True))
    tl.store(keys + 2 * row + 1, high.to(tl.int32, bitcast=True))
    token = tl.arange(0, COUNT)
    tl.store(noise + row * COUNT + token, kernel_gumbel(low, high, first + token))


@pytest.mark.parametrize("first", [0, 262144 - COUNT])
def test_keys_are_equal_and_numbers_nearly(where: torch.device, first: int) -> None:
    rows = len(SEEDS)
    state = torch.from_numpy(choice_state(SEEDS, CHOICES).view(np.int32)).to(where)
    positions = torch.from_numpy(POSITIONS.view(np.int64)).to(where)
    keys = torch.zeros(rows, 2, dtype=torch.int32, device=where)
    noise = torch.zeros(rows, COUNT, device=where)
    noise_kernel[(rows,)](state, positions, keys, noise, first, COUNT=COUNT, num_warps=8)
    expected_keys = torch.from_numpy(row_keys(SEEDS, CHOICES, POSITIONS))
    assert torch.equal(keys.cpu(), expected_keys)
    expected = gumbel(expected_keys[:, None], torch.arange(first, first + COUNT, dtype=torch.int32))
    # Relative where it is large, since that decides: an inner logarithm must be right to its last bits near 0.
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-6, atol=1e-6)
