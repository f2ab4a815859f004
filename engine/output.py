"""Turns a choice's tokens into text and detects its end: a pure function of the tokens and the parameters.

The result does not depend on how tokens were batched into steps or on which process made them. A resumed choice pushes
its published tokens again and is then in the same state as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING

from engine.params import FinishReason, SamplingParams
from engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from engine.grammar.matcher import Matcher


class StopMatcher:
    """Finds the first stop string that the text completes, and holds back text that may be the beginning of one.

    If one character completes several, the longest counts. Each string has one Knuth-Morris-Pratt automaton. Its state
    is the number of characters of the string with which the text ends, so each character costs constant time
    (amortised) whatever the length of the strings.
    """

    __slots__ = ("_failures", "_included", "_states", "_stops", "first", "withheld")

    def __init__(self, stops: tuple[str, ...], included: bool = False) -> None:
        """`included`: whether the text keeps the stop string that ends it."""
        self._stops = stops
        self._included = included
        self._failures = [_failure(stop) for stop in stops]
        self._states = [0] * len(stops)
        #: The characters with which a stop string begins.
        self.first = frozenset(stop[0] for stop in stops)
        #: The text held back. While there is none, text without a character of `first` may go past `push`.
        self.withheld = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """Returns (text that is certain to stay, the completed stop string or None). Unless `armed`, nothing
        matches."""
        if not self.withheld and self.first.isdisjoint(text):
            return text, None
        before = len(self.withheld)
        buffer = self.withheld + text
        for end, char in enumerate(text, start=before + 1):
            match = self._advance(char)
            if match is not None and armed:
                self.withheld = ""
                return buffer[: end if self._included else end - len(match)], match
        certain = len(buffer) - max(self._states)
        self.withheld = buffer[certain:]
        return buffer[:certain], None

    def fork(self) -> StopMatcher:
        """Another one in the same state."""
        other = copy(self)
        other._states = list(self._states)
        return other

    def flush(self) -> str:
        """Return the text held back, because no more text will come."""
        text, self.withheld = self.withheld, ""
        return text

    def _advance(self, char: str) -> str | None:
        match = None
        for index, stop in enumerate(self._stops):
            failure = self._failures[index]
            state = self._states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if match is None or len(stop) > len(match):
                    match = stop
                state = failure[state - 1]
            self._states[index] = state
        return match


def _failure(stop: str) -> list[int]:
    """The KMP failure table: for each prefix of `stop`, the length of its longest proper prefix that is also a
    suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        if stop[length] == stop[index]:
            length += 1
        table[index] = length
    return table


class OutputState:
    """Detokenizes one choice and detects its end."""

    __slots__ = ("_armed_from", "_detokenizer", "_matcher", "_stops", "count", "ends", "limit")

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        detokenizer: Detokenizer | None,
        limit: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`limit`: the most tokens of the choice, from max_tokens or the context length. `matcher`: of its form.

        Without a detokenizer all text is "", and stop strings never match.
        """
        self.count = 0
        self.limit = limit
        self._armed_from = params.min_tokens
        #: The token ids that end the output once it has min_tokens.
        self.ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.ends = self.ends.union(eos_token_ids)
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._stops = StopMatcher(params.stop, params.include_stop) if params.stop else None

    def fork(self) -> OutputState:
        """Another choice's state, after the same tokens."""
        other = copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        other._stops = None if self._stops is None else self._stops.fork()
        other._matcher = None if self._matcher is None else self._matcher.fork()
        return other

    @property
    def matcher(self) -> Matcher | None:
        """Of the output's form, if it has one."""
        return self._matcher

    def push(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Take the next token. Returns (piece of text, finish reason or None, the stop string or token id or None).

        The piece of the last token carries all the text that was held back. A token that ends the output adds no text
        of its own. A form that is complete, so that nothing can follow, ends the output too.
        """
        count = self.count + 1
        if token_id in self.ends or count >= self.limit or self._matcher is not None:
            return self._push_checked(token_id)
        self.count = count
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        stops = self._stops
        if stops is None or (not stops.withheld and stops.first.isdisjoint(text)):
            return text, None, None
        text, match = stops.push(text, count >= self._armed_from)
        return text, None if match is None else "stop", match

    def _push_checked(self, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """`push` for a token that may be the last without a stop string."""
        ended = token_id in self.ends and self.count >= self._armed_from
        complete = self._matcher is not None and not ended and self._matcher.push(token_id)
        self.count += 1
        armed = self.count >= self._armed_from
        last = ended or complete or self.count >= self.limit
        text = ""
        if self._detokenizer is not None:
            text = "" if ended else self._detokenizer.push(token_id)
            if last:
                text += self._detokenizer.flush()
        if self._stops is not None:
            text, match = self._stops.push(text, armed)
            if match is not None:
                return text, "stop", match
            if last:
                text += self._stops.flush()
        if ended:
            return text, "stop", token_id
        if complete:
            return text, "stop", None
        return text, "length" if last else None, None
