"""Follows outputs of a given form token by token: which tokens may come next, and when the form is complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.grammar.source import (
    budget_of,
    check_installed,
    form_of,
    new_rules,
    new_tokenizer,
    readable,
    refused,
    slow,
    unreadable,
)
from engine.grammar.trial import MAKING, Trials, key_of
from engine.params import SamplingParams

#: Bits of allowed tokens, int32 [words]: token t is bit t % 32 of word t // 32.
Mask = NDArray[np.int32]

#: The processor time (s) that finding one token may take at no cost. Ordinary forms take less (docs/notes/forms.md).
_TOKEN_S: Final = 0.01
#: The processor time (s) beyond that which one output's tokens may take in all. The others of a step wait for it.
_OUTPUT_S: Final = 0.5


class Grammars:
    """Makes the matchers of one tokenizer's outputs. Thread-safe. `close` it after use."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos: Sequence[int]) -> None:
        """`tokenizer_json`: the tokenizer as tokenizer.json has it. `vocab_size`: the model's. `eos`: the tokens that
        end its outputs."""
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = [token_id for token_id in eos if token_id < vocab_size]
        self._trials: Trials | None = None

    def prepare(self) -> None:
        """Make what all matchers share, if llguidance is installed. For a vocabulary of 128,000 tokens this holds the
        interpreter for a second or more, so it is done before requests come."""
        with suppress(ValueError):  # then each form is refused, with the reason
            check_installed("form")
            _ = self._marks, self._packed

    def tried(self, params: SamplingParams) -> bool:
        """Whether `try_out` has nothing to do for the request's form."""
        return self._trial.is_judged(*params.form)

    def try_out(self, params: SamplingParams) -> None:
        """Make a matcher of the request's form in another process. Takes milliseconds, for forms at the limits seconds.
        Raises RequestError if the form cannot be followed, or it does not end."""
        self._trial.check(*params.form)

    def maker(self, params: SamplingParams) -> Callable[[], Matcher]:
        """Makes matchers of the request's form, each at the beginning of an output, at each call one.

        Call it only after `try_out`, and on a thread with a stack of STACK_BYTES: a call takes milliseconds, for the
        largest forms a second, nearly all of it without the interpreter's lock. Raises RequestError. Each output has a
        matcher of its own, and no copy: copies would share the lexer's states, so that one output could use up what
        another may need.
        """
        name, text = params.form
        self._trial.check_known(name, text)
        form = form_of(name, text)
        ends = self._mask([*params.stop_token_ids, *(() if params.ignore_eos else self._eos)])
        try:
            tokenizer, marks = self._tokenizer, self._marks
        except ValueError as error:
            raise unreadable(name, error) from None
        pace = Pace(self._trial, name, text)
        self._check_budget(name, text)
        return lambda: Matcher(new_rules(form, tokenizer), ends, marks, pace, TokenBudget.of(name, text))

    def give_up(self) -> None:
        """End a trial that runs."""
        if self._trials is not None:
            self._trials.kill()

    def close(self) -> None:
        """End the process in which forms are tried out, after the trial that runs."""
        if self._trials is not None:
            self._trials.close()

    def _check_budget(self, name: str, text: str) -> None:
        """Raise RequestError for a budget that a token closes which the model lacks: a caller may write such a line."""
        match = budget_of(name, text)
        if match is not None and int(match[2]) >= self._vocab_size:
            raise refused(name, f"its first line names token {match[2]}; the model has ids 0 to {self._vocab_size - 1}")

    def _mask(self, token_ids: Sequence[int]) -> Mask:
        """The bits of those of these tokens that the model has."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def _trial(self) -> Trials:
        if self._trials is None:
            self._trials = Trials(self._packed, MAKING)
        return self._trials

    @cached_property
    def _tokenizer(self) -> Any:
        return new_tokenizer(self._json(), self._eos)

    @cached_property
    def _packed(self) -> dict[str, Any]:
        from engine.grammar.child import packed

        return packed(self._json(), self._eos)

    @cached_property
    def _marks(self) -> Mask:
        """The tokens by which llguidance itself marks an end."""
        return self._mask(self._tokenizer.eos_tokens)


class Pace:
    """Whether a form has proved too slow to be followed in steps, by any output of any request."""

    def __init__(self, trials: Trials, name: str, text: str) -> None:
        self._trials = trials
        self._name = name
        self._key = key_of(name, text)

    def too_slow(self) -> bool:
        return self._trials.refuses(self._key)

    def found_slow(self, why: str) -> None:
        """Refuse the form from now on."""
        self._trials.refuse(self._key, slow(self._name, why))


class TokenBudget:
    """Counts the tokens of an output's reasoning, of which a grammar may bound the number.

    The state is a function of the output's tokens alone. A resumed output, and one whose tokens are guessed ahead,
    has the same as any other.
    """

    __slots__ = ("_begin", "_end", "_limit", "spent")

    def __init__(self, limit: int, begin: int | None, end: int) -> None:
        """`limit`: the most tokens. `begin`: the token behind which they are counted, an output's first; None: from the
        output's beginning. `end`: the token that closes them."""
        self._limit = limit
        self._begin = begin
        self._end = end
        #: The tokens so far; None before the first token, where that may begin them, and once they are closed.
        self.spent: int | None = 0 if begin is None else None

    @classmethod
    def of(cls, name: str, text: str) -> TokenBudget | None:
        """The budget that the first line of a form's grammar has (`engine.grammar.source.budget_line`); None without
        one."""
        match = budget_of(name, text)
        return None if match is None else cls(int(match[1]), int(match[3]) if match[3] else None, int(match[2]))

    def after(self, count: int, tokens: Sequence[int]) -> int | None:
        """`spent` after further tokens. `count`: the output's tokens so far."""
        spent = self.spent
        for at, token_id in enumerate(tokens, count):
            if spent is not None:
                spent = None if token_id == self._end else spent + 1
            elif at == 0 and token_id == self._begin:
                spent = 0
        return spent

    def restrict(self, mask: Mask, spent: int | None) -> None:
        """Leave only the closing token, where the budget is spent. A character that has begun is finished first."""
        word, bit = divmod(self._end, 32)
        if spent is None or spent < self._limit or not int(mask[word]) >> bit & 1:
            return
        mask.fill(0)
        mask.view(np.uint32)[word] = 1 << bit


class Matcher:
    """Follows one output. Used by one thread at a time: the one that makes it, then the one that runs steps.

    The state is that after `count` tokens. It is a function of these tokens alone, so a resumed output goes on as the
    uninterrupted one would.
    """

    __slots__ = ("_budget", "_ends", "_foreseen", "_marks", "_pace", "_rules", "_spent", "count", "error")

    def __init__(self, rules: Any, ends: Mask, marks: Mask, pace: Pace, budget: TokenBudget | None = None) -> None:
        """`rules`: an LLMatcher of its own. `ends`: the tokens that may end a complete output; those that its caller
        named may be text elsewhere, and cut it. `marks`: see Grammars. `pace`: the form's, the same for all its
        outputs. `budget`: of the output's reasoning, if that has one."""
        self._rules = rules
        self._ends = ends
        self._marks = marks
        self._pace = pace
        self._budget = budget
        #: The processor time (s) that tokens took beyond _TOKEN_S each.
        self._spent = 0.0
        #: Answers of `push` for the output's next tokens, which the rules have taken before.
        self._foreseen: deque[bool] = deque()
        self.count = 0
        #: Why no token can follow, if the form was found to be too complex or slow, or the output not to have it.
        self.error = ""

    def fork(self) -> Matcher:
        """Another output's matcher, after the same tokens. The two share the lexer's states, so this is for outputs of
        one request alone."""
        other = copy(self)
        other._rules = self._rules.deep_copy()
        other._budget = copy(self._budget)
        other._foreseen = deque(self._foreseen)
        return other

    def foresee(self, published: Sequence[int]) -> None:
        """Take a resumed output's published tokens, so that `push` need not: thousands would hold a step up."""
        self._foreseen.extend(map(self._take, published))

    def push(self, token_id: int) -> bool:
        """Take the output's next token, which does not end it. Returns whether nothing can follow it."""
        if self._budget is not None:
            self._budget.spent = self._budget.after(self.count, (token_id,))
        self.count += 1
        if self._foreseen:
            return self._foreseen.popleft()
        began = time.thread_time()
        ended = self._take(token_id)
        self._spend(time.thread_time() - began)
        return ended

    def _take(self, token_id: int) -> bool:
        if self.error or not self._rules.consume_token(token_id):
            self._fail()
            return False
        return bool(self._rules.is_stopped())

    def allow(self, mask: Mask, ahead: Sequence[int] = ()) -> None:
        """Fill `mask` with the tokens that may come next, after those `ahead` of the state; with none on an `error`.
        Where `ahead` itself is not of the form, all may: that place of the output will never be."""
        if not self.error and self._pace.too_slow():
            self.error = "another output of this form took too long"
        if not self.error:
            began = time.thread_time()
            self._fill(mask, ahead)
            self._spend(time.thread_time() - began)
        if self.error:
            mask.fill(0)

    def _fill(self, mask: Mask, ahead: Sequence[int]) -> None:
        if ahead and self._rules.validate_tokens(list(ahead)) < len(ahead):
            mask.fill(-1)
            return
        if ahead:
            self._rules.consume_tokens(list(ahead))
        bits = np.frombuffer(self._rules.compute_bitmask(), np.int32)
        complete = self._rules.is_accepting()
        if self._rules.is_error():
            self._fail()
            return
        if ahead:
            self._rules.rollback(len(ahead))
        mask.fill(0)
        mask[: len(bits)] = bits[: len(mask)]
        # An end comes where the form is complete, and there alone.
        mask &= ~self._marks
        if complete:
            mask |= self._ends
        if self._budget is not None:
            self._budget.restrict(mask, self._budget.after(self.count, ahead))

    def _spend(self, elapsed: float) -> None:
        """Enter the processor time (s) that the thread of steps has spent on this output, which others wait for."""
        if elapsed <= _TOKEN_S:
            return
        self._spent += elapsed - _TOKEN_S
        if self._spent > _OUTPUT_S and not self.error:
            self.error = f"finding its tokens took {self._spent:.2g} s of processor time more than usual"
            self._pace.found_slow(self.error)

    def _fail(self) -> None:
        self.error = self.error or readable(self._rules.get_error()) or "the output left its form"
