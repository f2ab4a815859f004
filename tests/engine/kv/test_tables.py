"""What sequences hold, share and give back in KV groups with windows and without."""

from __future__ import annotations

import pytest

from engine.kv import BlockTables, KvSpace, first_block, window_blocks
from engine.prefix import prompt_marks, root_hash
from engine.sequence import Sequence
from tests.engine.sampling.sequences import sequence

SIZE = 4
#: Over blocks of 4, what a query sees extends over at most 4 blocks.
WINDOW = 10


def tables(*spaces: KvSpace, caching: bool = True) -> BlockTables:
    return BlockTables(spaces, SIZE, caching)


def seq(tokens: int, prompt_len: int | None = None) -> Sequence:
    made: Sequence = sequence(0)
    made.tokens = list(range(tokens))
    made.prompt_len = tokens if prompt_len is None else prompt_len
    made.tables = []
    made.computed = 0
    made.hashes = []
    made.root = root_hash("", "", "")
    return made


def admit(held: BlockTables, one: Sequence, donor: Sequence | None = None) -> list[tuple[int, int, int]]:
    claim = held.claim(one, donor)
    assert held.fits(claim, headroom=False)
    return held.take(one, claim)


def compute(held: BlockTables, one: Sequence, count: int) -> int:
    """One step of up to `count` tokens; how many it was."""
    count = held.grow(one, count, spare=0)
    one.computed += count
    held.register(one)
    held.check_integrity([one])
    return count


@pytest.mark.parametrize(
    ("window", "size", "blocks"), [(1, 4, 1), (2, 4, 2), (4, 4, 2), (5, 4, 2), (6, 4, 3), (10, 4, 4), (3, 1, 3)]
)
def test_the_most_blocks_that_a_query_sees(window: int, size: int, blocks: int) -> None:
    assert window_blocks(window, size) == blocks
    for computed in range(40):
        seen = range(max(0, computed - window + 1), computed + 1)
        assert first_block(window, computed, size) == seen.start // size
        assert len({i // size for i in seen}) <= blocks


def test_a_chunk_is_cut_to_the_blocks_there_are_and_leaves_some_to_others() -> None:
    held = tables(KvSpace(100), KvSpace(6, WINDOW))
    one = seq(100)
    admit(held, one)
    assert held.grow(one, 100, spare=2) == 4 * SIZE
    one.computed = 16
    # Of its four blocks it still sees three, and takes the rest but for the two to be spared.
    assert held.grow(one, 84, spare=2) == 4
    one.computed = 20
    assert held.grow(one, 80, spare=100) == 4


def test_without_a_block_for_one_token_nothing_is_taken() -> None:
    held = tables(KvSpace(100), KvSpace(4, WINDOW))
    one, other = seq(16), seq(16)
    other.tokens = other.tokens[::-1]
    admit(held, one)
    compute(held, one, 16)
    claim = held.claim(other, None)
    assert not held.fits(claim, headroom=False)
    held.take(other, claim)
    assert held.grow(other, 3, spare=0) == 0
    assert other.tables[1].blocks == []


def test_a_cached_beginning_needs_all_of_one_group_and_the_window_of_the_other() -> None:
    held = tables(KvSpace(100), KvSpace(10, WINDOW))
    one = seq(61)
    admit(held, one)
    while one.computed < 60:
        compute(held, one, 4)
    held.free(one)
    other = seq(61)
    claim = held.claim(other, None)
    assert claim.computed == 60
    full, windowed = claim.parts
    assert (full.first, len(full.shared)) == (0, 15)
    # Position 60 sees from 51 on: blocks 12, 13, 14.
    assert (windowed.first, len(windowed.shared)) == (12, 3)
    assert windowed.cost == 1 + 3


def test_a_hole_in_the_window_shortens_what_is_found() -> None:
    held = tables(KvSpace(100), KvSpace(30, WINDOW))
    one = seq(61)
    admit(held, one)
    while one.computed < 60:
        compute(held, one, 4)
    windowed = held.groups[1].pool
    held.free(one)
    # As if evicted: block 13 of the windowed group is not found any more.
    windowed.forget([one.hashes[13]])
    claim = held.claim(seq(61), None)
    assert claim.computed == 13 * SIZE
    assert [part.first for part in claim.parts] == [0, (52 - WINDOW + 1) // SIZE]


def test_where_windows_alone_are_a_beginning_may_be_found_though_its_start_is_gone() -> None:
    held = tables(KvSpace(12, WINDOW))
    one = seq(101)
    admit(held, one)
    while one.computed < 100:
        compute(held, one, 4)
    held.free(one)
    assert held.groups[0].pool.match([one.hashes[0]]) == []
    assert held.claim(seq(101), None).computed == 100


@pytest.mark.parametrize("caching", [True, False])
def test_a_choice_shares_what_the_donor_still_has(caching: bool) -> None:
    held = tables(KvSpace(100), KvSpace(20, WINDOW), caching=caching)
    donor = seq(30)
    admit(held, donor)
    compute(held, donor, 30)
    choice = seq(30)
    copies = admit(held, choice, donor)
    assert choice.computed == 29
    # Position 29 sees from 20 on: blocks 5 and 6, and a copy of what is in block 7.
    assert (choice.tables[1].first, choice.tables[1].blocks[:2]) == (5, donor.tables[1].blocks[5:7])
    assert copies == [
        (0, donor.tables[0].blocks[7], choice.tables[0].blocks[7]),
        (1, donor.tables[1].blocks[7], choice.tables[1].blocks[2]),
    ]
    # Once the donor has gone on past the window, its blocks are no longer all there.
    donor.tokens += range(30, 60)
    for _ in range(8):
        held.grow(donor, 1, spare=0)
        donor.computed += 1
        held.register(donor)
    assert donor.tables[1].first > 5
    late = held.claim(seq(30), donor)
    assert late.computed == (28 if caching else 0)


def test_victims_are_counted_in_every_group() -> None:
    held = tables(KvSpace(16), KvSpace(5, WINDOW))
    one, other = seq(20), seq(40)
    admit(held, one)
    compute(held, one, 20)
    claim = held.claim(other, None)
    assert not held.fits(claim, headroom=False)
    assert held.fits_without(claim, [one], headroom=False)
    too_long = held.claim(seq(80), None)
    assert not held.fits_without(too_long, [one], headroom=False)


def test_the_tokens_that_a_space_has_room_for() -> None:
    assert KvSpace(10).tokens_of_one(SIZE) == KvSpace(10).tokens_of_all(SIZE, 1000) == 40
    assert KvSpace(3, WINDOW).tokens_of_one(SIZE) == 12
    assert KvSpace(4, WINDOW).tokens_of_one(SIZE) > 10**9
    # Two windows' worth: two sequences of whatever length.
    assert KvSpace(8, WINDOW).tokens_of_all(SIZE, 1000) == 2000
    assert KvSpace(8, WINDOW).tokens_of_all(SIZE, 5) == 32


def test_marks_are_of_what_is_cached_and_go_with_it() -> None:
    """One after 64 tokens, one after 128; a sequence that takes their blocks' memory takes them."""
    held = tables(KvSpace(40), KvSpace(40))
    one = seq(140)
    admit(held, one)
    compute(held, one, 63)
    assert held.marks() == []
    compute(held, one, 77)
    assert held.marks() == prompt_marks(one.tokens, SIZE, salt="", adapter="", version="")
    held.free(one)
    assert len(held.marks()) == 2, "cached, though nobody holds them"
    other = seq(60)
    other.tokens = list(range(1000, 1060))
    admit(held, other)
    compute(held, other, 60)
    assert len(held.marks()) == 1, "the end of a prefix is evicted first"
    assert tables(KvSpace(40), caching=False).marks() == []
