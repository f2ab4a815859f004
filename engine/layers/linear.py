"""A matrix product whose weight may be several of a checkpoint's, one below the other."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels, PreparedLinear


class Linear:
    """`parts` names the checkpoint's matrices and their outputs, in order: {"q_proj": 576, "k_proj": 192, ...}."""

    def __init__(
        self,
        kernels: Kernels,
        inputs: int,
        parts: dict[str, int],
        *,
        bias: bool,
        device: torch.device,
        head: bool = False,
    ) -> None:
        """`head`: it makes logits."""
        self._prepare = kernels.prepare_head if head else kernels.prepare_linear
        self._parts = parts
        outputs = sum(parts.values())
        self._weight: Tensor | None = torch.empty(outputs, inputs, dtype=kernels.weight_dtype, device=device)
        self._bias = torch.empty(outputs, dtype=kernels.compute_dtype, device=device) if bias else None
        self._run: PreparedLinear | None = None

    def weights(self, prefix: str) -> dict[str, Tensor]:
        if self._weight is None:
            raise RuntimeError("the weights of a packed Linear cannot be loaded again")
        places = {}
        start = 0
        for name, outputs in self._parts.items():
            places[f"{prefix}{name}.weight"] = self._weight[start : start + outputs]
            if self._bias is not None:
                places[f"{prefix}{name}.bias"] = self._bias[start : start + outputs]
            start += outputs
        return places

    def pack(self) -> None:
        """Give the weight to the kernel set, which may keep it in a layout of its own; ours is dropped."""
        if self._weight is None:
            raise RuntimeError("a Linear is packed once")
        self._run = self._prepare(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._run is None:
            raise RuntimeError("a Linear is packed before it is called")
        return self._run(x)
