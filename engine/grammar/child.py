"""The work of the process in which forms are tried out: see engine.grammar.trial.

A sealed process cannot import, so llguidance is imported with this module.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import llguidance  # a sealed process cannot import it later

from engine.errors import RequestError
from engine.grammar.source import check_speed, form_of, judge, new_rules, new_tokenizer, unreadable


def packed(tokenizer: str, eos: Sequence[int]) -> dict[str, Any]:
    """The setup of `judged` for a tokenizer, as tokenizer.json has it, and the tokens that end its outputs."""
    # Small, and without characters that JSON escapes: writing it as JSON holds the interpreter's lock.
    small = zlib.compress(tokenizer.encode(), 1)
    return {"tokenizer": base64.b64encode(small).decode(), "eos": list(eos)}


def judged(setup: dict[str, Any] | None) -> Callable[[list[str]], None]:
    """Makes the function that the child runs for each form, given as [the parameter's name, its text]: it makes a
    matcher, and finds an output's first tokens. `setup`: that of `packed`; None: every byte is a token."""
    tokenizer: Any = None

    def judge_one(form: list[str]) -> None:
        nonlocal tokenizer
        name, text = form
        if tokenizer is None:
            try:
                tokenizer = _tokenizer(setup)
            except ValueError as error:
                raise unreadable(name, error) from None
        grammar = form_of(name, text)
        try:
            rules = new_rules(grammar, tokenizer)
        except RequestError:
            if setup is not None:
                raise
            judge(grammar)  # it may name tokens, of which a model has others than bytes
            return
        check_speed(name, rules, tokenizer)

    return judge_one


def _tokenizer(setup: dict[str, Any] | None) -> Any:
    if setup is None:
        return llguidance.LLTokenizer("byte")
    return new_tokenizer(zlib.decompress(base64.b64decode(setup["tokenizer"])).decode(), setup["eos"])
