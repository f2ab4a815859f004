"""Runs a mixture of experts in one native call: builds its table for experts.h."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from engine.kernels.layer import ExpertParts
from engine.kernels.native.library import Library, Pool
from engine.kernels.native.product import PackedProduct, Product, entry


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
    """A PreparedExperts."""

    def __init__(self, library: Library, pool: Pool, parts: ExpertParts) -> None:
        """`parts`: experts that `fit`."""
        self._run, self._pool, self._parts = library.experts, pool, parts
        pairs = zip(parts.gate_ups, parts.downs, strict=True)
        self._table = (_Expert * len(parts.downs))(*(_Expert(entry(gate_up), entry(down)) for gate_up, down in pairs))
        gelu = int(parts.activation == "gelu_tanh")
        self.mixture = Mixture(ctypes.addressof(self._table), len(self._table), parts.chosen, int(parts.normed), gelu)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        out = torch.empty_like(x)
        self._run(
            self._pool.address,
            ctypes.addressof(self.mixture),
            x.data_ptr(),
            logits.data_ptr(),
            len(x),
            out.data_ptr(),
        )
        return out


def fit(parts: ExpertParts) -> bool:
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
