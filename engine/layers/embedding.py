"""Token ids to rows, and, where the table is tied, the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Kernels, PreparedLinear


class Embedding:
    """The table keeps the checkpoint's dtype also where the kernels compute wider: only looked-up rows widen."""

    def __init__(
        self,
        kernels: Kernels,
        rows: int,
        width: int,
        *,
        tied: bool,
        scale: float | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Rows come out multiplied by `scale`, if it is given, rounded to `dtype` as models are trained with it."""
        self._kernels = kernels
        self._tied = tied
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self._table = torch.empty(rows, width, dtype=dtype, device=device)
        self.head: PreparedLinear | None = None
        """The table as output head [rows, width] -> [rows, vocabulary], when tied and packed."""

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}weight": self._table}

    def pack(self) -> None:
        if self._tied:
            self.head = self._kernels.prepare_head(self._table.to(self._kernels.weight_dtype), None)

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self._table).to(self._kernels.compute_dtype)
        return rows if self._scale is None else rows.mul_(self._scale)
