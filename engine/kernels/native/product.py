"""A product with a packed weight, and mixtures of experts made of such products: their entries in the native tables."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from engine.kernels.layer import ExpertChanges, ExpertParts
from engine.kernels.native.adapters import mixture_table
from engine.kernels.native.exchange import Exchange
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
        self._library, self._run, self._pool = library, library.linear, pool
        # The addresses are looked up once, because the tensors do not move.
        self._weight, self._added = weight, None if bias is None else bias.data_ptr()
        self._kind = kind
        self.nbytes = 0
        """The bytes that the weight takes, without the padding of its layout."""
        self.rows: Callable[[Tensor], Tensor] | None = None
        """Looks up rows of the weight, as `Reference.lookup` says; None if its inputs are not in order."""

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

    def peaks(self, x: Tensor, first: int = 0, exchange: Exchange | None = None) -> tuple[Tensor, Tensor]:
        """Reference.peaks of the product with `x`, without storing the product."""
        x = x.contiguous()
        places, finite = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=torch.bool)
        arguments = (
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
        if exchange is None:
            self._library.peaks(*arguments)
        else:
            self._library.peaks_of_ranks(*arguments, first, exchange.address)
            exchange.check()
        return places, finite

    def entry(self) -> Product:
        return Product(self._weight, self._added, *self._sizes, self._kind)


def dense_rows(packed: Tensor, inputs: int, columns: int) -> Callable[[Tensor], Tensor]:
    """A function that looks up rows of a weight in fp32 or bf16, packed as gemm.h says: int64 [rows] to [rows,
    inputs] in the weight's type."""
    together = 1 if packed.dtype == torch.float32 else 2
    panels = packed.view(-1, packed.shape[1] // together, columns, together)

    def rows(outputs: Tensor) -> Tensor:
        return panels[outputs // columns, :, outputs % columns].flatten(1)[:, :inputs]

    return rows


def entry(run: object) -> Product:
    """The entry of a prepared product. Raises TypeError if it is no PackedProduct."""
    if not isinstance(run, PackedProduct):
        raise TypeError(f"{run!r} is no packed product")
    return run.entry()


class _Expert(Structure):
    _fields_ = [("gate_up", Product), ("down", Product)]


class Mixture(Structure):
    """Mixture of experts.h. Each field has eight bytes."""

    _fields_ = [
        ("experts", c_void_p),
        ("count", c_int64),
        ("chosen", c_int64),
        ("normed", c_int64),
        ("gelu", c_int64),
    ]


class NativeExperts:
    """A PreparedExperts: runs a mixture of experts in one native call."""

    def __init__(self, library: Library, pool: Pool, parts: ExpertParts) -> None:
        """`parts`: experts that `experts_fit`."""
        self._run, self._pool, self._parts = library.experts, pool, parts
        pairs = zip(parts.gate_ups, parts.downs, strict=True)
        self._table = (_Expert * len(parts.downs))(*(_Expert(entry(gate_up), entry(down)) for gate_up, down in pairs))
        gelu = int(parts.activation == "gelu_tanh")
        self.mixture = Mixture(ctypes.addressof(self._table), len(self._table), parts.chosen, int(parts.normed), gelu)

    def __call__(self, x: Tensor, logits: Tensor, changes: Sequence[ExpertChanges] = ()) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        out = torch.empty_like(x)
        adapters = mixture_table(changes, len(x)) if changes else None
        self._run(
            self._pool.address,
            ctypes.addressof(self.mixture),
            x.data_ptr(),
            logits.data_ptr(),
            len(x),
            out.data_ptr(),
            None if adapters is None else adapters.address,
        )
        return out


def experts_fit(parts: ExpertParts) -> bool:
    """Whether the native call supports these experts."""
    return all(isinstance(product, PackedProduct) for product in (*parts.gate_ups, *parts.downs))


def route(library: Library, pool: Pool, logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Reference.route in fp32."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    experts_of_rows = torch.empty(rows, chosen, dtype=torch.int64)
    shares = torch.empty(rows, chosen)
    mixture = Mixture(None, experts, chosen, int(normed), 0)
    library.route(
        pool.address, ctypes.addressof(mixture), logits.data_ptr(), rows, experts_of_rows.data_ptr(), shares.data_ptr()
    )
    return experts_of_rows, shares
