"""The device's block tables follow the scheduler's, whatever becomes of sequences between two steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from engine.execution.device import rows as rows_module
from engine.execution.device.rows import DeviceRows
from engine.kv import KvSpace, Table
from engine.plan import ScheduledSeq
from tests.engine.sampling.sequences import sequence

BLOCK = 4


def made(*windows: int | None, slots: int = 4, blocks: int = 50, length: int = 400, block: int = BLOCK) -> DeviceRows:
    spaces = [KvSpace(blocks, window) for window in windows or (None,)]
    return DeviceRows(spaces, slots=slots, block_size=block, length=length, device=torch.device("cpu"))


def row(slot: int, *tables: Table) -> ScheduledSeq:
    seq = sequence(slot)
    seq.tables = list(tables)
    return ScheduledSeq(seq, 0, 1, True)


def apply(rows: DeviceRows, *plan: ScheduledSeq) -> int:
    """Bring the state up to date; how many numbers that took."""
    indexes, values = rows.differences(plan)
    assert len(np.unique(indexes)) == len(indexes)
    rows.state[torch.from_numpy(indexes).long()] = torch.from_numpy(values)
    return len(indexes)


def check(rows: DeviceRows, *plan: ScheduledSeq) -> None:
    for group in range(len(rows.windows)):
        firsts = rows.firsts(group)
        for one in plan:
            table = one.seq.tables[group]
            assert rows.tables(group)[one.seq.slot, : len(table.blocks)].tolist() == table.blocks
            if firsts is not None:
                assert int(firsts[one.seq.slot]) == table.first


def test_a_table_that_grows_costs_its_new_blocks_alone() -> None:
    rows = made()
    one = row(2, Table([7, 3, 9]))
    assert apply(rows, one) == 3
    assert apply(rows, one) == 0
    one.seq.tables[0].blocks += [4, 1]
    assert apply(rows, one) == 2
    check(rows, one)


def test_another_table_in_a_slot_costs_what_is_different() -> None:
    rows = made()
    apply(rows, row(1, Table([7, 3, 9, 8])))
    other = row(1, Table([7, 3, 5]))
    assert apply(rows, other) == 1
    check(rows, other)


def test_behind_a_window_a_table_begins_where_it_says() -> None:
    rows = made(None, 6)
    full, local = Table([1, 2, 3]), Table([11, 12, 13])
    one = row(3, full, local)
    assert apply(rows, one) == 7  # six blocks, and that the second table begins with the first block
    del local.blocks[:2]
    local.first += 2
    local.blocks.append(14)
    full.blocks.append(4)
    apply(rows, one)
    check(rows, one)
    assert rows.firsts(0) is None


def test_forgotten_rows_are_sent_again() -> None:
    rows = made(None, 6)
    plan = [row(0, Table([1, 2]), Table([5], 3)), row(1, Table([3]), Table([6, 7]))]
    rows.differences(plan)  # which never got there
    rows.forget()
    apply(rows, *plan)
    check(rows, *plan)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_sequences_is_followed(whole: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(rows_module, "_MOST_AT_ONCE", 0)
        monkeypatch.setattr(rows_module, "_NARROWEST", 2)
    dice = random.Random(seed)
    rows = made(None, 9, slots=5, blocks=1000, length=800)
    state, version = rows.state, rows.version
    running: dict[int, ScheduledSeq] = {}
    for _ in range(300):
        slot = dice.randrange(5)
        if slot not in running or dice.random() < 0.05:
            running[slot] = row(slot, Table([dice.randrange(1000)]), Table([dice.randrange(1000)], dice.randrange(3)))
        full, local = running[slot].seq.tables
        full.blocks += [dice.randrange(1000) for _ in range(dice.randrange(4))]
        local.blocks += [dice.randrange(1000) for _ in range(dice.randrange(3))]
        if len(local.blocks) > 3:
            del local.blocks[:2]
            local.first += 2
        if len(full.blocks) > 190:
            del running[slot]
            continue
        plan = dice.sample(list(running.values()), dice.randint(1, len(running)))
        apply(rows, *plan)
        check(rows, *plan)
    assert (rows.state is state) == (rows.version == version) == whole


def test_tables_are_no_wider_than_their_pool_or_the_longest_sequence() -> None:
    assert made(blocks=50, length=401).tables(0).shape == (4, 50)
    assert made(blocks=500, length=401).tables(0).shape == (4, 101)


def test_tables_that_no_int32_counts_are_refused() -> None:
    with pytest.raises(EngineError, match=r"4096 sequences of 1048576 tokens in blocks of 1 .* raise block_size"):
        made(slots=4096, blocks=1 << 20, length=1 << 20, block=1)
