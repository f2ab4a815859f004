"""Inputs made on the device are what the plan says, worked out here token by token."""

from __future__ import annotations

import random

import pytest
import torch

from engine.execution.device.inputs import InputMaker, Shape, shape_of
from engine.execution.device.rows import DeviceRows
from engine.kv import KvSpace, Table
from engine.plan import ScheduledSeq, StepPlan
from tests.engine.sampling.sequences import sequence

BLOCK = 4
SLOTS = 6
WINDOWS = (None, 9)
SWITCH = 30


@pytest.fixture
def rows(device: torch.device) -> DeviceRows:
    spaces = [KvSpace(200, window) for window in WINDOWS]
    found = DeviceRows(spaces, slots=SLOTS, block_size=BLOCK, length=400, device=device)
    found.last_tokens.copy_(torch.arange(SLOTS) + 9000)
    return found


@pytest.fixture
def maker(rows: DeviceRows, device: torch.device) -> InputMaker:
    return InputMaker(rows, most_tokens=64, device=device, rope_switch=SWITCH)


def row(slot: int, start: int, count: int, total: int, *, first: int = 0, pending: bool = False) -> ScheduledSeq:
    """Of a sequence of `total` tokens, which are 100 * slot and up; its second table begins with block `first`."""
    seq = sequence(slot)
    seq.tokens = list(range(1000 * slot, 1000 * slot + total))
    dice = random.Random(slot)
    blocks = -(-total // BLOCK)
    seq.tables = [Table(dice.sample(range(200), blocks)), Table(dice.sample(range(200), blocks - first), first)]
    seq.pending = pending
    return ScheduledSeq(seq, start, count, start + count == total)


def check(maker: InputMaker, rows: DeviceRows, plan: StepPlan, shape: Shape) -> None:
    found = maker.view(shape)
    tokens, positions, longs = [], [], []
    begins = [0]
    for one in plan.rows:
        for place in range(one.start, one.start + one.count):
            last = place == one.start + one.count - 1
            tokens.append(9000 + one.seq.slot if one.seq.pending and last else one.seq.tokens[place])
            positions.append(place)
            longs.append(len(one.seq.tokens) > SWITCH)
        begins.append(len(tokens))
    real = len(tokens)
    assert found.tokens[:real].tolist() == tokens
    assert found.positions[:real].tolist() == positions
    assert found.long is not None
    assert found.long[:real].tolist() == longs
    assert int(found.tokens.min()) >= 0
    for i, batch in enumerate(found.attention):
        assert batch.window == WINDOWS[i]
        assert batch.query_starts[: len(begins)].tolist() == begins
        assert batch.table_rows[: len(plan.rows)].tolist() == [one.seq.slot for one in plan.rows]
        lens, places = [], []
        for one in plan.rows:
            table = one.seq.tables[i]
            lens.append(one.start + one.count - table.first * BLOCK)
            for place in range(one.start, one.start + one.count):
                own = place - table.first * BLOCK
                places.append(table.blocks[own // BLOCK] * BLOCK + own % BLOCK)
            held = batch.tables[batch.table_rows[len(lens) - 1].long()]
            assert held[: len(table.blocks)].tolist() == table.blocks
        assert batch.kv_lens.tolist() == lens + [0] * (shape.rows - len(lens))
        assert batch.slots.tolist() == places + [-1] * (shape.tokens - real)
        assert batch.most_places >= max(lens)
        assert batch.most_queries >= max(one.count for one in plan.rows)
        assert batch.slots.dtype == torch.int64
        assert {t.dtype for t in (batch.query_starts, batch.kv_lens, batch.tables, batch.table_rows)} == {torch.int32}


def run(maker: InputMaker, rows: DeviceRows, *plan: ScheduledSeq) -> Shape:
    made = StepPlan(list(plan), num_tokens=sum(one.count for one in plan))
    shape = shape_of(made, WINDOWS, BLOCK)
    maker.send(maker.numbers(made.rows, shape))
    maker.make(shape)
    check(maker, rows, made, shape)
    return shape


def test_chunks_prompts_and_decodes_in_one_step(maker: InputMaker, rows: DeviceRows) -> None:
    run(
        maker,
        rows,
        row(4, 0, 11, 20),
        row(0, 17, 1, 18, first=2),
        row(2, 8, 13, 21),
        row(5, 35, 1, 36, first=6, pending=True),
        row(1, 0, 1, 1),
    )


def test_the_next_step_takes_nothing_over_from_the_one_before(maker: InputMaker, rows: DeviceRows) -> None:
    run(maker, rows, row(4, 0, 30, 31), row(1, 3, 20, 23))
    run(maker, rows, row(1, 22, 1, 23, first=3), row(3, 2, 1, 3))
    run(maker, rows, row(3, 0, 3, 3))


def test_decodes_are_padded_with_rows_that_go_nowhere(maker: InputMaker, rows: DeviceRows) -> None:
    # What stood in every buffer before is no row's any more.
    run(maker, rows, *(row(i, 30, 5, 40, first=4) for i in range(6)))
    plan = StepPlan([row(2, 16, 1, 17, first=1), row(5, 9, 1, 10, pending=True), row(0, 0, 1, 1)], num_tokens=3)
    shape = Shape(6, 6, 1, (64, 64))
    maker.send(maker.numbers(plan.rows, shape))
    maker.make(shape)
    check(maker, rows, plan, shape)
    assert maker.view(shape).attention[0].query_starts.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert maker.view(shape).attention[0].table_rows.tolist()[3:] == [0, 0, 0]


def test_numbers_that_travel_along_come_back(maker: InputMaker, rows: DeviceRows) -> None:
    plan = StepPlan([row(0, 0, 6, 6), row(1, 0, 9, 12), row(2, 4, 1, 5)], num_tokens=16)
    shape = shape_of(plan, WINDOWS, BLOCK)
    found = maker.send(maker.numbers(plan.rows, shape, [5, 15, 7, 8, 9]))
    assert found.dtype == torch.int64
    assert found.tolist() == [5, 15, 7, 8, 9]
    maker.make(shape)
    check(maker, rows, plan, shape)


def test_more_differences_than_go_with_a_step_get_there_too(device: torch.device) -> None:
    rows = DeviceRows([KvSpace(9000)], slots=2, block_size=1, length=9000, device=device)
    maker = InputMaker(rows, most_tokens=8, device=device, rope_switch=None)
    one = sequence(1)
    one.tokens, one.tables = [5] * 9000, [Table(list(range(9000))[::-1])]
    plan = StepPlan([ScheduledSeq(one, 8999, 1, True)], num_tokens=1)
    maker.send(maker.numbers(plan.rows, shape_of(plan, [None], 1)))
    assert rows.tables(0)[1].tolist() == one.tables[0].blocks
    assert maker.view(shape_of(plan, [None], 1)).long is None


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_steps(maker: InputMaker, rows: DeviceRows, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(25):
        plan = []
        for slot in dice.sample(range(SLOTS), dice.randint(1, SLOTS)):
            total = dice.randint(1, 60)
            count = dice.choice([1, 1, dice.randint(1, min(10, total))])
            start = total - count if dice.random() < 0.7 else dice.randint(0, total - count)
            first = max(0, start - 8) // BLOCK
            plan.append(row(slot, start, count, total, first=first, pending=count == 1 and dice.random() < 0.5))
        run(maker, rows, *plan)
