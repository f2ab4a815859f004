"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.layers.linear import Linear


class GatedMlp:
    def __init__(self, kernels: Kernels, width: int, hidden: int, *, bias: bool, device: torch.device) -> None:
        self._kernels = kernels
        self._gate_up = Linear(kernels, width, {"gate_proj": hidden, "up_proj": hidden}, bias=bias, device=device)
        self._down = Linear(kernels, hidden, {"down_proj": width}, bias=bias, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return self._gate_up.weights(prefix) | self._down.weights(prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._kernels.silu_mul(self._gate_up(x)))
