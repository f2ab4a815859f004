"""The work of the process in which forms are tried out: see engine.grammar.trial.

A sealed process cannot import, so llguidance is imported with this module.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import llguidance  # noqa: F401 - a sealed process cannot import it later

from engine.grammar.source import form_of, judge, new_tokenizer, unreadable


def packed(tokenizer: str, eos: Sequence[int]) -> dict[str, Any]:
    """The setup of `judged` for a tokenizer, as tokenizer.json has it, and the tokens that end its outputs."""
    # Small, and without characters that JSON escapes: writing it as JSON holds the interpreter's lock.
    small = zlib.compress(tokenizer.encode(), 1)
    return {"tokenizer": base64.b64encode(small).decode(), "eos": list(eos)}


def judged(setup: dict[str, Any] | None) -> Callable[[list[str]], None]:
    """Makes the function that the child runs for each form, given as [the parameter's name, its text]. `setup`: that of
    `packed`, and matchers are made; None: forms are only validated."""
    tokenizer: Any = None

    def judge_one(form: list[str]) -> None:
        nonlocal tokenizer
        name, text = form
        if setup is not None and tokenizer is None:
            own = zlib.decompress(base64.b64decode(setup["tokenizer"])).decode()
            try:
                tokenizer = new_tokenizer(own, setup["eos"])
            except ValueError as error:
                raise unreadable(name, error) from None
        judge(form_of(name, text), tokenizer)

    return judge_one
