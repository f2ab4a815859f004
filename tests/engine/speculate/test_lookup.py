"""What followed the same words before is guessed to follow them again."""

from __future__ import annotations

import pytest

from engine import EngineError
from engine.plan import ScheduledSeq
from engine.speculate import Lookup
from tests.engine.sampling.sequences import sequence


def guessed(lookup: Lookup, tokens: list[int], room: int = 4, slot: int = 0) -> tuple[int, ...]:
    one = sequence(slot)
    one.tokens = tokens
    return lookup.propose([ScheduledSeq(one, len(tokens) - 1, 1, True, max_draft=room)])[0]


@pytest.fixture
def lookup() -> Lookup:
    return Lookup(2, 70_000)


def test_the_longest_end_that_stood_before_counts_and_of_these_the_latest(lookup: Lookup) -> None:
    assert guessed(lookup, [7, 8, 9, 1, 2, 8, 9, 3, 4, 8, 9]) == (3, 4, 8, 9)
    assert guessed(lookup, [6, 7, 8, 9, 1, 2, 8, 9, 3, 4, 5, 7, 8, 9]) == (1, 2, 8, 9)


def test_one_token_alone_says_nothing(lookup: Lookup) -> None:
    assert guessed(lookup, [1, 2, 3, 9, 2]) == ()
    assert guessed(lookup, [5]) == ()


def test_what_has_begun_to_repeat_itself_goes_on_so(lookup: Lookup) -> None:
    assert guessed(lookup, [3, 1, 2, 1, 2, 1, 2], room=5) == (1, 2, 1, 2, 1)
    assert guessed(lookup, [4, 4, 4], room=3) == (4, 4, 4)


def test_tokens_that_are_surrogates_or_beyond_a_plane(lookup: Lookup) -> None:
    assert guessed(lookup, [0xD800, 69_999, 5, 0, 0xD800, 69_999]) == (5, 0, 0xD800, 69_999)


def test_a_slot_is_read_anew_when_another_runs_there_and_on_when_the_same_does(lookup: Lookup) -> None:
    assert guessed(lookup, [1, 2, 3, 1, 2]) == (3, 1, 2, 3)
    assert guessed(lookup, [1, 2, 9, 1, 2]) == (9, 1, 2, 9)
    one = sequence(1)
    one.tokens = [1, 2]
    row = ScheduledSeq(one, 1, 1, True, max_draft=1)
    assert lookup.propose([row]) == [()]
    one.tokens += [5, 1, 2]
    assert lookup.propose([row]) == [(5,)]


def test_more_tokens_than_characters_are_refused() -> None:
    with pytest.raises(EngineError, match="up to 1114112 tokens, and the model's has 1114113"):
        Lookup(1, 0x110001)
