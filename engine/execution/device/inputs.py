"""A step's inputs, made on the device from four numbers a row, the prompts' tokens and what the rows keep there."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Each
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from engine.execution.device.ring import PinnedRing
from engine.execution.device.rows import DeviceRows, Ints
from engine.kernels.ragged import RaggedBatch
from engine.kernels.upload import upload
from engine.plan import ScheduledSeq, StepPlan

#: What a row's flags say: its last token is the one that its slot sampled last; its sequence is beyond the rope's
#: switch; it is nobody's.
PENDING, LONG, PADDING = 1, 2, 4
#: Parts of what is sent begin at multiples of so many numbers, so that kernels may count on it.
_ALIGN = 4
#: Differences of the rows that travel with a step; where there are more, they travel by themselves.
_MOST_CHANGES = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """How a step's inputs lie in memory: what follows from it alone can be recorded and replayed."""

    rows: int
    """Sequences, padding included."""
    tokens: int
    most_queries: int
    """Bound on the tokens of one sequence."""
    most_places: tuple[int, ...]
    """For each KV group, bound on what is in one table once this step's tokens are."""

    @property
    def decodes(self) -> bool:
        """Every row computes one token: row i is token i."""
        return self.tokens == self.rows

    def parts(self) -> list[int]:
        """Where slots, starts, flags, query starts and tokens begin in what is sent, and where these end."""
        row, more = _aligned(self.rows), _aligned(self.rows + 1)
        return [0, row, 2 * row, 3 * row, 3 * row + more, 3 * row + more + _aligned(self.tokens)]


@dataclass(frozen=True, slots=True)
class StepInputs:
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], from each prompt's first token."""
    long: Tensor | None
    """bool [tokens], whose sequence is longer than the model's rope_switch; None where it has none."""
    attention: tuple[RaggedBatch, ...]
    """One for each KV group."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the inputs of every step are made: always the same memory."""

    sent: Tensor
    """int32: what comes from the host; see Shape.parts."""
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    long: Tensor
    """bool [tokens]."""
    places: Tensor
    """int64 [groups, tokens]: where K and V go, -1 for nowhere."""
    kv_lens: Tensor
    """int32 [groups, rows]."""


#: Makes the inputs of a step of the given shape: `make_inputs`, or a kernel that does the same.
MakeInputs = Callable[[Shape, Targets, DeviceRows], None]


class InputMaker:
    """Used by one thread. `send` a step, then `make` and `view` its inputs; nothing waits for the device."""

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
        """`most_tokens`: of one step, at least one for each row."""
        self._rows = rows
        self._device = device
        self._rope_switch = rope_switch
        self._make = maker(device) if make is None else make
        self._ring = PinnedRing(device) if ring is None else ring
        groups = len(rows.windows)
        most = Shape(rows.slots, most_tokens, most_tokens, ())
        room = most.parts()[-1] + _aligned(2 * most_tokens) + 2 * _MOST_CHANGES

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.targets = Targets(
            sent=empty(room, dtype=torch.int32),
            tokens=empty(most_tokens, dtype=torch.int64),
            positions=empty(most_tokens, dtype=torch.int64),
            long=empty(most_tokens, dtype=torch.bool),
            # Each group's begin where kernels can load several at once.
            places=empty(groups, _aligned(most_tokens), dtype=torch.int64),
            kv_lens=empty(groups, _aligned(rows.slots), dtype=torch.int32),
        )

    def send(self, plan: Each[ScheduledSeq], shape: Shape, more: Each[int] = ()) -> Tensor:
        """Send what a step of these rows needs, and the differences of the permanent rows.

        `more` numbers travel along, at most two for each token, and come back as a tensor, int64. After an exception,
        `DeviceRows.forget`.
        """
        indexes, values = self._rows.differences(plan)
        by_themselves = len(indexes) > _MOST_CHANGES
        if by_themselves:
            self._change(*upload([indexes, values], self._device))
        end = shape.parts()[-1]
        after = end + _aligned(len(more))
        changes = 0 if by_themselves else len(indexes)
        host = self._ring.lend(after + 2 * changes)
        self._write(host, plan, shape)
        host[end : end + len(more)] = more
        host[after : after + changes] = indexes[:changes]
        host[after + changes :] = values[:changes]
        sent = self.targets.sent
        self._ring.send(len(host), sent)
        if changes:
            self._change(sent[after : after + changes], sent[after + changes : after + 2 * changes])
        return sent[end : end + len(more)].long()

    def _change(self, indexes: Tensor, values: Tensor) -> None:
        self._rows.state.index_copy_(0, indexes.long(), values)

    def _write(self, host: Ints, plan: Each[ScheduledSeq], shape: Shape) -> None:
        slots, starts, flags, queries, tokens, _ = shape.parts()
        count = len(plan)
        # Padding is as the first row's first token, and goes nowhere. It has a token too: each of them is somebody's.
        for part in (slots, starts, tokens):
            host[part + count : part + shape.rows] = 0
        host[flags + count : flags + shape.rows] = PADDING
        host[slots : slots + count] = [row.seq.slot for row in plan]
        host[starts : starts + count] = [row.start for row in plan]
        host[flags : flags + count] = [self._flags(row) for row in plan]
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

    def _flags(self, row: ScheduledSeq) -> int:
        long = self._rope_switch is not None and len(row.seq.tokens) > self._rope_switch
        return PENDING * row.pending + LONG * long

    def make(self, shape: Shape) -> None:
        """Make the inputs of the step that was sent, on the device."""
        self._make(shape, self.targets, self._rows)

    def view(self, shape: Shape) -> StepInputs:
        """The inputs of a step of this shape: views of memory that the next step's are made in."""
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
    """Of a plan as it is, without padding."""
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
    """Fill `targets` for the step that was sent, in plain torch, on any device. Nothing is waited for.

    Token j of row i, whose first token is token row query_starts[i], stands at position start + j; the last token of a
    pending row is the one that its slot sampled last. Positions and lengths of a group count from its tables' firsts.
    """
    slots, starts, flags, queries, sent_tokens, _ = shape.parts()
    sent, device = targets.sent, targets.sent.device
    slot = sent[slots : slots + shape.rows]
    start = sent[starts : starts + shape.rows].long()
    flag = sent[flags : flags + shape.rows]
    begins = sent[queries : queries + shape.rows + 1].long()
    own, real = slot.long(), (flag & PADDING) == 0
    ends = begins[1:]
    tokens = torch.arange(shape.tokens, device=device)
    row = tokens if shape.decodes else torch.searchsorted(ends, tokens, right=True)
    position = start[row] + tokens - begins[row]
    waits = ((flag[row] & PENDING) != 0) & (tokens == ends[row] - 1)
    given = sent[sent_tokens : sent_tokens + shape.tokens].long()
    targets.tokens[: shape.tokens] = torch.where(waits, rows.last_tokens[own[row]], given)
    targets.positions[: shape.tokens] = position
    targets.long[: shape.tokens] = (flag[row] & LONG) != 0
    size = rows.block_size
    for i in range(len(rows.windows)):
        table, firsts = rows.tables(i), rows.firsts(i)
        skipped = torch.zeros_like(own) if firsts is None else firsts[own].long() * size
        place = position - skipped[row]
        # A row of padding has the table of another, and a place before it.
        block = table[own[row], place.clamp(min=0) // size].long()
        targets.places[i, : shape.tokens] = torch.where(real[row], block * size + place % size, -1)
        lengths = start + (ends - begins[:-1]) - skipped
        targets.kv_lens[i, : shape.rows] = torch.where(real, lengths, 0)


def make_inputs_by_kernel(shape: Shape, targets: Targets, rows: DeviceRows) -> None:
    """The same as `make_inputs` in one kernel."""
    # Only here: triton is there where there is a GPU.
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
    """What makes the inputs on `device`."""
    return make_inputs_by_kernel if device.type != "cpu" and find_spec("triton") is not None else make_inputs


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
