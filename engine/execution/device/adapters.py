"""The adapters of steps on a device whose kernels look them up there, so that recorded steps have adapters, too.

    a step's rows -> each adapter has a slot in the tables (written when it is new there)
                  -> rows sorted by slot, in tiles -> sent -> products add what the tiles' adapters change

Tables and tiles are always in the same memory. So whoever loads, unloads or uses other adapters invalidates no
recording. Only an adapter of more ranks than any before it does.
"""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters import Adapter, AdapterRows, owners_of
from engine.execution.device.inputs import PinnedRing
from engine.kernels.upload import upload
from engine.layers import Linear, StepAdapters
from engine.models import Model
from engine.plan import ScheduledSeq

if TYPE_CHECKING:
    from engine.kernels.triton.low_rank import LowRankProduct, LowRankTables, LowRankTiles

Ints = NDArray[np.int64]

#: The ranks of one part that recorded steps have room for at first.
_RANKS: Final = 64


@dataclass(frozen=True, slots=True)
class AdaptedStep:
    """The adapters of a step's rows."""

    adapters: tuple[Adapter, ...]
    owners: Ints
    """The index in `adapters` of each row of the plan, -1 for none."""
    decodes: bool
    """Whether every row computes one token."""
    tiles: int
    """The tiles of the plan's rows. Of a decode, these are all tiles."""

    @property
    def recordable(self) -> bool:
        """A recorded step changes neither embeddings nor experts."""
        return self.decodes and not any(
            adapter.changes_experts or adapter.embedding is not None for adapter in self.adapters
        )


class TabledRows(AdapterRows):
    """Rows whose changes of products come from the tables."""

    def __init__(
        self, adapters: Each[Adapter], owners: Ints, device: torch.device, tables: DeviceAdapters, tiles: LowRankTiles
    ) -> None:
        super().__init__(adapters, owners, device)
        self._tables, self._tiles = tables, tiles

    def add(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        self._tables.add(linear, x, out, self._tiles)


class DeviceAdapters:
    """Used by the runner's thread alone."""

    def __init__(
        self, model: Model, *, slots: int, most_tokens: int, device: torch.device, ring: PinnedRing | None = None
    ) -> None:
        """`slots`: the maximum number of adapters of one step. `most_tokens`: of tokens of one step. `ring`: the
        device's own, unless a test passes another one."""
        from engine.kernels.triton.low_rank import TILE

        self._model, self._device, self._tile = model, device, TILE
        self._slot_of: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._used = [0] * slots
        self._steps = 0
        self._widest_part = _RANKS
        self.version = 0
        """Changes when recorded steps have no room for an adapter's ranks."""
        # Of all tokens, and of the output rows: at most two for each token.
        tiles = 2 * (most_tokens // TILE + min(slots, most_tokens) + 1)
        self._sent = torch.zeros(3 * most_tokens + 3 * tiles + 16, dtype=torch.int32, device=device)
        self._ring = PinnedRing(device) if ring is None else ring
        self._tables: LowRankTables | None = None
        self._products: dict[Linear, LowRankProduct] = {}
        self._most_parts = 1

    @property
    def used(self) -> bool:
        """Whether an adapter that is still loaded was in a step."""
        return bool(self._slot_of)

    def of(self, rows: Each[ScheduledSeq]) -> AdaptedStep | None:
        """The adapters of a plan's rows; None if none has one. Their matrices are in the tables then."""
        adapters, owners = owners_of(rows)
        return self.assigned(adapters, owners, decodes=all(row.count == 1 for row in rows)) if adapters else None

    def assigned(self, adapters: tuple[Adapter, ...], owners: Ints, *, decodes: bool) -> AdaptedStep:
        """See `of` and AdaptedStep."""
        self._assign_slots(adapters)
        tiles = int(sum(-(-count // self._tile) for count in np.bincount(owners[owners >= 0])))
        return AdaptedStep(adapters, owners, decodes, tiles)

    def forget(self) -> None:
        """Write every adapter's entries again when it is used next: it is unknown what reached the device."""
        self._slot_of.clear()

    # ---- the tables

    def _assign_slots(self, adapters: Each[Adapter]) -> None:
        self._steps += 1
        for adapter in adapters:
            if (slot := self._slot_of.get(adapter)) is not None:
                self._used[slot] = self._steps
        for adapter in adapters:
            if adapter not in self._slot_of:
                slot = self._free_slot()
                self._used[slot] = self._steps
                self._write(adapter, slot)
                self._slot_of[adapter] = slot

    def _free_slot(self) -> int:
        """A free slot; else that of the adapter used least recently, which is not of this step."""
        adapter_of = {slot: adapter for adapter, slot in self._slot_of.items()}
        slot = min(range(len(self._used)), key=lambda slot: (slot in adapter_of, self._used[slot]))
        if slot in adapter_of:
            del self._slot_of[adapter_of[slot]]
        return slot

    def _write(self, adapter: Adapter, slot: int) -> None:
        """Write an adapter's entries. The device does so behind the steps that were launched before."""
        tables = self._allocated()
        entries = tables.offsets.shape[1]
        offsets, starts, ranks = np.zeros(entries, np.int64), np.zeros(entries, np.int32), np.zeros(entries, np.int32)
        anchor, size = tables.anchor.data_ptr(), tables.anchor.element_size()
        for linear, low_rank in adapter.products.items():
            if linear not in self._products:
                continue  # an expert's: see Gpu.prepare_experts
            change: Any = low_rank  # a TabledLowRank, whose module needs Triton
            product = self._products[linear]
            offsets[product.entry] = (change.a.data_ptr() - anchor) // size
            ranks[product.entry] = len(change.a)
            firsts = np.cumsum([0, *linear.parts.values()]).tolist()
            for (outputs, of_part, _), b in zip(change.ups, change.bs, strict=True):
                entry = product.entry + 1 + firsts.index(outputs.start)
                offsets[entry] = (b.data_ptr() - anchor) // size
                starts[entry], ranks[entry] = of_part.start, b.shape[1]
        if ranks.max() > self._widest:
            self._widest_part = max(self._widest_part, 1 << int(ranks.max() - 1).bit_length())
            self.version += 1
        for table, values in zip(
            (tables.offsets, tables.starts, tables.ranks),
            upload([offsets, starts, ranks], self._device),
            strict=True,
        ):
            table[slot].copy_(values)

    @property
    def _widest(self) -> int:
        return self._most_parts * self._widest_part

    def _allocated(self) -> LowRankTables:
        if self._tables is None:
            from engine.kernels.triton.low_rank import LowRankProduct, LowRankTables

            entries = 0
            for prefix, linear in self._model.linears():
                if prefix and ".experts." not in prefix:
                    outputs = list(linear.parts.values())
                    self._products[linear] = LowRankProduct(entries, linear.inputs, outputs, self._device)
                    entries += 1 + len(outputs)
                    self._most_parts = max(self._most_parts, len(outputs))
            shape, device = (len(self._used), entries), self._device
            self._tables = LowRankTables(
                torch.zeros(16, dtype=self._model.kernels.weight_dtype, device=device),
                torch.zeros(shape, dtype=torch.int64, device=device),
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.int32, device=device),
            )
        return self._tables

    def add(self, linear: Linear, x: Tensor, out: Tensor, tiles: LowRankTiles) -> None:
        product, tables = self._products.get(linear), self._tables
        if product is not None and tables is not None:
            product.add(x, out, tables, tiles, self._widest, self._widest_part)

    # ---- a step's tiles

    def send(self, step: AdaptedStep, counts: Each[int], output_rows: Ints) -> StepAdapters:
        """Send the tiles of a step that is not recorded. `counts`: the tokens of each row. `output_rows`: see
        StepBatch."""
        tokens = step.owners.repeat(counts)
        outputs = tokens[output_rows]
        both = [self._tiles(step, owners) for owners in (tokens, outputs)]
        sent = self._send(
            [
                (order, tiles, len(owners), len(tiles))
                for (order, tiles), owners in zip(both, (tokens, outputs), strict=True)
            ]
        )
        return StepAdapters(
            *(
                TabledRows(step.adapters, owners, self._device, self, tiles)
                for owners, tiles in zip((tokens, outputs), sent, strict=True)
            )
        )

    def send_recorded(self, step: AdaptedStep, rows: int, tiles: int) -> None:
        """Send the tiles of a decode that is recorded with room for so many rows and tiles."""
        order, tile_rows = self._tiles(step, step.owners)
        self._send([(order, tile_rows, rows, tiles)])

    def recorded(self, rows: int, tiles: int) -> StepAdapters | None:
        """The adapters of a decode with room for so many rows and tiles, whose tiles `send_recorded` sends."""
        if not tiles:
            return None
        (view,) = self._views([(rows, tiles)])
        every = TabledRows((), np.zeros(0, np.int64), self._device, self, view)
        return StepAdapters(every, every)

    def clear(self, rows: int, tiles: int) -> None:
        """Send no tiles at all for a decode with room for so many, as one does that is only recorded."""
        if tiles:
            self._allocated()
            none = np.zeros(0, np.int64)
            self._send([(none, np.zeros((0, 3), np.int64), rows, tiles)])

    def _tiles(self, step: AdaptedStep, owners: Ints) -> tuple[Ints, Ints]:
        """The rows sorted by the slot of their adapter, [adapted rows], and their tiles, [tiles, 3]."""
        rows = np.flatnonzero(owners >= 0)
        slots = np.array([self._slot_of[adapter] for adapter in step.adapters], np.int64)[owners[rows]]
        by_slot = np.argsort(slots, kind="stable")
        order, slots = rows[by_slot], slots[by_slot]
        edges = np.flatnonzero(np.diff(slots, prepend=-1, append=-1))
        tiles = [
            (slots[begin], first, min(first + self._tile, end))
            for begin, end in pairwise(edges)
            for first in range(begin, end, self._tile)
        ]
        return order, np.array(tiles, np.int64).reshape(-1, 3)

    def _send(self, parts: Each[tuple[Ints, Ints, int, int]]) -> list[LowRankTiles]:
        """Send orders and tiles, each with room for so many rows and tiles."""
        end, starts = _layout([(rows, tiles) for _, _, rows, tiles in parts])
        host = self._ring.lend(end)
        for (order, tile_rows, rows, tiles), (first, second) in zip(parts, starts, strict=True):
            host[first : first + len(order)] = order
            host[first + len(order) : first + rows] = 0
            host[second : second + tile_rows.size] = tile_rows.reshape(-1)
            host[second + tile_rows.size : second + 3 * tiles] = -1
        self._ring.send(end, self._sent)
        return self._views([(rows, tiles) for _, _, rows, tiles in parts])

    def _views(self, rooms: Each[tuple[int, int]]) -> list[LowRankTiles]:
        from engine.kernels.triton.low_rank import LowRankTiles

        _, starts = _layout(rooms)
        return [
            LowRankTiles(
                self._sent[first : first + rows], self._sent[second : second + 3 * tiles].view(tiles, 3), tiles
            )
            for (rows, tiles), (first, second) in zip(rooms, starts, strict=True)
        ]


def _layout(rooms: Each[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """The end of the sent numbers, and where each order and its tiles begin: at multiples of four."""
    end, starts = 0, []
    for rows, tiles in rooms:
        first = end
        second = first + -(-rows // 4) * 4
        end = second + -(-3 * tiles // 4) * 4
        starts.append((first, second))
    return end, starts
