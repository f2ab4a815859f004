"""A prompt's log probabilities, put together from parts that may say again what is known."""

from __future__ import annotations

import pytest

from engine.request import PromptScores, ScoredPart, TokenLogprobs

PROMPT = [7, 8, 9, 10, 11, 12]


def said(token: int, by: str) -> TokenLogprobs:
    """Of a token, told apart by who computed it."""
    return TokenLogprobs(token, {"first": -1.0, "again": -2.0}[by], ())


def part(first: int, end: int, by: str = "first") -> ScoredPart:
    return ScoredPart(first, [said(token, by) for token in PROMPT[first:end]])


def test_parts_that_follow_each_other_make_the_whole() -> None:
    scores = PromptScores(PROMPT, 1)
    for first, end in ((1, 3), (3, 4), (4, 6)):
        assert not scores.done
        scores.take(part(first, end))
    assert scores.entries == [None, *(said(token, "first") for token in PROMPT[1:])]
    assert scores.done


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("end", [4, 5, 6])
def test_what_was_known_before_stays_and_only_what_is_new_is_added(first: int, end: int) -> None:
    """A step that was planned ahead, or another choice's, may score the same places: each token is told once."""
    scores = PromptScores(PROMPT, 1)
    scores.take(part(1, 4))
    scores.take(part(first, end, "again"))
    new = [said(token, "again") for token in PROMPT[4:end]]
    assert scores.entries == [None, *(said(token, "first") for token in PROMPT[1:4]), *new]
    scores.take(part(end, 6))
    assert [one and one.token_id for one in scores.entries] == [None, *PROMPT[1:]]


def test_only_places_not_yet_scored_are_wanted_and_the_last_token_scores_none() -> None:
    scores = PromptScores(PROMPT, 1)
    assert scores.span_in(0, 3) == range(3)  # of tokens 1, 2 and 3
    scores.take(part(1, 4))
    assert scores.span_in(0, 3) == range(3, 3)
    assert scores.span_in(2, 6) == range(3, 5)
