"""Root mean square normalisation, alone or with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels


class RmsNorm:
    def __init__(self, kernels: Kernels, width: int, eps: float, *, offset: float, device: torch.device) -> None:
        """`offset` is added to the checkpoint's weight; if it is not 0, weight and product are fp32: as small numbers
        around 0 such weights have more digits than a sum near 1 would keep in half precision."""
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
        """(norm of the sum, the sum); `residual` may be overwritten."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps)
