"""Probes the worker's own engine with a fixed prompt: is a request to blame for NaN, or the model?

    at the start   before the model is announced: NaN -> the worker is refused
    later          a task ends in NaN -> its end waits -> a probe is sent
                   it passes -> the request is to blame: the task ends, as after any fault of the engine
                   NaN       -> the model is broken: the worker hands all back and ends

Rows of a batch share no numbers, so no number of bad requests can make a probe NaN, and one probe is enough.

A timed probe makes more tokens, for the breaker: does the engine work, and how fast (docs/how/breaker.md)?
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from engine.errors import NOT_FINITE
from engine.params import greedy
from engine.request import Event, Pooling, Request, Tier
from workers.errors import Refused
from workers.state.engine import ServedEngine

#: The request's id; those of deliveries are UUIDs.
ID: Final = "probe"
PROMPT: Final = "1 + 1 ="
#: The timed probe's id, and its tokens.
TIMED: Final = "timed-probe"
TIMED_TOKENS: Final = 16


def send_timed(engine: ServedEngine, then: Callable[[str | None], None]) -> None:
    """Send a probe of so many tokens that their speed can be measured. One at a time."""
    send(engine, then, TIMED, TIMED_TOKENS)


def send(engine: ServedEngine, then: Callable[[str | None], None], name: str = ID, tokens: int = 1) -> None:
    """Send a probe. `then` gets its error, or None, on the engine's thread. One at a time.

    Raises EngineError if the engine is closed, or the last probe of this name has not ended."""
    ids = engine.tokenizer.encode(PROMPT)[: max(1, engine.max_model_len - tokens)]
    params = greedy(min(tokens, engine.max_model_len - 1))
    pooling = None if engine.kind == "generate" else Pooling(engine.kind, (len(ids),))

    def on_event(event: Event) -> None:
        if event.done:
            then(event.error)

    engine.submit(Request(name, ids, params, tier=Tier.PRIORITY, pooling=pooling), on_event)


def check_model(engine: ServedEngine, model: str, seconds: float) -> None:
    """Probe a model that has just been loaded. `seconds`: how long that may take; 0: any time.

    Raises Refused if it answers with NaN, RuntimeError if the engine fails or does not answer."""
    errors: list[str | None] = []
    answered = threading.Event()

    def on_answer(error: str | None) -> None:
        errors.append(error)
        answered.set()

    send(engine, on_answer)
    if not answered.wait(seconds or None):
        raise RuntimeError(f"the engine has not computed one token within {seconds:g} s (--max-step-seconds)")
    if errors[0] == NOT_FINITE:
        raise Refused(
            f"cannot serve {model}: after {PROMPT!r}, {NOT_FINITE}. Its weights are damaged, or too large for this "
            "dtype: pull the model again, or give another --dtype"
        )
    if errors[0] is not None:
        raise RuntimeError(f"the engine cannot compute one token: {errors[0]}")
