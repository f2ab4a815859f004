"""Follows outputs of a given form token by token: which tokens may come next, and when the form is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.grammar.source import form_of, limits, refused, said, with_stack
from engine.params import SamplingParams

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

    def matchers(self, params: SamplingParams, count: int = 1) -> list[Matcher]:
        """`count` matchers, each at the beginning of an output; none for a request without a form.

        Takes milliseconds each, for the largest forms a second; the first one of a tokenizer takes some seconds more.
        Raises RequestError if the form cannot be followed. Each output has a matcher of its own, and no copy: copies
        would share the lexer's states, so that one output could use up what another may need.
        """
        form = form_of(params)
        if form is None:
            return []
        ends = self._mask([*params.stop_token_ids, *(() if params.ignore_eos else self._eos)])
        return [Matcher(rules, ends, self._marks) for rules in self._made(*form, count)]

    def _mask(self, token_ids: Sequence[int]) -> Mask:
        """The bits of those of these tokens that the model has."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[one for one in token_ids if one < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _made(self, name: str, grammar: str, count: int) -> list[Any]:
        from llguidance import LLMatcher

        def make() -> Any:
            made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            made.compute_bitmask()  # finds at once what only fails at the first token
            return made

        try:
            every = with_stack(name, lambda: [make() for _ in range(count)])
        except ValueError as error:  # of the tokenizer: a matcher keeps its errors
            if isinstance(error, RequestError):
                raise
            raise refused(name, f"llguidance cannot read the model's tokenizer: {error}") from None
        for made in every:
            if made.is_error() or made.is_stopped():
                raise refused(name, made.get_error() or made.stop_reason())
        return every

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._json(), n_vocab=None, eos_token=self._eos or None)

    @cached_property
    def _marks(self) -> Mask:
        """The tokens by which llguidance itself marks an end."""
        return self._mask(self._tokenizer.eos_tokens)


class Matcher:
    """Follows one output. Used by the thread that runs steps.

    The state is that after `count` tokens. It is a function of these tokens alone, so a resumed output goes on as the
    uninterrupted one would.
    """

    __slots__ = ("_ends", "_marks", "_rules", "count", "error")

    def __init__(self, rules: Any, ends: Mask, marks: Mask) -> None:
        """`rules`: an LLMatcher of its own. `ends`: the tokens that may end a complete output; those that its caller
        named may be text elsewhere, and cut it. `marks`: see Grammars."""
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
        if self.error:
            return
        mask[: len(bits)] = bits[: len(mask)]
        # An end comes where the form is complete, and there alone.
        mask &= ~self._marks
        if complete:
            mask |= self._ends

    def _fail(self) -> None:
        self.error = self.error or said(self._rules.get_error()) or "the output left its form"
