"""A question that a model which works can answer: is a request to blame for NaN, or the model?

    at the start   before the model is announced: NaN -> the worker is refused
    later          a task ends in NaN -> its end waits -> the question is asked
                   an answer -> the request is to blame: the task ends, as after any fault of the engine
                   NaN       -> the model is broken: the worker hands all back and ends

No number of bad requests can make the answer NaN, as rows of a batch share no numbers; one is enough to ask.

A canary is the same question with more tokens, for a breaker: does the engine work, and how fast (docs/how/breaker.md)?
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from engine.errors import NOT_FINITE
from engine.params import greedy
from engine.request import Event, Request, Tier
from workers.errors import Refused

#: The request's id; those of deliveries are UUIDs.
ID: Final = "probe"
PROMPT: Final = "1 + 1 ="
#: The canary's id, and its tokens.
CANARY: Final = "canary"
CANARY_TOKENS: Final = 16


def canary(engine: Any, then: Callable[[str | None], None]) -> None:
    """`ask` for so many tokens that their speed can be told. One at a time."""
    ask(engine, then, CANARY, CANARY_TOKENS)


def ask(engine: Any, then: Callable[[str | None], None], name: str = ID, tokens: int = 1) -> None:
    """Ask for one token. `then` gets the error, None where there is none, on the engine's thread. One at a time.

    Raises EngineError where the engine is closed, or the last one of this name has not ended."""
    ids = engine.tokenizer.encode(PROMPT)[: max(1, engine.max_model_len - tokens)]
    params = greedy(min(tokens, engine.max_model_len - 1))

    def hear(event: Event) -> None:
        if event.done:
            then(event.error)

    engine.submit(Request(name, ids, params, tier=Tier.PRIORITY), hear)


def check_model(engine: Any, model: str, seconds: float) -> None:
    """Ask a model that has just been loaded. `seconds`: how long it may take, 0 for as long as it likes.

    Raises Refused where it answers with NaN, RuntimeError where the engine fails or does not answer."""
    said: list[str | None] = []
    answered = threading.Event()

    def hear(error: str | None) -> None:
        said.append(error)
        answered.set()

    ask(engine, hear)
    if not answered.wait(seconds or None):
        raise RuntimeError(f"the engine has not computed one token within {seconds:g} s (--max-step-seconds)")
    if said[0] == NOT_FINITE:
        raise Refused(
            f"cannot serve {model}: after {PROMPT!r}, {NOT_FINITE}. Its weights are damaged, or too large for this "
            "dtype: pull the model again, or give another --dtype"
        )
    if said[0] is not None:
        raise RuntimeError(f"the engine cannot compute one token: {said[0]}")
