"""Tries forms out in a child process, so that no form holds this one's threads or memory.

form ─▶ tried before: its verdict ─▶ light: judged here ─▶ else in the child (`engine.grammar.child`), under its limits

A verdict that depends on the machine's speed is remembered for some minutes: a form that was ended or that is too slow.

llguidance has forms of 2 kB over which it computes for hours, and no call of it can be ended. A light form is one that
it has always read in a few milliseconds: the kinds of rules and their number say so (docs/notes/forms.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from engine.confined import ConfinedProcess, Limits, Stopped
from engine.errors import ErrorText, FieldName, RequestError
from engine.grammar.keywords import STEP
from engine.grammar.source import SLOW, STACK_BYTES, check_installed, form_of, judge
from engine.params import parts_of_form

TARGET: Final = "engine.grammar.child:judged"
#: The code of the error for a form whose trial was ended.
STOPPED: Final = "form_stopped"
#: The limits of a trial that makes no matcher, in a gateway.
VALIDATION: Final = Limits(cpu=2.0, wall=10.0, memory=512 << 20, output=1 << 16, stack=STACK_BYTES, nice=5)
#: The limits of one that does. The first one also makes the tokenizer, which takes seconds for a large vocabulary.
MAKING: Final = Limits(cpu=15.0, wall=60.0, memory=2 << 30, output=1 << 16, stack=STACK_BYTES, nice=5)
#: The most verdicts that are remembered. One is a hash and an error's text.
KEPT: Final = 1024
#: Time (s) for which a verdict is remembered that depends on the machine's speed.
REMEMBERED_S: Final = 300.0
#: The most parts of a light schema, and characters of a light regular expression or grammar.
_LIGHT_PARTS: Final = 256
_LIGHT_CHARACTERS: Final = 128
#: The keywords of a light schema whose values are schemas, or not.
_INNER: Final = frozenset({"items", "additionalProperties"})
_BY_NAME: Final = frozenset({"properties", "$defs", "definitions"})
_PLAIN: Final = frozenset(
    {
        "$schema", "$id", "$comment", "type", "required", "enum", "const", "title", "description", "default",
        "examples", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
        "maxLength", "format", "multipleOf",
    }
)  # fmt: skip
#: Keywords that choose among other schemas: light if nothing else in the same object has to hold as well.
_ALONE: Final = frozenset({"anyOf", "$ref"})
_BESIDE: Final = frozenset(
    {"title", "description", "default", "examples", "$defs", "definitions", "$schema", "$comment"}
)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A form's verdict. `reason`: why it cannot be followed; "" if it can. `until`: on time.monotonic."""

    reason: str = ""
    code: str = ""
    until: float = math.inf


class Trials:
    """Judges forms. Blocking and thread-safe. `close` it after use."""

    def __init__(
        self, setup: Any = None, limits: Limits = VALIDATION, *, at_once: int = 1, target: str = TARGET
    ) -> None:
        """`setup`, `target`: of the child (`engine.grammar.child.judged`). `at_once`: the most trials at one time, each
        in a process of its own; more wait."""
        self._processes = [ConfinedProcess(target, setup, limits) for _ in range(at_once)]
        self._free: queue.LifoQueue[ConfinedProcess] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        """Verdicts, by the hash of a form."""

    def is_judged(self, name: str, text: str) -> bool:
        """Whether `check` needs no trial: the form was tried before, or is light."""
        return self._recall(key_of(name, text)) is not None or light(name, text)

    def check(self, name: str, text: str) -> None:
        """Raise RequestError if no output can follow the form; with the code STOPPED if its trial was ended, and SLOW
        if its tokens take too long to find."""
        key = key_of(name, text)
        if self._recall(key) is not None:
            self.check_known(name, text)
            return
        check_installed(name)
        try:
            self._judge(name, text)
        except Stopped as error:
            failed = stopped(name, f"reading it was stopped: {error}")
            if error.again:
                self._remember(key, failed)
            raise failed from None
        except RequestError as error:
            self._remember(key, error)
            raise
        self._remember(key, None)

    def check_known(self, name: str, text: str) -> None:
        """Raise the RequestError that `check` has raised, or `refuse` was given, for the form."""
        verdict = self._recall(key_of(name, text))
        if verdict is not None and verdict.reason:
            raise RequestError(verdict.reason, param=name, code=verdict.code)

    def refuse(self, key: bytes, error: RequestError) -> None:
        """Have `check` and `check_known` raise this for the form of this `key_of`."""
        self._remember(key, error)

    def refuses(self, key: bytes) -> bool:
        """Whether `check_known` raises for the form of this `key_of`."""
        verdict = self._recall(key)
        return verdict is not None and bool(verdict.reason)

    def _recall(self, key: bytes) -> _Verdict | None:
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                return None
            if verdict.until < time.monotonic():
                del self._verdicts[key]
                return None
            self._verdicts.move_to_end(key)
            return verdict

    def _remember(self, key: bytes, error: RequestError | None) -> None:
        verdict = _Verdict()
        if error is not None:
            lasts = REMEMBERED_S if error.code in (STOPPED, SLOW) else math.inf
            verdict = _Verdict(error.message, error.code, time.monotonic() + lasts)
        with self._lock:
            self._verdicts[key] = verdict
            self._verdicts.move_to_end(key)
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)

    def _judge(self, name: str, text: str) -> None:
        if light(name, text):
            judge(form_of(name, text))
            return
        process = self._free.get()
        try:
            process.call([name, text])
        finally:
            self._free.put(process)

    def kill(self) -> None:
        """End the children, and the trials that run; a later one starts another."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the children, after the trials that run."""
        for process in self._processes:
            process.close()


def stopped(name: str, why: str) -> RequestError:
    """The error for a form that was not read to its end."""
    return RequestError(
        ErrorText.of("{} cannot be followed: {}", FieldName(name), why), param=name, code="form_stopped"
    )


def light(name: str, text: str) -> bool:
    """Whether a form is surely read within a few milliseconds."""
    if name != "json_schema":
        return len(text) <= _LIGHT_CHARACTERS and (name == "regex" or not set(text) & set("&~%"))
    return parts_of_form(name, text) <= _LIGHT_PARTS and _light(json.loads(text))


def _light(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    alone = _ALONE & schema.keys()
    if not schema.keys() <= (_BESIDE | alone if alone else _INNER | _BY_NAME | _PLAIN) or len(alone) > 1:
        return False
    if schema.get("multipleOf", STEP) != STEP:
        return False
    inner = [schema[name] for name in _INNER & schema.keys()]
    for name in _BY_NAME & schema.keys():
        inner += schema[name].values() if isinstance(schema[name], dict) else [None]
    if "anyOf" in alone:
        inner += schema["anyOf"] if isinstance(schema["anyOf"], list) else [None]
    return all(map(_light, inner))


def key_of(name: str, text: str) -> bytes:
    """The key by which a form's verdict is remembered."""
    return hashlib.sha256(f"{name} {text}".encode()).digest()
