"""A quantised matrix, unpacked from its checkpoint's format, and its preparation for a kernel set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight


@dataclass(frozen=True, slots=True)
class Quantised(ABC):
    """A quantised matrix [outputs, inputs]."""

    def on(self, device: torch.device) -> Self:
        """A copy with every tensor on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    @abstractmethod
    def prepare(self, kernels: Kernels, bias: Tensor | None) -> PreparedLinear:
        """Prepare the product, as `Kernels.prepare_linear` does."""

    @abstractmethod
    def dequantise(self) -> Tensor:
        """The weights in fp32 [outputs, inputs], with inputs in their original order."""

    @abstractmethod
    def table(self) -> Int4Weight | Int8Weight | None:
        """A packed form whose rows can be looked up, as for an embedding. None if it must be dequantised for that."""

    @abstractmethod
    def stacked_on(self, others: Sequence[Quantised]) -> Quantised | None:
        """This matrix with `others` stacked below it. None if they are not quantised alike."""


@dataclass(frozen=True, slots=True)
class Matrix(Quantised):
    """A matrix of integers: weight[n, order[k]] = (q[n, k] - zeros[k // group, n]) * scales[k // group, n]"""

    bits: int
    """4 or 8."""
    q: Tensor
    """uint8 [outputs, inputs], from 0 to 2 ** bits - 1. The inputs of one group are adjacent."""
    scales: Tensor
    """[groups, outputs], floating."""
    zeros: Tensor | None
    """uint8 [groups, outputs]; None if all are 2 ** (bits - 1)."""
    order: Tensor | None
    """int64 [inputs]: the input of each column; None if they are in order."""

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.q.shape[1] // len(self.scales)

    def prepare(self, kernels: Kernels, bias: Tensor | None) -> PreparedLinear:
        if self.bits == 8 and self.zeros is not None:
            # Too rare for a kernel of its own.
            return kernels.prepare_linear(self.dequantise().to(kernels.weight_dtype), bias)
        if self.order is not None:
            return kernels.prepare_ordered(self.packed(), bias, self.order)
        return kernels.prepare_quantised(self.packed(), bias)

    def table(self) -> Int4Weight | Int8Weight | None:
        return None if self.order is not None or (self.bits == 8 and self.zeros is not None) else self.packed()

    def packed(self) -> Int4Weight | Int8Weight:
        """The packed weights, without the order. With 8 bits, only for matrices without zero points."""
        if self.bits == 4:
            return Int4Weight.pack(self.q, self.scales, self.zeros, self.group)
        return Int8Weight.pack((self.q.to(torch.int16) - 128).to(torch.int8), self.scales, self.group)

    def widened(self) -> Matrix:
        """The same weights with 8 bits. Only for matrices without zero points."""
        return self if self.bits == 8 else replace(self, bits=8, q=self.q + (128 - 8))

    def dequantise(self) -> Tensor:
        grouped = self.q.float().view(len(self.q), -1, self.group)
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.T.float()[..., None]
        sorted_ = ((grouped - zeros) * self.scales.T.float()[..., None]).flatten(1)
        if self.order is None:
            return sorted_
        return torch.empty_like(sorted_).index_copy_(1, self.order, sorted_)

    def stacked_on(self, others: Sequence[Quantised]) -> Matrix | None:
        alike = [other for other in others if isinstance(other, Matrix) and self._is_like(other)]
        if len(alike) < len(others):
            return None
        all_ = [self, *alike]
        zeros = (
            None if self.zeros is None else torch.cat([matrix.zeros for matrix in all_ if matrix.zeros is not None], 1)
        )
        return Matrix(
            self.bits,
            torch.cat([matrix.q for matrix in all_]),
            torch.cat([matrix.scales for matrix in all_], 1),
            zeros,
            self.order,
        )

    def _is_like(self, other: Matrix) -> bool:
        return (
            (self.bits, self.group, self.zeros is None, self.order is None, self.scales.dtype)
            == (other.bits, other.group, other.zeros is None, other.order is None, other.scales.dtype)
        ) and (self.order is None or other.order is None or torch.equal(self.order, other.order))


def stacked(parts: Sequence[Quantised]) -> Quantised | None:
    """Stack matrices into one. None if they are not quantised alike. Of symmetric matrices with 4 and with 8 bits,
    those with 4 get 8, which changes no weight."""
    if len({part.bits for part in parts if isinstance(part, Matrix)}) > 1:
        parts = [part.widened() if isinstance(part, Matrix) and part.zeros is None else part for part in parts]
    return parts[0].stacked_on(parts[1:])


def grouped_order(name: str, index: Tensor, groups: int) -> Tensor | None:
    """The order of inputs that makes groups adjacent, from each input's group, int32 [inputs]. None if they are
    already.

    Raises ModelError if a group is out of range or groups have different sizes, which no kernel supports.
    """
    inputs = len(index)
    # A malformed index may hold any numbers.
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise ModelError(
            f"{name} names group {low if low < 0 else high} where there are {groups} groups of inputs, counted from 0"
        )
    counts = torch.bincount(index.long(), minlength=groups)
    if bool((counts != inputs // groups).any()):
        odd = int((counts != inputs // groups).nonzero()[0])
        raise ModelError(
            f"{name} gives group {odd} {int(counts[odd])} inputs where each has {inputs // groups}: groups of unequal "
            "size are not supported"
        )
    order = torch.argsort(index, stable=True)
    return None if torch.equal(order, torch.arange(inputs, device=index.device)) else order
