from __future__ import annotations

import math

import torch

from engine.kernels.reference import Reference
from engine.layers import Llama3Scaling, Rope, RopeScaling, Unscaled

CPU = torch.device("cpu")


def frequencies(scaling: RopeScaling, head_dim: int = 16, theta: float = 10000.0) -> list[float]:
    """Angles at position 1 are the frequencies; small enough to come back through the arc cosine and sine."""
    cos, sin = Rope(Reference(torch.float32), head_dim, theta, scaling, device=CPU)(torch.tensor([1]), None)
    half = head_dim // 2
    return [math.atan2(s, c) for c, s in zip(cos[0, 0, :half].tolist(), sin[0, 0, half:].tolist(), strict=True)]


def test_frequencies_fall_geometrically() -> None:
    expected = [10000.0 ** (-2 * i / 16) for i in range(8)]
    torch.testing.assert_close(torch.tensor(frequencies(Unscaled())), torch.tensor(expected))


def test_the_first_half_of_sin_carries_the_minus() -> None:
    _, sin = Rope(Reference(torch.float32), 8, 10000.0, Unscaled(), device=CPU)(torch.tensor([3]), None)
    assert torch.equal(sin[..., :4], -sin[..., 4:])


def test_llama3_scaling_keeps_short_wavelengths_stretches_long_ones_and_blends_between() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    for plain, scaled in zip(frequencies(Unscaled()), frequencies(scaling), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < 64 / 4:
            expected = plain
        elif wavelength > 64 / 1:
            expected = plain / 8
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert math.isclose(scaled, expected, rel_tol=1e-4)


def test_scaling_has_all_three_cases_at_this_size() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    ratios = [scaled / plain for plain, scaled in zip(frequencies(Unscaled()), frequencies(scaling), strict=True)]
    assert max(ratios) > 0.999
    assert min(ratios) < 0.126
    assert any(0.13 < ratio < 0.99 for ratio in ratios)
