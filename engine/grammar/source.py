"""A request's form as a grammar of llguidance, checked as far as possible without a tokenizer. No numpy."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from engine.errors import RequestError
from engine.params import SamplingParams

T = TypeVar("T")

#: Runs of white space in JSON end. Else a model may go on writing it until it meets max_tokens.
_JSON: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
#: The same as a member of a schema within a grammar.
SPACE: Final = f'"x-guidance": {json.dumps(_JSON)}'
#: llguidance descends into rules that name each other: a chain of thousands takes more than a usual stack.
_STACK_BYTES: Final = 256 << 20
#: The most states of one output's lexer, of some 0.5 kB each: a string of bounded length takes one a character.
_LEXER_STATES: Final = 150_000
#: The time (s) in which a request's form has to be read. Reading on takes a thread, but nobody waits for it.
_READING_S: Final = 10.0
#: The least common multiple of all that numbers are to be multiples of: a lexer has as many states, thrice squared.
_MULTIPLES: Final = 20_000
#: The most characters of llguidance's reasons that a message shows.
_REASON: Final = 300

_starting = threading.Lock()


def form_of(params: SamplingParams) -> tuple[str, str] | None:
    """The request's form, as (the parameter's name, its grammar for llguidance). None if it asks for none.

    Raises RequestError if llguidance is not installed.
    """
    if not params.forms:
        return None
    (name,) = params.forms
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise RequestError(
            f"{name} needs the package llguidance, which is not installed here; install penstock[worker]", param=name
        ) from None
    text = getattr(params, name)
    _check_bounds(name, text)
    if name != "json_schema":
        return name, LLMatcher.grammar_from_regex(text) if name == "regex" else LLMatcher.grammar_from_lark(text)
    try:
        return name, LLMatcher.grammar_from_json_schema(text, defaults=_JSON)
    except ValueError as error:
        raise refused(name, str(error)) from None


def _check_bounds(name: str, text: str) -> None:
    """Raise RequestError for a schema, or a grammar with schemas, that llguidance reads otherwise than one expects, or
    for hours."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    if name != "regex" and '"x-guidance"' in plain.replace(SPACE, ""):
        raise refused(name, "x-guidance is llguidance's own, and not offered here")
    found = {one.replace(".", "").strip("0") for one in re.findall(r'"multipleOf"\s*:\s*(\d+\.?\d*)', plain)}
    if math.lcm(*(int(one) for one in found if one)) > _MULTIPLES:
        raise refused(name, f"the numbers of multipleOf are too large together; they may have {_MULTIPLES} in common")


def parser_version() -> str:
    """The version of llguidance, by which masks may differ; "" where it is not installed."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return ""


def check_form(params: SamplingParams) -> None:
    """Raise RequestError if no model could follow the request's form: it has an error, or is not supported.

    Takes milliseconds, for the largest ones tenths of a second.
    """
    form = form_of(params)
    if form is None:
        return
    from llguidance import LLMatcher

    name, grammar = form
    wrong, reasons = with_stack(name, lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=limits()))
    if wrong:
        raise refused(name, reasons[0])


def limits() -> Any:
    """The bounds of a grammar while it is parsed, as llguidance's LLParserLimits."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def refused(name: str, reason: str) -> RequestError:
    """The error for a form that cannot be followed. `reason`: llguidance's."""
    return RequestError(f"{name} cannot be followed: {said(reason)}", param=name)


def said(reason: str) -> str:
    """A reason of llguidance for people."""
    if reason.startswith("NoExtension"):
        return "no text has this form"
    short = " ".join(reason.replace("<non-verbose/>", "").split())
    return short if len(short) <= _REASON else f"{short[:_REASON]}..."


def with_stack(name: str, work: Callable[[], T]) -> T:
    """Run `work`, which reads the form `name`, on a thread of its own that has a large stack. Returns what it does.

    Raises RequestError if it panics, or takes too long, and what it raises.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        except BaseException as panic:  # noqa: BLE001 - pyo3's PanicException, which cannot be imported
            done.set_exception(refused(name, f"llguidance panicked: {panic}"))

    with _starting:  # the size counts for every thread that starts meanwhile
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="penstock-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    try:
        return done.result(_READING_S)
    except TimeoutError:
        raise refused(name, f"it was not read within {_READING_S:g} s") from None
