"""A request's form as a grammar of llguidance, checked as far as possible without a tokenizer. No numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

from engine.errors import RequestError
from engine.params import FORMS, SamplingParams

T = TypeVar("T")

#: Runs of white space in JSON end. Else a model may go on writing it until it meets max_tokens.
_JSON: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
#: llguidance descends into rules that name each other: a chain of thousands takes more than a usual stack.
_STACK_BYTES: Final = 256 << 20
#: The most states of a grammar's lexer, of 1 to 2 kB each.
_LEXER_STATES: Final = 50_000
#: The most characters of llguidance's reasons that a message shows.
_REASON: Final = 300

_starting = threading.Lock()


def form_of(params: SamplingParams) -> tuple[str, str] | None:
    """The request's form, as (the parameter's name, its grammar for llguidance). None if it asks for none.

    Raises RequestError if llguidance is not installed.
    """
    name = next((name for name in FORMS if getattr(params, name) is not None), None)
    if name is None:
        return None
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise RequestError(
            f"{name} needs the package llguidance, which is not installed here; install penstock[worker]", param=name
        ) from None
    text = getattr(params, name)
    if name == "json_schema":
        return name, LLMatcher.grammar_from_json_schema(text, defaults=_JSON)
    return name, LLMatcher.grammar_from_regex(text) if name == "regex" else LLMatcher.grammar_from_lark(text)


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
    wrong, reasons = with_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=limits()))
    if wrong:
        raise refused(name, reasons[0])


def limits() -> Any:
    """What a grammar may take while it is parsed, as llguidance's LLParserLimits."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def refused(name: str, reason: str) -> RequestError:
    """The error for a form that cannot be followed. `reason`: llguidance's."""
    said = " ".join(reason.split())
    return RequestError(
        f"{name} cannot be followed: {said if len(said) <= _REASON else f'{said[:_REASON]}...'}", param=name
    )


def with_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own that has a large stack. Returns or raises what it does; a Rust panic becomes a
    RuntimeError."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        except BaseException as panic:  # noqa: BLE001 - pyo3's PanicException, which cannot be imported
            done.set_exception(RuntimeError(f"llguidance panicked: {panic}"))

    with _starting:  # the size counts for every thread that starts meanwhile
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="penstock-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return done.result()
