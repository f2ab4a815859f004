"""Root mean square normalisation, alone or with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels


class RmsNorm:
    def __init__(self, kernels: Kernels, width: int, eps: float, *, offset: float, device: torch.device) -> None:
        """`offset`: added to the checkpoint's weight. If it is not 0, weight and product are fp32, because such weights
        are small numbers around 0, whose digits a sum near 1 would lose in half precision."""
        self._kernels = kernels
        self._eps = eps
        self._offset = offset
        dtype = torch.float32 if offset else kernels.compute_dtype
        self.weight = torch.empty(width, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight}

    def pack(self) -> None:
        self.weight += self._offset

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum). May overwrite `residual`."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps)
