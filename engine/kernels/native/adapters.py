"""LoRA adapters in the form of adapters.h: an adapter's change of a product, and the tables of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array, Structure, c_int64, c_void_p
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import AdapterGroups, ExpertChanges, LayerParts, LowRankChange, PreparedAdapter
from engine.kernels.native.library import Library, Pool
from engine.kernels.native.pages import Pages, whole_lines

#: The products of a layer that adapters change, in the order of Adapted in adapters.h.
_PRODUCTS: Final = 5
#: kUpVectors and kDownRanks of adapters.h.
_UP_VECTORS, _DOWN_RANKS = 4, 4
#: Bytes of an adapter from which on it has large pages. Less would leave too much of the last one unused.
_LEAST_MOVED: Final = 4 << 20


class NativeLowRank:
    """A LowRankChange with packed matrices."""

    def __init__(self, library: Library, pool: Pool, down: Tensor, ups: Sequence[tuple[slice, slice, Tensor]]) -> None:
        """See Reference.prepare_low_rank. All matrices are of one dtype, fp32 or bf16."""
        self._run, self._pool = library.low_rank, pool
        half = down.dtype == torch.bfloat16
        together = 2 if half and library.adapter_pairs else 1
        packed = _packed_down(down, together * library.lanes)
        matrices = [_packed_up(up, library.lanes, together) for _, _, up in ups]
        self._parts = (_Part * len(ups))(
            *(
                _Part(matrix.data_ptr(), ranks.start, up.shape[1], outputs.start, up.shape[0])
                for matrix, (outputs, ranks, up) in zip(matrices, ups, strict=True)
            )
        )
        self._packed = [packed, *matrices]
        ranks = -(-len(down) // _DOWN_RANKS) * _DOWN_RANKS
        self.entry = _LowRank(packed.data_ptr(), ranks, int(half), ctypes.addressof(self._parts), len(ups))

    @property
    def nbytes(self) -> int:
        """The memory that `move` takes."""
        return sum(whole_lines(matrix.nbytes) for matrix in self._packed)

    def move(self, memory: Tensor) -> None:
        """Keep the matrices in `memory`, uint8 [nbytes]. Before the first step."""
        addresses, address = [], memory.data_ptr()
        for matrix in self._packed:
            ctypes.memmove(address, matrix.data_ptr(), matrix.nbytes)
            addresses.append(address)
            address += whole_lines(matrix.nbytes)
        self._packed = [memory]
        self.entry.down = addresses[0]
        for part, up in zip(self._parts, addresses[1:], strict=True):
            part.up = up

    def add(self, x: Tensor, out: Tensor, rows: Tensor | None) -> None:
        """See LowRankChange.add. `out`: contiguous fp32."""
        x = x.contiguous()
        rows = torch.arange(len(x)) if rows is None else rows
        self._run(
            self._pool.address,
            ctypes.addressof(self.entry),
            x.data_ptr(),
            x.shape[1],
            out.data_ptr(),
            out.shape[1],
            rows.data_ptr(),
            len(rows),
        )


def _packed_down(weight: Tensor, block: int) -> Tensor:
    """`block`: the inputs of a block."""
    ranks, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % block, 0, -ranks % _DOWN_RANKS))
    return padded.view(len(padded) // _DOWN_RANKS, _DOWN_RANKS, -1, block).transpose(1, 2).contiguous()


def _packed_up(weight: Tensor, lanes: int, together: int) -> Tensor:
    """`together`: the ranks that are read at once."""
    outputs, ranks = weight.shape
    panel = _UP_VECTORS * lanes
    padded = F.pad(weight, (0, -ranks % together, 0, -outputs % panel))
    return padded.view(-1, panel, padded.shape[1] // together, together).transpose(1, 2).contiguous()


def bring_together(changes: Iterable[LowRankChange]) -> None:
    """Move an adapter's matrices into large pages, side by side. A step reads each once, and 32 adapters of 10 MB in
    small pages took it 26% more time."""
    native = [change for change in changes if isinstance(change, NativeLowRank)]
    nbytes = sum(change.nbytes for change in native)
    if nbytes < _LEAST_MOVED:
        return
    memory = Pages(chunk=nbytes).zeros(nbytes, dtype=torch.uint8)
    for change, part in zip(native, torch.split(memory, [change.nbytes for change in native]), strict=True):
        change.move(part)


class AdapterTables:
    """Makes a step's tables. It keeps each adapter's as long as the adapter lives."""

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        self._count = len(layers) * _PRODUCTS
        self._indexes: dict[int, int] = {}
        self._of_experts: dict[int, int] = {}
        self._first_experts = (c_int64 * len(layers))()
        for i, layer in enumerate(layers):
            self._first_experts[i] = len(self._of_experts) // 2
            if layer.experts is not None:
                for pair in zip(layer.experts.gate_ups, layer.experts.downs, strict=True):
                    for of_expert in pair:
                        self._of_experts[id(of_expert)] = len(self._of_experts)
            router = None if layer.experts is None else layer.experts.router
            for j, product in enumerate((layer.qkv, layer.output, layer.gate_up, layer.down, router)):
                if product is not None:
                    self._indexes[id(product)] = i * _PRODUCTS + j
        self._of_adapter: WeakKeyDictionary[Any, _Table] = WeakKeyDictionary()

    def of_step(self, groups: AdapterGroups, tokens: int) -> StepTable:
        """`tokens`: the rows of the batch."""
        return StepTable([(self._table(adapter), rows) for adapter, rows in groups], tokens, self._first_experts)

    def _table(self, adapter: PreparedAdapter) -> _Table:
        table = self._of_adapter.get(adapter)
        if table is None:
            products: dict[int, LowRankChange] = {}
            experts: dict[int, LowRankChange] = {}
            for prepared, change in adapter.changes().items():
                if (index := self._of_experts.get(id(prepared))) is not None:
                    experts[index] = change
                else:
                    products[self._indexes[id(prepared)]] = change
            table = _Table(
                _Entries(products, self._count), _Entries(experts, len(self._of_experts)) if experts else None
            )
            self._of_adapter[adapter] = table
        return table


def mixture_table(changes: Sequence[ExpertChanges], tokens: int) -> StepTable:
    """The Adapters of a mixture's rows, for a call that runs its experts alone."""
    groups = []
    for change in changes:
        pairs = [change for pair in zip(change.gate_ups, change.downs, strict=True) for change in pair]
        experts = {index: product for index, product in enumerate(pairs) if product is not None}
        groups.append((_Table(_Entries({}, 0), _Entries(experts, len(pairs))), change.rows))
    return StepTable(groups, tokens, (c_int64 * 1)())


class _Table:
    """An adapter's change of each product, and of each expert's two products."""

    def __init__(self, products: _Entries, experts: _Entries | None) -> None:
        self._kept = (products, experts)
        self.products, self.experts = products.address, None if experts is None else experts.address


class _Entries:
    """The LowRanks of an adapter, by the index of the product that each changes."""

    def __init__(self, changes: Mapping[int, LowRankChange], count: int) -> None:
        self._kept = changes
        self._entries = (_LowRank * count)()
        for index, change in changes.items():
            if not isinstance(change, NativeLowRank):
                raise TypeError(f"{change!r} is no change of the native kernels")
            self._entries[index] = change.entry
        self.address = ctypes.addressof(self._entries)


class StepTable:
    """The Adapters of a batch's rows. Keep it until the call has ended."""

    def __init__(
        self, groups: Sequence[tuple[_Table, Tensor | None]], tokens: int, first_experts: Array[c_int64]
    ) -> None:
        """`first_experts`: for each layer the index of its first expert among those of all layers."""
        every = torch.arange(tokens)
        each = [(table, every if rows is None else rows) for table, rows in groups]
        self._rows = (_Rows * len(each))(*(_Rows(table.products, rows.data_ptr(), len(rows)) for table, rows in each))
        self._experts = (c_void_p * len(each))(*(table.experts for table, _ in each))
        self._kept = (each, first_experts)
        experts = ctypes.addressof(self._experts) if any(self._experts) else None
        self._table = _Adapters(ctypes.addressof(self._rows), len(each), experts, ctypes.addressof(first_experts))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._table)


# The structures of adapters.h. Each field has eight bytes.


class _Part(Structure):
    _fields_ = [
        ("up", c_void_p),
        ("rank", c_int64),
        ("ranks", c_int64),
        ("output", c_int64),
        ("outputs", c_int64),
    ]


class _LowRank(Structure):
    _fields_ = [("down", c_void_p), ("ranks", c_int64), ("half", c_int64), ("parts", c_void_p), ("count", c_int64)]


class _Rows(Structure):
    _fields_ = [("products", c_void_p), ("rows", c_void_p), ("count", c_int64)]


class _Adapters(Structure):
    _fields_ = [("each", c_void_p), ("count", c_int64), ("experts", c_void_p), ("first_experts", c_void_p)]
