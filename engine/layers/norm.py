"""Root mean square normalisation, alone or with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels


class RmsNorm:
    def __init__(self, kernels: Kernels, width: int, eps: float, *, device: torch.device) -> None:
        self._kernels = kernels
        self._eps = eps
        self._weight = torch.empty(width, dtype=kernels.compute_dtype, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}weight": self._weight}

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum); `residual` may be overwritten."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)
