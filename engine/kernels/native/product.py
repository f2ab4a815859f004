"""A product with a packed weight, and its entry in the native tables."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from engine.kernels.native.library import Library, Pool

#: The kinds of a product's weight, as in operations.h: numbers in fp32 or bf16, or the table of quantised.h.
FP32, BF16, QUANTISED = 0, 1, 2


class Product(Structure):
    """Product of operations.h. Each field has eight bytes."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64), ("kind", c_int64)]


class PackedProduct:
    """A PreparedLinear with packed weights."""

    def __init__(
        self,
        library: Library,
        pool: Pool,
        weight: int,
        kind: int,
        kept: object,
        bias: Tensor | None,
        outputs: int,
        inputs: int,
    ) -> None:
        """`weight`: the address of numbers, or of a table. `kept`: the objects that own that memory."""
        self._kept = (kept, bias)
        self._sizes = (inputs, outputs)
        self._run, self._find, self._pool = library.linear, library.peaks, pool
        # The addresses are looked up once, because the tensors do not move.
        self._weight, self._added = weight, None if bias is None else bias.data_ptr()
        self._kind = kind

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), self._sizes[1])
        self._run(
            self._pool.address,
            x.data_ptr(),
            self._weight,
            self._added,
            out.data_ptr(),
            self._kind,
            len(x),
            *self._sizes,
        )
        return out

    def peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reference.peaks of the product with `x`, without storing the product."""
        x = x.contiguous()
        places, finite = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=torch.bool)
        self._find(
            self._pool.address,
            x.data_ptr(),
            self._weight,
            self._added,
            self._kind,
            len(x),
            *self._sizes,
            places.data_ptr(),
            finite.data_ptr(),
        )
        return places, finite

    def entry(self) -> Product:
        return Product(self._weight, self._added, *self._sizes, self._kind)


def entry(run: object) -> Product:
    """The entry of a prepared product. Raises TypeError if it is no PackedProduct."""
    if not isinstance(run, PackedProduct):
        raise TypeError(f"{run!r} is no packed product")
    return run.entry()
