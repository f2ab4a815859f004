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


@pytest.mark.parametrize("tables", [[], [[0, 1], [0]], [[0]], [[0, 2]]])
def test_a_pool_that_disagrees_with_the_tables_says_so(tables):
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity([[0, 1]])
    with pytest.raises(EngineError, match="KV block"):
        pool.check_integrity(tables)
