"""The gated feed-forward block: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.layers.linear import Linear


class GatedMlp:
    def __init__(
        self,
        kernels: Kernels,
        width: int,
        hidden: int,
        *,
        activation: str,
        bias: bool,
        fused: bool,
        device: torch.device,
    ) -> None:
        """`activation`: "silu" or "gelu_tanh". `fused`: whether the checkpoint has one matrix for gate and up."""
        self.activation = activation
        self._multiply = kernels.gate(activation)
        parts = {"gate_up_proj": 2 * hidden} if fused else {"gate_proj": hidden, "up_proj": hidden}
        self.gate_up = Linear(kernels, width, parts, bias=bias, device=device)
        self.down = Linear(kernels, hidden, {"down_proj": width}, bias=bias, device=device)

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        return [(prefix, self.gate_up), (prefix, self.down)]

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up.weights(prefix) | self.down.weights(prefix)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._multiply(self.gate_up(x)))
