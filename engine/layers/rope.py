"""Rotary position embedding (arXiv 2104.09864): computes the angles of a step's positions."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.layers.rope_scaling import RopeScaling


class Rope:
    """Computes angles at each step. A table of angles would take 134 MB for 128k positions and save no time."""

    def __init__(
        self, kernels: Kernels, rotary_dim: int, theta: float, scaling: RopeScaling, *, device: torch.device
    ) -> None:
        """`rotary_dim`: the number of a head's dimensions, from the first on, that are rotated."""
        self._dtype = kernels.compute_dtype
        self._factor = scaling.attention_factor
        # Always made on the CPU, so that the frequencies do not depend on the device.
        self._frequencies = scaling.frequencies(theta, rotary_dim).to(device)
        self._long = None if scaling.switch is None else scaling.frequencies(theta, rotary_dim, long=True).to(device)

    def __call__(self, positions: Tensor, long: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin, [tokens, 1, rotary_dim], of `positions`, int64 [tokens], as `Kernels.rope` expects them.

        `long`: bool [tokens], whether the token's sequence is beyond the scaling's switch. None if there is no switch.
        """
        frequencies = self._frequencies
        if self._long is not None and long is not None:
            frequencies = torch.where(long[:, None, None], self._long, frequencies)
        angles = positions.float()[:, None, None] * frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)
