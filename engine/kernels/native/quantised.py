"""Packs weights of 4 and 8 bits into the layouts of quantised_pairs.h and quantised_amx.h, and makes their product."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.native.library import Library, Pool
from engine.kernels.native.pages import Pages
from engine.kernels.native.product import QUANTISED, PackedProduct
from engine.kernels.packed import Int4Weight, Int8Weight

#: The candidates for the number of inputs that share a scale of the activations. The largest that divides a group is
#: used.
_BLOCKS = (128, 64, 32)


class _Quantised(Structure):
    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
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
) -> PackedProduct | None:
    """Pack a weight and make its product. None if the group size is not a multiple of a block. `order`: see
    Reference.prepare_ordered."""
    outputs, inputs = weight.shape
    block = next((block for block in _BLOCKS if weight.group == inputs or weight.group % block == 0), None)
    if block is None:
        return None
    blocks = -(-inputs // block)
    columns, depth = library.columns, blocks * block
    missing = -outputs % columns
    values = F.pad(weight.values(), (0, depth - inputs, 0, missing))
    zeros = None
    if isinstance(weight, Int8Weight):
        together = 4 if library.fours else 2
        ordered = values.view(-1, columns, depth // together, together).transpose(1, 2)
    else:
        pack = _fours if library.fours else _int16_words
        ordered = pack(values.view(-1, columns, depth // 8, 8)).transpose(1, 2)
        zeros = None if weight.zeros is None else _by_panel(weight.zeros.to(torch.int16), columns)
    packed = pages.zeros(*ordered.shape, dtype=ordered.dtype).copy_(ordered)
    order = None if order is None else order.contiguous()
    scales = _by_panel(weight.scales.float(), columns)
    groups = len(weight.scales)
    table = _Quantised(
        packed.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        8 if isinstance(weight, Int8Weight) else 4,
        block,
        None if order is None else order.data_ptr(),
        blocks,
        blocks // groups,
    )
    kept = (table, packed, scales, zeros, order)
    return PackedProduct(library, pool, ctypes.addressof(table), QUANTISED, kept, bias, outputs, inputs)


def kept_bytes(weight: Int4Weight | Int8Weight) -> int:
    """The bytes that a packed weight takes: numbers, scales in fp32, and zero points of two bytes each."""
    outputs, inputs = weight.shape
    if isinstance(weight, Int8Weight):
        return outputs * inputs + 4 * weight.scales.numel()
    return outputs * inputs // 2 + (4 if weight.zeros is None else 6) * weight.scales.numel()


def _int16_words(q: Tensor) -> Tensor:
    """Pack numbers [panels, columns, eights, 8] into words, int16 [panels, columns, eights, 2]: the first pair is in
    the lowest bits."""
    packed = torch.zeros(*q.shape[:3], 2, dtype=torch.int32)
    for pair in range(4):
        packed |= q[..., 2 * pair : 2 * pair + 2].int() << (4 * pair)
    return torch.where(packed >= 1 << 15, packed - (1 << 16), packed).to(torch.int16)


def _fours(q: Tensor) -> Tensor:
    """Pack numbers [panels, columns, eights, 8] into bytes, [panels, columns, eights, 4]: the low halves hold the first
    four."""
    return (q[..., :4] | q[..., 4:] << 4).to(torch.uint8)


def _by_panel(rows: Tensor, columns: int) -> Tensor:
    """Reorder [groups, outputs] to [panels, groups, columns], padded with zeros."""
    padded = F.pad(rows, (0, -rows.shape[1] % columns))
    return padded.view(len(rows), -1, columns).transpose(0, 1).contiguous()
