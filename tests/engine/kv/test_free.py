from __future__ import annotations

import random
from itertools import pairwise

from engine.kv import BlockPool


def grow(pool: BlockPool, table: list[int], count: int = 1) -> None:
    table += pool.allocate(count, table[-1] if table else None)


def pieces(table: list[int]) -> int:
    """Of neighbours."""
    return 1 + sum(after != before + 1 for before, after in pairwise(table))


def test_sequences_that_grow_in_turns_have_neighbours_each():
    pool = BlockPool(64, run=4)
    tables: list[list[int]] = [[] for _ in range(4)]
    for table, prompt in zip(tables, (3, 1, 6, 4), strict=True):
        grow(pool, table, prompt)
    for _ in range(9):
        for table in tables:
            grow(pool, table)
    assert [len(table) for table in tables] == [12, 10, 15, 13]
    assert all(pieces(table) <= len(table) / 4 + 1 for table in tables)


def test_what_is_kept_for_one_is_given_to_another_where_nothing_else_is_left():
    pool = BlockPool(8, run=4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert (first, second) == ([0], [4])
    # From the end, and of each in turn, so that whoever goes on in his run can do so as long as possible.
    assert pool.allocate(3) == [3, 7, 2]
    assert pool.allocate(1, after=4) == [5]


def test_what_follows_the_end_of_a_sequence_is_for_all_if_it_is_half_a_run():
    pool = BlockPool(12, run=4)
    half, more, other = pool.allocate(2), pool.allocate(3), pool.allocate(1)
    assert (half, more, other) == ([0, 1], [4, 5, 6], [8])
    for block in (*half, *more):
        pool.register(block, bytes([block]))
    pool.release(half)
    pool.release(more)
    assert pool.allocate(2) == [2, 3]
    assert pool.match([b"\0", b"\1"]) == [0, 1]
    # Block 7 waits for its neighbours.
    assert pool.allocate(1) == [0]
    assert pool.knows(b"\6")


def test_runs_stay_long_however_many_sequences_have_come_and_gone():
    choose = random.Random(1)
    pool = BlockPool(960, run=8)
    running: list[tuple[list[int], int]] = []
    names = iter(range(1 << 20))
    for _ in range(400):
        for place in reversed(range(len(running))):
            table, wanted = running[place]
            if len(table) < wanted:
                grow(pool, table)
                continue
            for block in table:
                pool.register(block, next(names).to_bytes(4, "little"))
            pool.release(table)
            del running[place]
        while len(running) < 10:
            table = []
            grow(pool, table, choose.randint(1, 32))
            running.append((table, len(table) + choose.randint(1, 16)))
    tables = [table for table, _ in running]
    pool.check_integrity(tables)
    assert sum(map(len, tables)) / sum(map(pieces, tables)) > 5
    # All the same most of what nobody holds is cached.
    assert len(pool._cached) > 0.8 * pool.available


def test_what_a_sequence_left_in_the_cache_goes_run_by_run():
    pool = BlockPool(16, run=4)
    old, new = pool.allocate(8), pool.allocate(8)
    for block in (*old, *new):
        pool.register(block, bytes([block]))
    pool.release(old)
    pool.release(new)
    mine, yours = pool.allocate(1), pool.allocate(1)
    # The end of the oldest goes first, and nothing of another run with it.
    assert (mine, yours) == ([4], [0])
    assert not any(pool.knows(bytes([block])) for block in old)
    assert all(pool.knows(bytes([block])) for block in new)
    assert pool.available == 14
    assert pool.allocate(3, after=4) == [5, 6, 7]


def test_a_last_run_may_be_shorter():
    pool = BlockPool(6, run=4)
    taken = [*pool.allocate(1), *pool.allocate(1)]
    assert taken == [0, 4]
    pool.release([4])
    assert pool.allocate(2) == [4, 5]
