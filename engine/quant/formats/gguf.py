"""The block formats of GGUF files (llama.cpp's ggml-common.h), unpacked.

A row of weights is a row of blocks of 32 numbers, or of 256 in the "K" formats. A number is

    weight = scale * q + minimum

with a scale, and in some formats a minimum, for each group of 16 or 32 numbers. Fields of a block, in order, with d and
m as fp16 (in Q8_K: d as fp32) and as many bytes as are written behind:

    Q4_0  d, q 16                      q - 8; the low halves of the bytes are the first 16 numbers
    Q4_1  d, m, q 16
    Q5_0  d, fifth bits 4, q 16        q - 16
    Q5_1  d, m, fifth bits 4, q 16
    Q8_0  d, q 32 (int8)
    Q2_K  scales and minima 16, q 64, d, m            of 4 bits each; groups of 16
    Q3_K  third bits 32, q 64, scales 12, d           scales of 6 bits - 32; groups of 16
    Q4_K  d, m, scales and minima 12, q 128           of 6 bits each; groups of 32
    Q5_K  d, m, scales and minima 12, fifth bits 32, q 128
    Q6_K  q 128, two higher bits 64, scales 16 (int8), d      q - 32; groups of 16
    Q8_K  d, q 256 (int8), sums 32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.text.tensors import BLOCKS


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of weights, group by group: weight = scales * q + minima."""

    q: Tensor
    """int16 [rows, groups, numbers of a group]."""
    scales: Tensor
    """fp32 [rows, groups]."""
    minima: Tensor | None
    """fp32 [rows, groups]; None if all are 0."""

    def weights(self) -> Tensor:
        """fp32 [rows, inputs]."""
        weights = self.q.float().mul_(self.scales[..., None])
        return (weights if self.minima is None else weights.add_(self.minima[..., None])).flatten(1)


def unpacked(kind: str, rows: Tensor) -> Groups:
    """Unpack rows of one of BLOCKS' formats, uint8 [rows, bytes]."""
    blocks = rows.view(len(rows), -1, BLOCKS[kind][1])
    q, scales, minima = _FORMATS[kind](blocks)
    groups = scales.shape[-1] * scales.shape[-2]
    return Groups(
        q.reshape(len(rows), groups, -1).to(torch.int16),
        scales.reshape(len(rows), groups),
        None if minima is None else minima.reshape(len(rows), groups),
    )


#: The integers of blocks, [rows, blocks, numbers], with scales and minima, [rows, blocks, groups].
_Parts = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _shifted(data: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Cut the last dimension into pieces of `width` bytes. Each piece gives its bits from each of `shifts` on, one
    shift after another."""
    pieces = data.reshape(*data.shape[:-1], -1, 1, width)
    by = torch.tensor(shifts, dtype=torch.uint8, device=data.device)[:, None]
    shifted: Tensor = (pieces >> by) & mask
    return shifted.flatten(-3)


def _signed(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.int8).to(torch.int16)


def _halves(data: Tensor) -> Tensor:
    return _shifted(data, 16, (0, 4), 15).to(torch.int16)


def _fifth(bits: Tensor) -> Tensor:
    """The 32 bits of 4 bytes, from the lowest up, as the fifth bits of numbers."""
    by = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> by) & 1).flatten(-2).to(torch.int16) << 4


def _q4_0(b: Tensor) -> _Parts:
    return _halves(b[..., 2:]) - 8, _half(b, 0), None


def _q4_1(b: Tensor) -> _Parts:
    return _halves(b[..., 4:]), _half(b, 0), _half(b, 2)


def _q5_0(b: Tensor) -> _Parts:
    return (_halves(b[..., 6:]) | _fifth(b[..., 2:6])) - 16, _half(b, 0), None


def _q5_1(b: Tensor) -> _Parts:
    return _halves(b[..., 8:]) | _fifth(b[..., 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Tensor) -> _Parts:
    return _signed(b[..., 2:]), _half(b, 0), None


def _q2_k(b: Tensor) -> _Parts:
    both, q = b[..., :16], _shifted(b[..., 16:80], 32, (0, 2, 4, 6), 3)
    return q, _half(b, 80) * (both & 15), -(_half(b, 82) * (both >> 4))


def _q3_k(b: Tensor) -> _Parts:
    third, packed = b[..., :32], b[..., 96:108]
    low = _shifted(packed[..., :8], 8, (0, 4), 15)
    high = _shifted(packed[..., 8:], 4, (0, 2, 4, 6), 3)
    scales = (low | high << 4).to(torch.int16) - 32
    q = _shifted(b[..., 32:96], 32, (0, 2, 4, 6), 3).to(torch.int16)
    # A third bit of 0 takes 4 away.
    q = q - ((_shifted(third, 32, tuple(range(8)), 1).to(torch.int16) ^ 1) << 2)
    return q, _half(b, 108) * scales, None


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, upper = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (upper & 15) | (first >> 2 & 48)), -1)
    minima = torch.cat((second & 63, (upper >> 4) | (second >> 2 & 48)), -1)
    return scales, minima


def _q4_k(b: Tensor) -> _Parts:
    scales, minima = _six_bits(b[..., 4:16])
    return _shifted(b[..., 16:], 32, (0, 4), 15), _half(b, 0) * scales, -(_half(b, 2) * minima)


def _q5_k(b: Tensor) -> _Parts:
    scales, minima = _six_bits(b[..., 4:16])
    q = _shifted(b[..., 48:], 32, (0, 4), 15) | _shifted(b[..., 16:48], 32, tuple(range(8)), 1) << 4
    return q, _half(b, 0) * scales, -(_half(b, 2) * minima)


def _q6_k(b: Tensor) -> _Parts:
    low = _shifted(b[..., :128], 64, (0, 4), 15)
    high = _shifted(b[..., 128:192], 32, (0, 2, 4, 6), 3)
    q = (low | high << 4).to(torch.int16) - 32
    return q, _half(b, 208) * _signed(b[..., 192:208]), None


def _q8_k(b: Tensor) -> _Parts:
    scale = b[..., :4].contiguous().view(torch.float32)
    return _signed(b[..., 4:260]), scale, None


_FORMATS: Final[dict[str, Callable[[Tensor], _Parts]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
}
