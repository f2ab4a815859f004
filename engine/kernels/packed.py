"""The memory layout of weights of 4 and 8 bits. No other module knows it.

Both are cut along the inputs into tiles. A tile holds the rows of all outputs one after another, so that a program
reads some outputs of one tile as one contiguous piece. With 4 bits, a tile is two planes of inputs. The first plane is
in the low halves of the bytes, the second in the high halves, so that a mask extracts a plane in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

#: The most inputs of a 4-bit plane, and of an 8-bit tile.
_PLANE = 64
_TILE = 128
#: The fewest inputs of a group, because tensor cores multiply this many inputs at once.
LEAST_GROUP = 16
#: The number that stands for 0 in symmetric 4-bit weights.
MIDDLE = 8


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of integers: weight[n, k] = (q[n, k] - zero) * scale + minimum, each of the last three of n and k's
    group."""

    packed: Tensor
    """The integers q, [tiles, outputs, bytes]."""
    scales: Tensor
    """[groups, outputs], floating."""
    group: int
    """The number of consecutive inputs that share a scale: all of them, or a multiple of 16 that divides them."""
    shape: tuple[int, int]
    """(outputs, inputs)."""
    zeros: Tensor | None = None
    """uint8 [groups, outputs]; None if all are `zero`."""
    minima: Tensor | None = None
    """[groups, outputs], of the scales' dtype; None if all are 0."""
    _BITS: ClassVar[int]
    _ZERO: ClassVar[int]

    @property
    def nbytes(self) -> int:
        """The bytes in use, without the padding of tiles."""
        numbers = self.shape[0] * self.shape[1] * self._BITS // 8
        of_groups = (self.scales, self.zeros, self.minima)
        return numbers + sum(tensor.nbytes for tensor in of_groups if tensor is not None)

    @property
    def zero(self) -> int:
        """The number that stands for 0, or for the minimum where there are minima, if there are no zero points."""
        return self._ZERO if self.minima is None else 0

    def part(self, start: int, stop: int) -> Self:
        """The outputs from `start` to `stop`, as views."""
        return self._of(stop - start, lambda tensor: tensor[:, start:stop])

    def rows(self, outputs: Tensor) -> Tensor:
        """The outputs listed in `outputs`, int64, dequantised to fp32 [len(outputs), inputs]."""
        return self._of(len(outputs), lambda tensor: tensor.index_select(1, outputs)).dequantise()

    def _of(self, outputs: int, take: Callable[[Tensor], Tensor]) -> Self:
        zeros = None if self.zeros is None else take(self.zeros)
        minima = None if self.minima is None else take(self.minima)
        shape = (outputs, self.shape[1])
        return replace(
            self, packed=take(self.packed), scales=take(self.scales), shape=shape, zeros=zeros, minima=minima
        )

    def values(self) -> Tensor:
        """The numbers q, [outputs, inputs]."""
        raise NotImplementedError

    def dequantise(self) -> Tensor:
        """The weights in fp32 [outputs, inputs]."""
        zeros = self.zero if self.zeros is None else self._by_input(self.zeros)
        weights = (self.values().float() - zeros) * self._by_input(self.scales)
        return weights if self.minima is None else weights + self._by_input(self.minima)

    def _by_input(self, of_groups: Tensor) -> Tensor:
        return of_groups.T.float().repeat_interleave(self.group, 1)


@dataclass(frozen=True, slots=True)
class Int4Weight(_Weight):
    """A 4-bit weight, q from 0 to 15.

    `packed` is uint8 [tiles, outputs, plane]. The low half of [t, n, i] is input (2 t) * plane + i, the high half is
    input (2 t + 1) * plane + i. Inputs beyond the last are MIDDLE.
    """

    _BITS = 4
    _ZERO = MIDDLE

    @property
    def plane(self) -> int:
        """The inputs of half a tile. No plane is in two groups."""
        return self.packed.shape[2]

    @classmethod
    def pack(
        cls, q: Tensor, scales: Tensor, zeros: Tensor | None, group: int, minima: Tensor | None = None
    ) -> Int4Weight:
        """Pack `q`, integers from 0 to 15 [outputs, inputs]. Raises ValueError for an invalid group."""
        outputs, inputs = q.shape
        plane = _within(group, inputs, _PLANE)
        padded = F.pad(q.to(torch.uint8), (0, -inputs % (2 * plane)), value=MIDDLE)
        halves = padded.view(outputs, -1, 2, plane)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1).contiguous()
        return cls(packed, scales, group, (outputs, inputs), zeros, minima)

    @classmethod
    def quantise(cls, weight: Tensor, group: int, *, symmetric: bool = True) -> Int4Weight:
        """Round `weight`, [outputs, inputs], to nearest, group by group. Scales have its dtype."""
        outputs, inputs = weight.shape
        _within(group, inputs, _PLANE)
        grouped = weight.float().view(outputs, -1, group)
        low, high = grouped.amin(-1), grouped.amax(-1)
        if symmetric:
            scale = torch.maximum(-low / MIDDLE, high / (15 - MIDDLE))
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = (high - low) / 15
        # Divide by the scale as it is stored. A group of zeros may have any scale.
        scales = torch.where(scale > 0, scale, 1).to(weight.dtype)
        zeros = None if symmetric else (-low / scales.float()).round().clamp(0, 15)
        middle = MIDDLE if zeros is None else zeros[..., None]
        q = (grouped / scales.float()[..., None] + middle).round().clamp(0, 15).view(outputs, inputs)
        kept = None if zeros is None else zeros.T.to(torch.uint8).contiguous()
        return cls.pack(q, scales.T.contiguous(), kept, group)

    def values(self) -> Tensor:
        """The numbers q, uint8 [outputs, inputs]."""
        outputs, inputs = self.shape
        halves = torch.stack((self.packed & 15, self.packed >> 4), 2).transpose(0, 1)
        return halves.reshape(outputs, -1)[:, :inputs]


@dataclass(frozen=True, slots=True)
class Int8Weight(_Weight):
    """An 8-bit weight, q from -128 to 127, without zero points.

    `packed` is int8 [tiles, outputs, tile]. [t, n, i] is input t * tile + i. Inputs beyond the last are 0.
    """

    _BITS = 8
    _ZERO = 0

    @property
    def tile(self) -> int:
        """The inputs of a tile. No tile is in two groups."""
        return self.packed.shape[2]

    @classmethod
    def pack(cls, q: Tensor, scales: Tensor, group: int, minima: Tensor | None = None) -> Int8Weight:
        """Pack `q`, integers from -128 to 127 [outputs, inputs]. Raises ValueError for an invalid group."""
        outputs, inputs = q.shape
        tile = _within(group, inputs, _TILE)
        padded = F.pad(q.to(torch.int8), (0, -inputs % tile))
        packed = padded.view(outputs, -1, tile).transpose(0, 1).contiguous()
        return cls(packed, scales, group, (outputs, inputs), None, minima)

    @classmethod
    def quantise(cls, weight: Tensor, group: int | None = None) -> Int8Weight:
        """Round `weight`, [outputs, inputs], to nearest, group by group. `group` None: one scale for each output.
        Scales have its dtype."""
        outputs, inputs = weight.shape
        group = inputs if group is None else group
        _within(group, inputs, _TILE)
        grouped = weight.float().view(outputs, -1, group)
        scale = grouped.abs().amax(-1) / 127
        scales = torch.where(scale > 0, scale, 1).to(weight.dtype)
        q = (grouped / scales.float()[..., None]).round().clamp(-127, 127).view(outputs, inputs)
        return cls.pack(q, scales.T.contiguous(), group)

    def values(self) -> Tensor:
        """The numbers q, int8 [outputs, inputs]."""
        outputs, inputs = self.shape
        return self.packed.transpose(0, 1).reshape(outputs, -1)[:, :inputs]


def _within(group: int, inputs: int, largest: int) -> int:
    """The longest run of inputs, a power of two up to `largest`, that never crosses a group's border. Raises
    ValueError."""
    if group == inputs:
        return largest
    if group < 1 or inputs % group or group % LEAST_GROUP:
        raise ValueError(
            f"group={group} must be a multiple of {LEAST_GROUP} that divides the {inputs} inputs, or all of them"
        )
    return min(largest, group & -group)
