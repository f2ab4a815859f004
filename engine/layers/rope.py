"""Rotary position embedding (arXiv 2104.09864) and the stretching of its frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low frequencies (its model card and transformers' `rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: Tensor) -> Tensor:
        """Frequencies [head_dim / 2]: kept when short, divided by `factor` when long, blended in between."""
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        blend = (context / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


class Rope:
    """Angles of the positions of a step. No table: it would take 134 MB for 128k positions, and save nothing."""

    def __init__(
        self, kernels: Kernels, head_dim: int, theta: float, scaling: Llama3Scaling | None, *, device: torch.device
    ) -> None:
        self._dtype = kernels.compute_dtype
        # Made on the CPU whatever the device, so that the frequencies do not depend on it.
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if scaling is not None:
            frequencies = scaling.apply(frequencies)
        self._frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, head_dim] of `positions` int64 [tokens], as `Kernels.rope` wants them."""
        angles = positions.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)
