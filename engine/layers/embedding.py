"""The embedding: turns token ids into rows. A tied table is the output head too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import Kernels, PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.layers.adapted import AdaptedRows
from engine.quant.formats import Stored


class Embedding:
    """The embedding table. It keeps the checkpoint's dtype, or its 4 or 8 bits, even if the kernels compute in a wider
    type: only looked-up rows are widened."""

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
        """`scale`: a factor of all rows, rounded to `dtype`, because models are trained with the rounded one."""
        self._kernels = kernels
        self._tied = tied
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()
        self.shape, self.device = (rows, width), device
        self._dtype = dtype
        self._table: Tensor | Int4Weight | Int8Weight | None = None
        self._rows: Callable[[Tensor], Tensor] | None = None
        """Looks up rows in the head, where that has a layout of its own: the table is not kept beside it."""
        self._stored: Stored | None = None
        self.head: PreparedLinear | None = None
        """The table as output head [rows, width] -> [rows, vocabulary], when tied and packed."""

    def store(self, stored: Stored | None) -> None:
        """Set the checkpoint's quantised form of the table, if it has one. Call it before `weights`."""
        self._stored = stored

    def weights(self, prefix: str) -> dict[str, Tensor]:
        if self._stored is not None:
            return {f"{prefix}{end}": tensor for end, tensor in self._stored.places.items()}
        if not isinstance(self._table, Tensor):
            self._table = torch.empty(self.shape, dtype=self._dtype, device=self.device)
        return {f"{prefix}weight": self._table}

    def pack(self) -> None:
        if self._stored is not None:
            matrix = self._stored.read().on(self.device)
            stored_table = matrix.table()
            self._table = matrix.dequantise().to(self._dtype) if stored_table is None else stored_table
            self._stored = None
        if not self._tied:
            return
        table = self._packed_table()
        if isinstance(table, Tensor):
            self.head = self._kernels.prepare_head(table.to(self._kernels.weight_dtype), None)
        else:
            self.head = self._kernels.prepare_quantised(table, None)
        self._rows = self._kernels.lookup(self.head)
        if self._rows is not None:
            self._table = None

    def _packed_table(self) -> Tensor | Int4Weight | Int8Weight:
        return self._table if self._table is not None else self.weights("")["weight"]

    def __call__(self, tokens: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        looked_up = self._look_up(tokens)
        rows = looked_up.to(self._kernels.compute_dtype)
        if adapters is not None:
            adapters.embed(tokens, rows)
        return rows if self._scale is None else rows.mul_(self._scale)

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self._rows is not None:
            return self._rows(tokens)
        table = self._packed_table()
        return F.embedding(tokens, table) if isinstance(table, Tensor) else table.rows(tokens)
