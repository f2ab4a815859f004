"""Rounding rows to 8-bit floats against plain torch, to the bit."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import fp8
from tests.engine.kernels.triton.conftest import noise

pytest.importorskip("triton")

from engine.kernels.triton.rowwise import quantise_rows


@pytest.fixture(autouse=True)
def _able(where: torch.device) -> None:
    if where.type == "cuda" and torch.cuda.get_device_capability(where) < (8, 9):
        pytest.skip("no instruction that rounds to 8-bit floats")


@pytest.mark.parametrize("width", [1, 16, 72, 1000, 4096])
def test_rows_are_rounded_as_in_torch(where: torch.device, dtype: torch.dtype, width: int) -> None:
    x = noise(5, width, dtype=dtype)
    x[1] *= 1000
    x[2] /= 1000
    x[3] = 0
    values, scales = quantise_rows(x.to(where))
    expected, expected_scales = fp8.quantise_rows(x)
    assert values.shape == expected.shape == (5, -(-width // 16) * 16)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_every_value_that_there_is_stays_itself(where: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(fp8.FP8).float()
    x = every[every.isfinite()][None]
    values, scales = quantise_rows(x.to(where))
    assert scales.item() == 1
    assert torch.equal(values.cpu().float()[:, : x.shape[1]], x)


def test_rows_may_lie_apart_or_be_none(where: torch.device) -> None:
    wide = noise(4, 3, 40, dtype=torch.bfloat16)
    values, scales = quantise_rows(wide.to(where)[:, 1])
    expected, expected_scales = fp8.quantise_rows(wide[:, 1])
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(values.cpu().float(), expected.float())
    assert quantise_rows(wide.to(where)[:0, 1])[0].shape == (0, 48)
