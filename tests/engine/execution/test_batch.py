"""Plans as tensors: where each token goes, what is zeroed."""

from __future__ import annotations

import pytest
import torch

from engine.execution.batch import BatchBuilder, StepBatch
from engine.kernels.reference import Reference
from engine.kv import KvSpace, Table
from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence
from tests.engine.sampling.test_sampler import sequence

BLOCK = 4
ZERO = 99


def builder(device: torch.device | str = "cpu") -> BatchBuilder:
    return BatchBuilder([KvSpace(ZERO)], 8, BLOCK, Reference(torch.float32), torch.device(device))


def row(slot: int, tokens: range, table: list[int], start: int, count: int) -> ScheduledSeq:
    seq: Sequence = sequence(slot)
    seq.tokens = list(tokens)
    seq.tables = [Table(table)]
    return ScheduledSeq(seq, start, count, start + count == len(seq.tokens))


def plan(*rows: ScheduledSeq) -> StepPlan:
    return StepPlan(list(rows), num_tokens=sum(one.count for one in rows))


def by_token(batch: StepBatch) -> dict[int, tuple[int, int]]:
    """Token -> (position, slot)."""
    places = zip(batch.positions.tolist(), batch.attention[0].slots.tolist(), strict=True)
    return dict(zip(batch.tokens.tolist(), places, strict=True))


def test_a_table_follows_its_sequence_and_its_slot() -> None:
    made = builder()
    one = row(0, range(10), [5, 6, 7], 9, 1)
    assert by_token(made.build(plan(one)))[9] == (9, 29)
    # Put out and let in again with other blocks, in the same slot.
    one.seq.tables = [Table([5, 6, 2])]
    assert by_token(made.build(plan(one)))[9] == (9, 9)
    # A shorter one takes the slot over: nothing of the old table is left.
    batch = made.build(plan(row(0, range(2), [1], 1, 1), row(3, range(8), [3, 4], 7, 1)))
    assert batch.attention[0].tables.tolist() == [[1, ZERO], [3, 4]]


@pytest.mark.parametrize(
    ("start", "count", "entered"),
    [
        (0, 3, [10]),  # into the first block, not to its end
        (0, 4, []),  # fills it
        (0, 6, [11]),  # fills one, enters the next
        (3, 1, []),  # the rest of a block entered before
        (4, 1, [11]),  # the first token of a block
        (4, 4, []),
        (5, 2, []),
        (2, 9, [12]),
    ],
)
def test_blocks_entered_and_not_filled_are_to_be_zeroed(start: int, count: int, entered: list[int]) -> None:
    batch = builder().build(plan(row(0, range(start + count), [10, 11, 12], start, count)))
    assert ([] if batch.entered[0] is None else batch.entered[0].tolist()) == entered
