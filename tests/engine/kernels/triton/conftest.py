"""Products and comparisons as the kernels' tests need them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.exhaustive import few


@pytest.fixture
def in_order(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, products that sum every element alike, as a GPU's do."""
    if where.type == "cpu":
        from triton.runtime import interpreter

        from tests.engine.interpreter import dot_in_order

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)


@pytest.fixture(
    params=few([torch.bfloat16, torch.float16, torch.float32], torch.bfloat16, torch.float32),
    ids=["bf16", "fp16", "fp32"],
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(found: Tensor, expected: Tensor, *, units: int = 1) -> None:
    """In half precision all but a few are equal, and those within so many units in the last place: another order of a
    sum or another exponential moves few over a rounding's edge, where a rounding less or more moves a quarter."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = found.cpu(), expected.cpu()
    unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 4e-6}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=units * unit, atol=3e-6)
    if found.dtype != torch.float32:
        assert (found != expected).sum() <= max(1, found.numel() // 50)
