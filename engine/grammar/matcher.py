"""Follows outputs of a given form token by token: which tokens may come next, and when the form is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.grammar.source import form_of, limits, refused, with_stack
from engine.params import SamplingParams

#: The forms that are kept ready. Making one takes milliseconds, and up to a second for the largest.
_KEPT: Final = 256
#: Bits of allowed tokens, int32 [words]: token t is bit t % 32 of word t // 32.
Mask = NDArray[np.int32]


class Grammars:
    """Makes the matchers of one tokenizer's outputs. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos: Sequence[int]) -> None:
        """`tokenizer_json`: the tokenizer as tokenizer.json has it. `vocab_size`: the model's. `eos`: the tokens that
        end its outputs."""
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = [token_id for token_id in eos if token_id < vocab_size]
        self._made = lru_cache(_KEPT)(self._make)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """A matcher at the beginning of an output; None for a request without a form.

        Raises RequestError if the form cannot be followed. The first one of a tokenizer takes up to some seconds.
        """
        form = form_of(params)
        return None if form is None else Matcher(self._made(*form).deep_copy(), self._ends_of(params), self._marks)

    def _ends_of(self, params: SamplingParams) -> NDArray[np.int64]:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        return np.array(sorted(one for one in ends if one < self._vocab_size), np.int64)

    def _make(self, name: str, grammar: str) -> Any:
        from llguidance import LLMatcher

        def make() -> Any:
            made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            made.compute_bitmask()  # finds at once what only fails at the first token
            return made

        try:
            made = with_stack(make)
        except (RuntimeError, ValueError) as error:  # of the tokenizer: a matcher keeps its errors
            raise refused(name, f"llguidance cannot read the model's tokenizer: {error}") from None
        if made.is_error():
            raise refused(name, made.get_error())
        return made

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._json(), n_vocab=None, eos_token=self._eos or None)

    @cached_property
    def _marks(self) -> NDArray[np.int64]:
        """The tokens by which llguidance itself marks an end."""
        return np.array(self._tokenizer.eos_tokens, np.int64)


class Matcher:
    """Follows one output. Used by the thread that runs steps.

    The state is that after `count` tokens. It is a function of these tokens alone, so a resumed output goes on as the
    uninterrupted one would.
    """

    __slots__ = ("_ends", "_marks", "_rules", "_words", "count", "error")

    def __init__(self, rules: Any, ends: NDArray[np.int64], marks: NDArray[np.int64]) -> None:
        """`rules`: an LLMatcher of its own. `ends`: the tokens that may end the output once the form is complete.
        `marks`: see Grammars."""
        self._rules = rules
        self._ends = ends
        self._marks = marks
        self.count = 0
        #: Why no token can follow, if the form was found to be too complex, or the output not to have it.
        self.error = ""

    def push(self, token_id: int) -> bool:
        """Take the output's next token, which does not end it. Returns whether nothing can follow it."""
        self.count += 1
        if self.error or not self._rules.consume_token(token_id):
            self._fail()
            return False
        return bool(self._rules.is_stopped())

    def allow(self, mask: Mask, ahead: Sequence[int] = ()) -> None:
        """Fill `mask` with the tokens that may come next, after those `ahead` of the state. Where `ahead` itself is not
        of the form, all may: that place of the output will never be."""
        if self.error:
            mask.fill(0)
            return
        if ahead and self._rules.validate_tokens(list(ahead)) < len(ahead):
            mask.fill(-1)
            return
        if ahead:
            self._rules.consume_tokens(list(ahead))
        bits = np.frombuffer(self._rules.compute_bitmask(), np.int32)
        complete = self._rules.is_accepting()
        if self._rules.is_error():
            self._fail()
        elif ahead:
            self._rules.rollback(len(ahead))
        mask.fill(0)
        if not self.error:
            mask[: len(bits)] = bits[: len(mask)]
            self._end_only(mask, complete)

    def _end_only(self, mask: Mask, complete: bool) -> None:
        """Let an end come where the form is complete, and there alone."""
        marks = self._marks[self._marks < len(mask) * 32]
        np.bitwise_and.at(mask, marks // 32, ~_bit(marks))
        if complete:
            np.bitwise_or.at(mask, self._ends // 32, _bit(self._ends))

    def _fail(self) -> None:
        self.error = self.error or " ".join(self._rules.get_error().split())[:300] or "the output left its form"


def _bit(token_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    return (np.uint32(1) << (token_ids % 32).astype(np.uint32)).view(np.int32)
