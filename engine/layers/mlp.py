"""The feed-forward block of a layer: gated, down(activation(gate(x)) * up(x)), or a mixture of experts.

In a mixture, a router gives each row to some of many gated feed-forward blocks, and their results are summed (arXiv
1701.06538, 2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import ExpertParts, Kernels, PreparedExperts
from engine.layers.adapted import AdaptedRows
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

    def __call__(self, x: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        return self.down(self._multiply(self.gate_up(x, adapters)), adapters)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    count: int
    """The number of experts."""
    chosen: int
    """The experts of a row."""
    width: int
    """The width inside an expert."""
    normed: bool
    """Whether the shares of a row's experts are divided by their sum."""


class Experts:
    """The feed-forward block of a layer with experts. In checkpoints the router is `gate`, the experts are
    `experts.0`, `experts.1`, ..., each with the names of GatedMlp."""

    def __init__(
        self, kernels: Kernels, width: int, shape: ExpertShape, *, activation: str, device: torch.device
    ) -> None:
        self._kernels = kernels
        self.shape, self.activation = shape, activation
        # It makes logits, so that sets which quantise other products leave it as it is.
        self.router = Linear(kernels, width, {"gate": shape.count}, bias=False, device=device, head=True)
        self.experts = [
            GatedMlp(kernels, width, shape.width, activation=activation, bias=False, fused=False, device=device)
            for _ in range(shape.count)
        ]
        self._gate_ups = [expert.gate_up for expert in self.experts]
        self._downs = [expert.down for expert in self.experts]
        self._run: PreparedExperts | None = None

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        linears = [(prefix, self.router)]
        for i, expert in enumerate(self.experts):
            linears += expert.linears(f"{prefix}experts.{i}.")
        return linears

    def weights(self, prefix: str) -> dict[str, Tensor]:
        places = self.router.weights(prefix)
        for i, expert in enumerate(self.experts):
            places |= expert.weights(f"{prefix}experts.{i}.")
        return places

    def pack(self) -> None:
        self.router.pack()
        for expert in self.experts:
            expert.pack()
        self.prepare()

    @property
    def parts(self) -> ExpertParts:
        gate_ups = tuple(expert.gate_up.prepared for expert in self.experts)
        downs = tuple(expert.down.prepared for expert in self.experts)
        return ExpertParts(self.router.prepared, gate_ups, downs, self.shape.chosen, self.shape.normed, self.activation)

    def prepare(self) -> None:
        """Prepare the experts' products to be run together. Call it again after one of them was replaced."""
        self._run = self._kernels.prepare_experts(self.parts)

    def __call__(self, x: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        # The router comes first: see quant/make/model.py.
        logits = self.router(x, adapters)
        if self._run is None:
            raise RuntimeError("experts are packed before they are called")
        changes = () if adapters is None else adapters.experts(self._gate_ups, self._downs)
        return self._run(x, logits, changes)
