"""Stop matching and the end of a choice, against the plain definition on the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.output import OutputState, StopMatcher
from engine.params import SamplingParams


class Spelled:
    """A detokenizer whose tokens are the characters a, b, c, ... and whose unfinished ones come with the next."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces = iter(pieces)
        self.tail = tail

    def push(self, token_id: int) -> str:
        return next(self.pieces)

    def flush(self) -> str:
        return self.tail


def first_stop(text: str, stops: tuple[str, ...], armed_from: int = 0) -> tuple[str, str | None]:
    """The text before the stop completed first, at or after character number `armed_from`; the longest of several."""
    for end in range(max(1, armed_from), len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab", max_size=6)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(st.lists(letters, max_size=12), stop_lists)
@example(["aab"], ("ab", "aab"))
@example(["aab"], ("aab", "ab"))
@example(["a", "a", "b", "a", "a", "c"], ("aabaac", "ba"))
@example(["ab", "ab"], ("abab", "ab"))
def test_text_ends_before_the_first_stop_and_never_shows_its_beginning(pieces, stops):
    matcher = StopMatcher(stops)
    out, match = "", None
    text = ""
    for piece in pieces:
        text += piece
        new, match = matcher.push(piece, True)
        out += new
        right, stop = first_stop(text, stops)
        assert match == stop
        if match is not None:
            assert out == right
            return
        # What is out can no longer become part of a stop; no more than that is held back.
        held = text[len(out) :]
        assert text.startswith(out)
        assert held == max(
            (text[len(text) - n :] for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), key=len
        )
    assert out + matcher.flush() == text


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=12), stop_lists, st.integers(0, 8)
)
def test_no_stop_counts_that_was_complete_before_min_tokens(pieces, stops, min_tokens):
    limit = len(pieces) + 1
    output = OutputState(SamplingParams(stop=stops, min_tokens=min_tokens), [], Spelled(pieces), limit)
    out, text = "", ""
    ends = []
    for number, piece in enumerate(pieces, start=1):
        before = len(text)
        text += piece
        new, reason, match = output.push(7)
        out += new
        if number >= min_tokens:
            ends.append((before + 1, len(text)))
        right = stopped(text, stops, ends)
        assert (reason, match) == ((None, None) if right is None else ("stop", right[1]))
        if right is not None:
            assert out == right[0]
            return
        assert text.startswith(out)


def stopped(text: str, stops: tuple[str, ...], ends: list[tuple[int, int]]) -> tuple[str, str] | None:
    if not ends:
        return None
    right, stop = first_stop(text, stops, armed_from=ends[0][0])
    return None if stop is None else (right, stop)


@given(st.lists(letters, min_size=1, max_size=10), stop_lists, st.text(alphabet="ab", max_size=3))
def test_the_last_piece_brings_all_that_was_held(pieces, stops, tail):
    output = OutputState(SamplingParams(stop=stops), [], Spelled(pieces, tail), len(pieces))
    out, reason, match = "", None, None
    for _ in pieces:
        assert reason is None
        text, reason, match = output.push(7)
        out += text
        if reason is not None:
            break
    right, stop = first_stop("".join(pieces) + tail, stops)
    # A stop that ends in an earlier piece is seen before the rest is pushed; either way the text is the same.
    assert out == right
    assert (reason, match) == (("length", None) if stop is None else ("stop", stop))


def test_a_stop_token_ends_without_text_of_its_own_and_frees_what_was_held():
    params = SamplingParams(stop=("xyz",), stop_token_ids=(5,))
    output = OutputState(params, [9], Spelled(["a", "x", "y"], "?"), 100)
    assert [output.push(1) for _ in range(3)] == [("a", None, None), ("", None, None), ("", None, None)]
    assert output.push(5) == ("xy?", "stop", 5)
    assert OutputState(params, [9], Spelled([]), 100).push(9) == ("", "stop", 9)


@given(st.lists(letters, max_size=12), stop_lists)
@example(["aab"], ("ab", "aab"))
def test_a_stop_may_be_kept(pieces, stops):
    matcher, text, out = StopMatcher(stops, included=True), "", ""
    for piece in pieces:
        text += piece
        new, match = matcher.push(piece, True)
        out += new
        if match is not None:
            right, stop = first_stop(text, stops)
            assert (match, out) == (stop, right + stop)
            return
    assert out + matcher.flush() == text


def test_a_stop_made_by_the_flush_at_the_end_still_cuts():
    output = OutputState(SamplingParams(stop=("b\ufffd",)), [9], Spelled(["ab"], "\ufffd"), 100)
    assert output.push(1) == ("a", None, None)
    assert output.push(9) == ("", "stop", "b\ufffd")


def test_eos_is_an_ordinary_token_when_ignored():
    params = SamplingParams(ignore_eos=True, min_tokens=5)
    output = OutputState(params, [9], Spelled(["e", "f"]), 2)
    assert output.ends == frozenset()
    assert [output.push(9), output.push(9)] == [("e", None, None), ("f", "length", None)]


def test_ends_do_not_end_before_min_tokens():
    output = OutputState(SamplingParams(min_tokens=2, stop_token_ids=(3,)), [9], Spelled(["a"] * 9), 9)
    assert output.ends == {3, 9}
    assert output.push(9) == ("a", None, None)
    assert output.push(1)[1] is None
    assert output.push(9)[1:] == ("stop", 9)


def test_without_a_detokenizer_tokens_are_counted_all_the_same():
    output = OutputState(SamplingParams(stop=("a",)), [9], None, 2)
    assert [output.push(1), output.push(1)] == [("", None, None), ("", "length", None)]


@pytest.mark.parametrize("length", [1, 16, 256])
def test_a_long_near_miss_is_held_and_given_out_at_once(length):
    stop = "a" * (length - 1) + "b"
    matcher = StopMatcher((stop,))
    assert matcher.push("a" * 1000, True) == ("a" * (1001 - length), None)
    assert matcher.push("c", True) == ("a" * (length - 1) + "c", None)
