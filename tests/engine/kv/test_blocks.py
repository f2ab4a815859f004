from __future__ import annotations

import pytest

from engine.errors import EngineError
from engine.kv import BlockPool


def names(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(count)]


def cached(pool: BlockPool, count: int) -> list[int]:
    """Fill and let go of `count` registered blocks."""
    blocks = pool.allocate(count)
    for block, name in zip(blocks, names(count), strict=True):
        pool.register(block, name)
    pool.release(blocks)
    return blocks


def test_blocks_go_out_once_and_come_back():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert (pool.available, pool.used) == (1, 3)
    pool.release(first)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_registered_block_is_found_until_its_memory_is_wanted():
    pool = BlockPool(3)
    blocks = cached(pool, 2)
    assert pool.available == 3
    assert pool.match(names(3)) == blocks
    pool.allocate(2)
    # The end of the chain goes first: what is left can still be found from its beginning.
    assert pool.match(names(2)) == blocks[:1]
    pool.allocate(1)
    assert pool.match(names(2)) == []


def test_the_least_recently_released_is_evicted_first():
    pool = BlockPool(2)
    old, new = cached(pool, 2)[::-1]
    pool.share([old])
    pool.release([old])
    assert pool.allocate(1) == [new]


def test_shared_blocks_are_not_evicted_and_stay_until_the_last_holder():
    pool = BlockPool(2)
    (block,) = cached(pool, 1)
    pool.share([block])
    pool.share([block])
    pool.allocate(1)
    assert pool.available == 0
    pool.release([block])
    assert pool.available == 0
    pool.release([block])
    assert pool.available == 1


def test_a_hash_stays_with_the_block_that_had_it_first():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.register(second, b"x")
    assert pool.match([b"x"]) == [first]
    pool.release([second])
    pool.check_integrity([[first]])
    assert pool.allocate(1) == [second]


def test_a_forgotten_block_is_not_found_and_becomes_free():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"x")
    pool.forget([b"y", b"x"])
    assert pool.match([b"x"]) == []
    pool.release(blocks)
    pool.check_integrity([])
    assert pool.available == 1


def test_a_cached_block_that_is_forgotten_is_free_at_once():
    pool = BlockPool(2)
    cached(pool, 2)
    pool.forget(names(1))
    pool.check_integrity([])
    assert pool.match(names(1)) == []
    assert sorted(pool.allocate(2)) == [0, 1]


def test_freed_by_counts_blocks_that_only_these_hold():
    pool = BlockPool(4)
    shared, a, b, kept = pool.allocate(4)
    pool.share([shared])
    assert pool.freed_by([[shared, a]]) == 1
    assert pool.freed_by([[shared, a], [shared, b]]) == 3
    assert pool.freed_by([[shared, a], [shared, b, kept]], keep=[kept, shared]) == 2


@pytest.mark.parametrize("tables", [[], [[0, 1], [0]], [[0]], [[0, 2]]])
def test_a_pool_that_disagrees_with_the_tables_says_so(tables):
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity([[0, 1]])
    with pytest.raises(EngineError, match="KV block"):
        pool.check_integrity(tables)


def test_a_block_released_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(EngineError, match="-1 references"):
        pool.check_integrity([])
