"""Runs all layers of a model in one native call: builds the table of layers and the step's table for layers.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from engine.kernels.layer import LayerParts, PreparedStepAdapters, ReportTime
from engine.kernels.native.adapters import AdapterTables
from engine.kernels.native.exchange import Exchange
from engine.kernels.native.library import Library, Pool, Storage
from engine.kernels.native.product import Mixture, NativeExperts, PackedProduct, Product, entry
from engine.kernels.ragged import RaggedBatch

#: The kernel classes, in the order of Class in operations.h, with breakdown.py's names.
_CLASSES = ("linear", "norm", "rope and cache", "attention", "gate", "route", "adapters")


class NativeLayers:
    """A PreparedLayers: built when a model is packed, called once for each step."""

    def __init__(
        self,
        library: Library,
        pool: Pool,
        layers: Sequence[LayerParts],
        norm: Tensor | None,
        storage: Storage,
        report_time: ReportTime | None,
        exchange: Exchange | None = None,
    ) -> None:
        """`layers`: layers that `fit`. `norm`: see Reference.prepare_layers. `report_time`: receives each call's times
        by kernel class. `exchange`: this rank's end, if the layers are one rank's share."""
        self._library, self._pool, self._exchange = library, pool, exchange
        self._kept = (list(layers), norm)
        self._experts = [
            None if layer.experts is None else NativeExperts(library, pool, layer.experts) for layer in layers
        ]
        self._table = (_Layer * len(layers))(*map(_entry, layers, self._experts))
        self._norm, self._storage, self._report_time = _address(norm), storage, report_time
        self._adapters = AdapterTables(layers)

    def __call__(
        self,
        residual: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[RaggedBatch],
        caches: Sequence[Tensor],
        output_rows: Tensor,
        adapters: PreparedStepAdapters | None = None,
        partial: bool = False,
    ) -> Tensor:
        residual, output_rows = residual.contiguous(), output_rows.contiguous()
        out = residual if self._norm is None else residual.new_empty(len(output_rows), residual.shape[1])
        turned = [(cos.contiguous(), sin.contiguous()) for cos, sin in rotations]
        before = [leads(group_batch) for group_batch in attention]
        group_arguments = zip(attention, before, caches, strict=True)
        groups = (_Group * len(attention))(*(_group(*arguments, self._storage) for arguments in group_arguments))
        turns = (_Turn * len(turned))(*(_Turn(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in turned))
        spent = None if self._report_time is None else (c_int64 * len(_CLASSES))()
        sizes = (len(residual), len(output_rows))
        tables = [
            self._adapters.of_step(groups, size)
            for groups, size in zip(() if adapters is None else adapters.groups, sizes, strict=False)
        ]
        step = _Step(
            residual.data_ptr(),
            out.data_ptr(),
            self._norm,
            ctypes.addressof(groups),
            ctypes.addressof(turns),
            output_rows.data_ptr(),
            len(output_rows),
            *residual.shape,
            None if spent is None else ctypes.addressof(spent),
            *(table.address for table in tables),
        )
        arguments = self._pool.address, self._table, len(self._table), ctypes.byref(step)
        if self._exchange is None:
            self._library.layers(*arguments)
        else:
            self._library.layers_of_rank(*arguments, self._exchange.address, int(partial))
            self._exchange.check()
        if self._report_time is not None and spent is not None:
            for name, nanoseconds in zip(_CLASSES, spent, strict=True):
                self._report_time(name, nanoseconds / 1e9)
        return out


def leads(batch: RaggedBatch) -> Tensor:
    """The tokens of each sequence before its table begins, int32 [sequences]: 0 without a window or positions."""
    if batch.window is None or batch.positions is None:
        return torch.zeros_like(batch.kv_lens)
    # By numpy, whose small operations take a tenth of the time of torch's.
    last = batch.positions.numpy()[batch.query_starts.numpy()[1:] - 1]
    return torch.from_numpy((last + 1 - batch.kv_lens.numpy()).astype(np.int32))


def fit(layers: Sequence[LayerParts], head_multiple: int) -> bool:
    """Whether the native call supports all these layers."""
    return all(
        all(isinstance(product, PackedProduct) for product in (layer.qkv, layer.output, *_fed_by(layer)))
        and layer.head_dim % head_multiple == 0
        and all(norm.dtype == torch.float32 for norm in _norms(layer))
        for layer in layers
    )


def _fed_by(layer: LayerParts) -> tuple[object, ...]:
    """The products of the feed-forward block."""
    if layer.experts is None:
        return layer.gate_up, layer.down
    return layer.experts.router, *layer.experts.gate_ups, *layer.experts.downs


def _norms(layer: LayerParts) -> list[Tensor]:
    every = (layer.input_norm, layer.attended_norm, layer.middle_norm, layer.fed_norm, *(layer.head_norms or ()))
    return [norm for norm in every if norm is not None]


def _entry(layer: LayerParts, experts: NativeExperts | None) -> _Layer:
    dense = layer.experts is None
    query_norm, key_norm = layer.head_norms or (None, None)
    return _Layer(
        _address(layer.input_norm),
        entry(layer.qkv),
        _address(query_norm),
        _address(key_norm),
        entry(layer.output),
        _address(layer.attended_norm),
        _address(layer.middle_norm),
        entry(layer.gate_up) if dense else Product(),
        int(layer.activation == "gelu_tanh"),
        entry(layer.down) if dense else Product(),
        _address(layer.fed_norm),
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.eps,
        layer.scale,
        layer.softcap or 0.0,
        Product() if layer.experts is None else entry(layer.experts.router),
        Mixture() if experts is None else experts.mixture,
        layer.group,
        layer.cache_index,
        layer.rope,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _group(batch: RaggedBatch, before: Tensor, cache: Tensor, storage: Storage) -> _Group:
    size = cache.element_size()
    return _Group(
        cache.data_ptr(),
        cache.stride(0) * size,
        cache.stride(1) * size,
        storage.kind(cache),
        cache.shape[3],
        batch.slots.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.kv_lens.data_ptr(),
        before.data_ptr(),
        batch.tables.data_ptr(),
        batch.table_rows.data_ptr(),
        batch.tables.stride(0),
        len(batch.kv_lens),
        batch.window or 0,
    )


# The structures of layers.h and operations.h. Each field has eight bytes.


class _Layer(Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv", Product),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", Product),
        ("attended_norm", c_void_p),
        ("middle_norm", c_void_p),
        ("gate_up", Product),
        ("gelu", c_int64),
        ("down", Product),
        ("fed_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_double),
        ("scale", c_double),
        ("cap", c_double),
        ("router", Product),
        ("mixture", Mixture),
        ("group", c_int64),
        ("place", c_int64),
        ("rope", c_int64),
    ]


class _Group(Structure):
    _fields_ = [
        ("cache", c_void_p),
        ("layer_bytes", c_int64),
        ("half_bytes", c_int64),
        ("kind", c_int64),
        ("block", c_int64),
        ("slots", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("leads", c_void_p),
        ("tables", c_void_p),
        ("table_rows", c_void_p),
        ("table_stride", c_int64),
        ("sequences", c_int64),
        ("window", c_int64),
    ]


class _Turn(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("turning", c_int64)]


class _Step(Structure):
    _fields_ = [
        ("residual", c_void_p),
        ("out", c_void_p),
        ("norm", c_void_p),
        ("groups", c_void_p),
        ("turns", c_void_p),
        ("wanted", c_void_p),
        ("rows", c_int64),
        ("tokens", c_int64),
        ("width", c_int64),
        ("spent", c_void_p),
        ("adapted", c_void_p),
        ("adapted_wanted", c_void_p),
    ]
