"""Packs weights of 4 and 8 bits into the layouts of quantised_pairs.h and quantised_amx.h, and makes their product.

Weights of 8 bits whose numbers are so close to each other that 4, 5 or 6 bits hold them are packed in as many: those of
GGUF's types of 5 and 6 bits.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.native.library import Library, Pool
from engine.kernels.native.pages import Pages
from engine.kernels.native.product import QUANTISED, PackedProduct
from engine.kernels.packed import Int4Weight, Int8Weight

#: The candidates for the number of inputs that share a scale of the activations. The largest that divides a group is
#: used.
_BLOCKS = (128, 64, 32, 16)


class _Quantised(Structure):
    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("minima", c_void_p),
        ("zero", c_int64),
        ("half", c_int64),
        ("bits", c_int64),
        ("block", c_int64),
        ("order", c_void_p),
        ("blocks", c_int64),
        ("group", c_int64),
    )


def quantised_product(
    library: Library,
    pool: Pool,
    pages: Pages,
    weight: Int4Weight | Int8Weight,
    bias: Tensor | None,
    order: Tensor | None = None,
) -> PackedProduct:
    """Pack a weight and make its product. `order`: see Reference.prepare_ordered."""
    outputs, inputs = weight.shape
    block = next(block for block in _BLOCKS if weight.group == inputs or weight.group % block == 0)
    blocks = -(-inputs // block)
    columns = library.columns
    values = weight.values()
    bits, low = _narrowest(weight, values, block)
    padded = F.pad(values - low if low else values, (0, blocks * block - inputs, 0, -outputs % columns))
    ordered = _pack(padded, columns, bits, fours=library.fours)
    packed = pages.zeros(*ordered.shape, dtype=ordered.dtype).copy_(ordered)
    of_float = torch.float16 if weight.scales.dtype == torch.float16 else torch.float32
    scales = _by_panel(weight.scales.to(of_float), columns)
    minima = None if weight.minima is None else _by_panel(weight.minima.to(of_float), columns)
    zeros = None if weight.zeros is None else _by_panel(weight.zeros.to(torch.int16), columns)
    zero = weight.zero - low if zeros is None else 0
    order = None if order is None else order.contiguous()
    table = _Quantised(
        packed.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        None if minima is None else minima.data_ptr(),
        zero,
        int(of_float == torch.float16),
        bits,
        block,
        None if order is None else order.data_ptr(),
        blocks,
        blocks // len(weight.scales),
    )
    rows = _Rows(packed, scales, zeros, minima, zero, bits, inputs, columns, library.fours)
    kept = (table, rows, order)
    product = PackedProduct(library, pool, ctypes.addressof(table), QUANTISED, kept, bias, outputs, inputs)
    product.nbytes = outputs * inputs * bits // 8 + sum(
        tensor.element_size() * weight.scales.numel() for tensor in (scales, zeros, minima) if tensor is not None
    )
    product.rows = None if order is not None else rows
    return product


def _narrowest(weight: Int4Weight | Int8Weight, values: Tensor, block: int) -> tuple[int, int]:
    """The bits that hold the numbers less the smallest of them, and that: 0 where they are packed as they are."""
    if isinstance(weight, Int4Weight):
        return 4, 0
    low, high = (int(bound) for bound in values.aminmax())
    for bits in (4, 5, 6):
        # The upper bits of 32 inputs' numbers of 5 bits are packed together.
        if high - low < 1 << bits and (bits != 5 or block % 32 == 0):
            return bits, low
    return 8, 0


def _pack(values: Tensor, columns: int, bits: int, *, fours: bool) -> Tensor:
    """Pack numbers, [panels * columns, inputs], as the headers say."""
    together, depth = 4 if fours else 2, values.shape[1]
    panels = len(values) // columns
    if bits == 8:
        return values.view(panels, columns, -1, together).transpose(1, 2)
    numbers = values.to(torch.uint8)
    eights = (numbers & 15).view(panels, columns, -1, 8)
    lower = (_fours(eights) if fours else _int16_words(eights)).transpose(1, 2)
    if bits == 4:
        return lower
    width = bits - 4
    inputs = 32 // width
    # Number i of a piece of bits is that of the i-th pair, or four, of a chunk's inputs.
    pieces = (numbers >> 4).view(panels, columns, -1, inputs // together, together).int()
    shifts = width * torch.arange(inputs // together, dtype=torch.int32)
    upper = _narrowed((pieces << shifts[:, None]).sum(3, dtype=torch.int32), fours=fours).transpose(1, 2)
    chunks = lower.reshape(panels, depth // inputs, inputs // 8, *lower.shape[2:])
    return torch.cat((upper[:, :, None], chunks), 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Looks up rows of a packed weight."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    minima: Tensor | None
    zero: int
    bits: int
    inputs: int
    columns: int
    fours: bool

    def __call__(self, outputs: Tensor) -> Tensor:
        """Dequantise the outputs listed in `outputs`, int64, to fp32 [len(outputs), inputs]."""
        panel, column = outputs // self.columns, outputs % self.columns
        zeros = self.zero if self.zeros is None else self.zeros[panel, :, column].float()[..., None]
        values = self._values(panel, column).float().view(len(outputs), self.scales.shape[1], -1)
        weights = (values - zeros) * self.scales[panel, :, column].float()[..., None]
        if self.minima is not None:
            weights += self.minima[panel, :, column].float()[..., None]
        return weights.flatten(1)[:, : self.inputs]

    def _values(self, panel: Tensor, column: Tensor) -> Tensor:
        """The packed numbers of rows, [rows, inputs of whole blocks]."""
        if self.bits == 8:
            return self.packed[panel, :, column].flatten(1)
        if self.bits == 4:
            return self._unpacked(self.packed[panel, :, column], 4, 8).flatten(1)
        chunks = self.packed[panel, :, :, column]
        lower = self._unpacked(chunks[:, :, 1:], 4, 8).flatten(1)
        upper = self._unpacked(chunks[:, :, 0], self.bits - 4, 32 // (self.bits - 4)).flatten(1)
        return lower | upper << 4

    def _unpacked(self, pieces: Tensor, width: int, inputs: int) -> Tensor:
        """The numbers of `width` bits in pieces of `inputs` of them, [..., words or bytes]."""
        shifts = torch.arange(0, inputs // pieces.shape[-1] * width, width, dtype=pieces.dtype)
        return (pieces[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _int16_words(q: Tensor) -> Tensor:
    """Pack numbers [panels, columns, eights, 8] into words, int16 [panels, columns, eights, 2]: the first pair is in
    the lowest bits."""
    packed = torch.zeros(*q.shape[:3], 2, dtype=torch.int32)
    for pair in range(4):
        packed |= q[..., 2 * pair : 2 * pair + 2].int() << (4 * pair)
    return _narrowed(packed, fours=False)


def _fours(q: Tensor) -> Tensor:
    """Pack numbers [panels, columns, eights, 8] into bytes, [panels, columns, eights, 4]: the low halves hold the first
    four."""
    return (q[..., :4] | q[..., 4:] << 4).to(torch.uint8)


def _narrowed(bits: Tensor, *, fours: bool) -> Tensor:
    """Bits in int32 as bytes, or as words of 16 bits."""
    return bits.to(torch.uint8) if fours else torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)


def _by_panel(rows: Tensor, columns: int) -> Tensor:
    """Reorder [groups, outputs] to [panels, groups, columns], padded with zeros."""
    padded = F.pad(rows, (0, -rows.shape[1] % columns))
    return padded.view(len(rows), -1, columns).transpose(0, 1).contiguous()
