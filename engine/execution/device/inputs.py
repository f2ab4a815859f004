"""Makes a step's inputs on the device, from four numbers a row, the prompts' tokens and the permanent rows there.

`PinnedRing` is a ring of pinned host buffers for copies to the device. No buffer is reused before its copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Each
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.device.rows import DeviceRows, Ints
from engine.kernels.ragged import RaggedBatch
from engine.kernels.upload import upload
from engine.plan import ScheduledSeq, StepPlan

#: Begins a copy of a host tensor (second) into a device tensor (first). Returns a function that waits for its end.
Copy = Callable[[Tensor, Tensor], Callable[[], None]]

#: At most two steps are in flight at one time. The third buffer is the one that is being filled.
_DEPTH = 3


def copy_to(device: torch.device) -> Copy:
    """The function that begins copies to `device`."""
    return _begin_copy if device.type == "cuda" else _copy_at_once


def _begin_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _copy_at_once(target: Tensor, source: Tensor) -> Callable[[], None]:
    target.copy_(source)
    return lambda: None


class PinnedRing:
    """A ring of host buffers, used by one thread: `lend` a buffer, fill it, `send` it."""

    def __init__(self, device: torch.device, copy: Copy | None = None, depth: int = _DEPTH) -> None:
        """`copy`: `copy_to(device)`, unless a test passes its own."""
        self._copy = copy_to(device) if copy is None else copy
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(depth)]
        self._waits: list[Callable[[], None] | None] = [None] * depth
        self._index = 0

    def lend(self, size: int) -> NDArray[np.int32]:
        """A buffer to fill, int32 [size]. Waits if the buffer's last copy has not ended."""
        self._index = (self._index + 1) % len(self._buffers)
        wait = self._waits[self._index]
        if wait is not None:
            wait()
            self._waits[self._index] = None
        if len(self._buffers[self._index]) < size:
            # Larger than asked, because sizes differ from step to step and pinning takes milliseconds.
            self._buffers[self._index] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._pinned)
        lent: NDArray[np.int32] = self._buffers[self._index][:size].numpy()
        return lent

    def send(self, size: int, target: Tensor) -> None:
        """Begin to copy the first `size` numbers of the buffer lent last to the beginning of `target`, int32."""
        self._waits[self._index] = self._copy(target[:size], self._buffers[self._index][:size])


#: A row's flags. PENDING: its last token is the one that its slot sampled last. LONG: its sequence is beyond the rope
#: switch. PADDING: the row belongs to no sequence.
PENDING, LONG, PADDING = 1, 2, 4
#: The parts of the sent buffer begin at multiples of this many numbers, which kernels rely on.
_ALIGN = 4
#: The most changes of permanent rows that are sent with a step. More changes are sent in a copy of their own.
_MOST_CHANGES = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of a step's inputs in memory. Work that depends on it alone can be recorded and replayed."""

    rows: int
    """The number of sequences, padding included."""
    tokens: int
    most_queries: int
    """An upper bound of the tokens of one sequence in this step."""
    most_places: tuple[int, ...]
    """For each KV group, an upper bound of the tokens in one table, this step's included."""
    adapter_tiles: int = 0
    """An upper bound of the tiles of its rows with adapters (`DeviceAdapters`)."""

    @property
    def decodes(self) -> bool:
        """Whether every row computes one token, so that row i is token i."""
        return self.tokens == self.rows

    def parts(self) -> list[int]:
        """The offsets in the sent buffer of slots, starts, flags, query starts and tokens, and the end of the
        tokens."""
        row, more = _aligned(self.rows), _aligned(self.rows + 1)
        return [0, row, 2 * row, 3 * row, 3 * row + more, 3 * row + more + _aligned(self.tokens)]


@dataclass(frozen=True, slots=True)
class StepInputs:
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], counted from each prompt's first token."""
    long: Tensor | None
    """bool [tokens]: whether the token's sequence is longer than the model's rope_switch. None if the model has
    none."""
    attention: tuple[RaggedBatch, ...]
    """One batch for each KV group."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """All that the host sends for a step."""

    host: NDArray[np.int32]
    """A lent buffer: the numbers of `Shape.parts`, more of them, and the indexes and values of changed entries."""
    end: int
    """The offset of what follows the parts."""
    more: int
    """The count of the numbers that travel along, from `end` on."""
    changes: int
    """The count of the changed entries of the permanent rows, which come last."""
    widths: tuple[int, ...]
    """DeviceRows.widths."""
    separate: tuple[NDArray[np.int32], ...] = ()
    """The indexes and values of changed entries, if they are too many for `host`."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The memory in which the inputs of every step are made. It never changes."""

    sent: Tensor
    """int32: the numbers sent from the host; see Shape.parts."""
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    long: Tensor
    """bool [tokens]."""
    places: Tensor
    """int64 [groups, tokens]: the KV slots of K and V, -1 for none."""
    kv_lens: Tensor
    """int32 [groups, rows]."""


#: A function that makes the inputs of a step of the given shape: `make_inputs`, or a kernel that does the same.
MakeInputs = Callable[[Shape, Targets, DeviceRows], None]


class InputMaker:
    """Makes steps' inputs: `send` the `numbers` of a step, then `make` and `view` its inputs. No call waits for the
    device. Used by one thread."""

    def __init__(
        self,
        rows: DeviceRows,
        *,
        most_tokens: int,
        device: torch.device,
        rope_switch: int | None,
        make: MakeInputs | None = None,
        ring: PinnedRing | None = None,
    ) -> None:
        """`most_tokens`: the most tokens of one step, at least one for each row."""
        self._rows = rows
        self._device = device
        self._rope_switch = rope_switch
        self._make = maker(device) if make is None else make
        self._ring = PinnedRing(device) if ring is None else ring
        groups = len(rows.windows)
        largest = Shape(rows.slots, most_tokens, most_tokens, ())
        room = largest.parts()[-1] + _aligned(2 * most_tokens) + 2 * _MOST_CHANGES

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.targets = Targets(
            sent=empty(room, dtype=torch.int32),
            tokens=empty(most_tokens, dtype=torch.int64),
            positions=empty(most_tokens, dtype=torch.int64),
            long=empty(most_tokens, dtype=torch.bool),
            # Each group begins at an aligned place, so that kernels can load several numbers at once.
            places=empty(groups, _aligned(most_tokens), dtype=torch.int64),
            kv_lens=empty(groups, _aligned(rows.slots), dtype=torch.int32),
        )

    def numbers(self, plan: Each[ScheduledSeq], shape: Shape, more: Each[int] = ()) -> StepNumbers:
        """The numbers of a step with these rows, and the changes of the permanent rows. `more`: at most two for each
        token, which travel along. `send` the numbers before others are made."""
        indexes, values = self._rows.differences(plan)
        by_themselves = len(indexes) > _MOST_CHANGES
        end = shape.parts()[-1]
        after = end + _aligned(len(more))
        changes = 0 if by_themselves else len(indexes)
        host = self._ring.lend(after + 2 * changes)
        self._write(host, plan, shape)
        host[end : end + len(more)] = more
        host[after : after + changes] = indexes[:changes]
        host[after + changes :] = values[:changes]
        separate = (indexes, values) if by_themselves else ()
        return StepNumbers(host, end, len(more), changes, self._rows.widths, separate)

    def lent(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """A copy of another process's numbers in a lent buffer."""
        host = self._ring.lend(len(numbers))
        host[:] = numbers
        return host

    def send(self, numbers: StepNumbers) -> Tensor:
        """Send numbers whose `host` was lent last. Returns those that travel along as a device tensor, int64.

        After an exception call `DeviceRows.forget`.
        """
        if numbers.separate:
            self._change(*upload(list(numbers.separate), self._device))
        sent, end, changes = self.targets.sent, numbers.end, numbers.changes
        after = end + _aligned(numbers.more)
        self._ring.send(len(numbers.host), sent)
        if changes:
            self._change(sent[after : after + changes], sent[after + changes : after + 2 * changes])
        return sent[end : end + numbers.more].long()

    def _change(self, indexes: Tensor, values: Tensor) -> None:
        self._rows.state.index_copy_(0, indexes.long(), values)

    def _write(self, host: Ints, plan: Each[ScheduledSeq], shape: Shape) -> None:
        slots, starts, flags, queries, tokens, _ = shape.parts()
        count = len(plan)
        # Padding repeats slot 0 at position 0 and is stored nowhere. Every row has a token, padding included.
        for part in (slots, starts, tokens):
            host[part + count : part + shape.rows] = 0
        host[flags + count : flags + shape.rows] = PADDING
        host[slots : slots + count] = [row.seq.slot for row in plan]
        host[starts : starts + count] = [row.start for row in plan]
        host[flags : flags + count] = self._flags(plan)
        if shape.decodes:
            host[tokens : tokens + count] = [row.seq.tokens[row.start] for row in plan]
            host[queries : queries + shape.rows + 1] = np.arange(shape.rows + 1)
            return
        computed: list[int] = []
        host[queries] = 0
        for i, row in enumerate(plan, start=queries + 1):
            computed += row.computed()
            host[i] = len(computed)
        host[tokens : tokens + len(computed)] = computed

    def _flags(self, plan: Each[ScheduledSeq]) -> list[int]:
        switch = self._rope_switch
        if switch is None:
            return [PENDING * row.seq.pending for row in plan]
        return [PENDING * row.seq.pending + LONG * (len(row.seq.tokens) > switch) for row in plan]

    def make(self, shape: Shape) -> None:
        """Make the inputs of the sent step on the device."""
        self._make(shape, self.targets, self._rows)

    def view(self, shape: Shape) -> StepInputs:
        """The inputs of a step of this shape, as views of memory that the next step overwrites."""
        t = self.targets
        slots, _, _, queries, _, _ = shape.parts()
        return StepInputs(
            tokens=t.tokens[: shape.tokens],
            positions=t.positions[: shape.tokens],
            long=None if self._rope_switch is None else t.long[: shape.tokens],
            attention=tuple(
                RaggedBatch(
                    slots=t.places[i, : shape.tokens],
                    query_starts=t.sent[queries : queries + shape.rows + 1],
                    kv_lens=t.kv_lens[i, : shape.rows],
                    tables=self._rows.tables(i),
                    table_rows=t.sent[slots : slots + shape.rows],
                    most_queries=shape.most_queries,
                    most_places=shape.most_places[i],
                    window=window,
                    positions=t.positions[: shape.tokens],
                )
                for i, window in enumerate(self._rows.windows)
            ),
        )


def shape_of(plan: StepPlan, windows: Each[int | None], block_size: int) -> Shape:
    """The shape of a plan without padding."""
    longest = max(row.start + row.count for row in plan.rows)
    return Shape(
        rows=len(plan.rows),
        tokens=plan.num_tokens,
        most_queries=max(row.count for row in plan.rows),
        most_places=tuple(
            longest
            if window is None
            else max(row.start + row.count - row.seq.tables[i].first * block_size for row in plan.rows)
            for i, window in enumerate(windows)
        ),
    )


def make_inputs(shape: Shape, targets: Targets, rows: DeviceRows) -> None:
    """Fill `targets` for the sent step, in plain torch, on any device. It does not wait for the device.

    Token j of row i is in token row query_starts[i] + j, at position start + j. The last token of a pending row is the
    one that its slot sampled last. A group's KV slots and lengths count from its tables' first blocks.
    """
    slots, starts, flags, queries, sent_tokens, _ = shape.parts()
    sent, device = targets.sent, targets.sent.device
    slot = sent[slots : slots + shape.rows]
    start = sent[starts : starts + shape.rows].long()
    flag = sent[flags : flags + shape.rows]
    begins = sent[queries : queries + shape.rows + 1].long()
    row_slots, real = slot.long(), (flag & PADDING) == 0
    ends = begins[1:]
    tokens = torch.arange(shape.tokens, device=device)
    row = tokens if shape.decodes else torch.searchsorted(ends, tokens, right=True)
    position = start[row] + tokens - begins[row]
    waits = ((flag[row] & PENDING) != 0) & (tokens == ends[row] - 1)
    sent_ids = sent[sent_tokens : sent_tokens + shape.tokens].long()
    targets.tokens[: shape.tokens] = torch.where(waits, rows.last_tokens[row_slots[row]], sent_ids)
    targets.positions[: shape.tokens] = position
    targets.long[: shape.tokens] = (flag[row] & LONG) != 0
    size = rows.block_size
    for i in range(len(rows.windows)):
        table, firsts = rows.tables(i), rows.firsts(i)
        skipped = torch.zeros_like(row_slots) if firsts is None else firsts[row_slots].long() * size
        table_position = position - skipped[row]
        # A padding row uses another row's table, and may have a place before its beginning.
        block = table[row_slots[row], table_position.clamp(min=0) // size].long()
        targets.places[i, : shape.tokens] = torch.where(real[row], block * size + table_position % size, -1)
        lengths = start + (ends - begins[:-1]) - skipped
        targets.kv_lens[i, : shape.rows] = torch.where(real, lengths, 0)


def make_inputs_by_kernel(shape: Shape, targets: Targets, rows: DeviceRows) -> None:
    """The same as `make_inputs` in one kernel."""
    # Imported here because triton is only installed on machines with a GPU.
    from engine.kernels.triton.step_inputs import step_inputs

    _, starts, _, _, tokens, _ = shape.parts()
    step_inputs(
        targets.sent,
        starts,
        tokens,
        rows.state,
        rows.layout,
        rows.last_tokens,
        targets.tokens,
        targets.positions,
        targets.long,
        targets.places,
        targets.kv_lens,
        rows=shape.rows,
        most_queries=shape.most_queries,
        block_size=rows.block_size,
        flags=(PENDING, LONG, PADDING),
    )


def maker(device: torch.device) -> MakeInputs:
    """The function that makes the inputs on `device`."""
    return make_inputs_by_kernel if device.type != "cpu" and find_spec("triton") is not None else make_inputs


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
