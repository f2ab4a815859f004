"""A quantised matrix, unpacked from its checkpoint's format, and its preparation for a kernel set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear
from engine.kernels.packed import LEAST_GROUP, Int4Weight, Int8Weight


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
    def narrowed(self, outputs: range, inputs: range) -> Quantised:
        """A copy of some outputs and inputs. Raises ValueError if the inputs cannot be separated."""

    @abstractmethod
    def stacked_on(self, others: Sequence[Quantised]) -> Quantised | None:
        """This matrix with `others` stacked below it. None if they are not quantised alike."""


@dataclass(frozen=True, slots=True)
class Matrix(Quantised):
    """A matrix of integers. weight[n, order[k]] = (q[n, k] - zeros[g, n]) * scales[g, n] + minima[g, n], where g is
    k // group."""

    bits: int
    """4 or 8."""
    q: Tensor
    """uint8 [outputs, inputs], from 0 to 2 ** bits - 1. The inputs of one group are adjacent."""
    scales: Tensor
    """[groups, outputs], floating."""
    zeros: Tensor | None
    """uint8 [groups, outputs]; None if all are `middle`."""
    order: Tensor | None
    """int64 [inputs]: the input of each column; None if they are in order."""
    minima: Tensor | None = None
    """[groups, outputs], of the scales' dtype; None if all are 0."""

    @property
    def middle(self) -> int:
        """What stands for 0, or for the minimum, without zero points: half of all numbers; 0 with 4 bits and minima."""
        return 0 if self.bits == 4 and self.minima is not None else 2 ** (self.bits - 1)

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
            return Int4Weight.pack(self.q, self.scales, self.zeros, self.group, self.minima)
        return Int8Weight.pack((self.q.to(torch.int16) - 128).to(torch.int8), self.scales, self.group, self.minima)

    def _widened(self) -> Matrix:
        """The same weights with 8 bits. Only for matrices without zero points."""
        return self if self.bits == 8 else replace(self, bits=8, q=self.q + (128 - self.middle))

    def _with_minima(self) -> Matrix:
        """The same weights with a minimum for each group. Only for matrices without zero points."""
        if self.minima is not None:
            return self
        # With 4 bits, numbers then count from 0. The scale times 8 is exact.
        return replace(self, minima=self.scales * (-self.middle if self.bits == 4 else 0))

    def _in_groups_of(self, group: int) -> Matrix:
        """The same weights in groups of `group`, which divides this matrix's."""
        times = self.group // group
        return self._of_groups(lambda tensor: tensor.repeat_interleave(times, 0))

    def _of_groups(self, take: Callable[[Tensor], Tensor]) -> Matrix:
        zeros = None if self.zeros is None else take(self.zeros)
        minima = None if self.minima is None else take(self.minima)
        return replace(self, scales=take(self.scales), zeros=zeros, minima=minima)

    def narrowed(self, outputs: range, inputs: range) -> Matrix:
        rows, columns = slice(outputs.start, outputs.stop), slice(inputs.start, inputs.stop)
        if len(inputs) == self.q.shape[1]:
            return replace(self._of_groups(lambda tensor: tensor[:, rows].clone()), q=self.q[rows].clone())
        if self.order is not None:
            raise ValueError("its inputs are not in order (desc_act)")
        matrix, groups = self, slice(None)
        if len(self.scales) > 1:
            group = math.gcd(self.group, inputs.start, inputs.stop)
            if group % LEAST_GROUP:
                raise ValueError(f"groups of {self.group} inputs cannot be cut at {inputs.start} and {inputs.stop}")
            matrix, groups = self._in_groups_of(group), slice(inputs.start // group, inputs.stop // group)
        return replace(matrix._of_groups(lambda tensor: tensor[groups, rows].clone()), q=self.q[rows, columns].clone())

    def dequantise(self) -> Tensor:
        grouped = self.q.float().view(len(self.q), -1, self.group)
        zeros = self.middle if self.zeros is None else self.zeros.T.float()[..., None]
        weights = (grouped - zeros) * self.scales.T.float()[..., None]
        if self.minima is not None:
            weights += self.minima.T.float()[..., None]
        sorted_ = weights.flatten(1)
        if self.order is None:
            return sorted_
        return torch.empty_like(sorted_).index_copy_(1, self.order, sorted_)

    def stacked_on(self, others: Sequence[Quantised]) -> Matrix | None:
        alike = [other for other in others if isinstance(other, Matrix) and self._is_like(other)]
        if len(alike) < len(others):
            return None
        all_ = [self, *alike]

        def beside(of_groups: Sequence[Tensor | None]) -> Tensor | None:
            tensors = [tensor for tensor in of_groups if tensor is not None]
            return torch.cat(tensors, 1) if tensors else None

        return replace(
            self,
            q=torch.cat([matrix.q for matrix in all_]),
            scales=torch.cat([matrix.scales for matrix in all_], 1),
            zeros=beside([matrix.zeros for matrix in all_]),
            minima=beside([matrix.minima for matrix in all_]),
        )

    def _is_like(self, other: Matrix) -> bool:
        return (
            (self.bits, self.group, self.zeros is None, self.minima is None, self.order is None, self.scales.dtype)
            == (
                other.bits,
                other.group,
                other.zeros is None,
                other.minima is None,
                other.order is None,
                other.scales.dtype,
            )
        ) and (self.order is None or other.order is None or torch.equal(self.order, other.order))


def stacked(parts: Sequence[Quantised]) -> Quantised | None:
    """Stack matrices into one. None if they are not quantised alike. Matrices without zero points are made alike, which
    changes no weight: they get 8 bits if some have 8, the smallest groups, and minima if some have them."""
    plain = [part for part in parts if isinstance(part, Matrix) and part.zeros is None and part.order is None]
    if len(plain) == len(parts):
        if len({part.bits for part in plain}) > 1:
            plain = [part._widened() for part in plain]
        group = min(part.group for part in plain)
        if all(part.group % group == 0 for part in plain):
            plain = [part._in_groups_of(group) for part in plain]
        if any(part.minima is not None for part in plain):
            plain = [part._with_minima() for part in plain]
        parts = plain
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
