"""A request's form as a grammar of llguidance, checked as far as possible without a tokenizer. No numpy."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from engine.errors import ErrorText, FieldName, RequestError

#: Runs of white space in JSON end. Else a model may go on writing it until it meets max_tokens.
_JSON: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
#: The same as a member of a schema within a grammar.
SPACE: Final = f'"x-guidance": {json.dumps(_JSON)}'
#: llguidance descends into rules that name each other: a chain of thousands takes more than a usual stack.
STACK_BYTES: Final = 256 << 20
#: The most states of one output's lexer, of some 0.5 kB each: a string of bounded length takes one a character.
_LEXER_STATES: Final = 150_000
#: The least common multiple of all that numbers are to be multiples of: a lexer has as many states, thrice squared.
_MULTIPLES: Final = 20_000
#: The code of the error for a form whose tokens take too long to find, for which every output of a step waits.
SLOW: Final = "form_slow"
#: The most processor time (s) that finding one token may take in a trial. Ordinary forms take a tenth of it at most.
_TOKEN_S: Final = 0.1
#: The tokens that are found in a trial.
_TRIED_TOKENS: Final = 16
#: The most characters of llguidance's reasons that a message shows.
_REASON: Final = 300
#: A grammar's first line, of `budget_line`.
_BUDGET: Final = re.compile(r"// at most (\d{1,9}) tokens up to <\[(\d{1,9})\]>(?: from <\[(\d{1,9})\]>)?\n")


def budget_line(limit: int, end: int, begin: int | None) -> str:
    """The first line of a grammar that bounds the tokens before the token `end`. `begin`: the output's first token,
    behind which they are counted, if it comes; None: they are counted from the output's beginning.

    llguidance takes it for a comment. Its own `max_tokens` of a rule is no function of the output's tokens: it goes on
    counting where tokens that were guessed ahead are taken back.
    """
    return f"// at most {limit} tokens up to <[{end}]>{'' if begin is None else f' from <[{begin}]>'}\n"


def budget_of(name: str, text: str) -> re.Match[str] | None:
    """The first line of a form, if that is a grammar and the line one of `budget_line`: its groups are limit, end and
    begin."""
    return _BUDGET.match(text) if name == "grammar" else None


def check_installed(name: str) -> None:
    """Raise RequestError if llguidance is not installed, which the form `name` needs."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise RequestError(
            ErrorText.of(
                "{} needs the package llguidance, which is not installed here; install penstock[worker]",
                FieldName(name),
            ),
            param=name,
        ) from None


def form_of(name: str, text: str) -> tuple[str, str]:
    """A form, as (the parameter's name, its grammar for llguidance). Raises RequestError."""
    check_installed(name)
    from llguidance import LLMatcher

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
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    if name != "regex" and '"x-guidance"' in plain.replace(SPACE, ""):
        raise refused(name, "x-guidance is llguidance's own, and not offered here")
    steps = {digits.replace(".", "").strip("0") for digits in re.findall(r'"multipleOf"\s*:\s*(\d+\.?\d*)', plain)}
    if math.lcm(*(int(digits) for digits in steps if digits)) > _MULTIPLES:
        raise refused(name, f"the least common multiple of its multipleOf numbers is above {_MULTIPLES}")


def parser_version() -> str:
    """The version of llguidance, by which masks may differ; "" where it is not installed."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return ""


def judge(form: tuple[str, str]) -> None:
    """Raise RequestError if no output could follow a form of `form_of`: it has an error, or is not supported.

    Large or odd forms take seconds, or for ever, and a stack of STACK_BYTES: see engine.grammar.trial.
    """
    from llguidance import LLMatcher

    name, grammar = form
    with _panics(name):
        wrong, reasons = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if wrong:
        raise refused(name, reasons[0])


def new_tokenizer(text: str, eos: Sequence[int]) -> Any:
    """The LLTokenizer of a tokenizer.json. For a vocabulary of 128,000 tokens it takes a second or more, and holds the
    interpreter's lock. Raises ValueError for a tokenizer of a make that llguidance does not know."""
    from llguidance import LLTokenizer

    with _panics("the tokenizer"):
        return LLTokenizer(text, n_vocab=None, eos_token=list(eos) or None)


def unreadable(name: str, error: ValueError) -> RequestError:
    """The error for a form of outputs whose tokenizer `new_tokenizer` does not take."""
    return refused(name, f"llguidance cannot read the model's tokenizer: {error}")


def new_rules(form: tuple[str, str], tokenizer: Any) -> Any:
    """An LLMatcher at the beginning of an output of a form of `form_of`. Most of its work is done without the
    interpreter's lock. Raises RequestError."""
    from llguidance import LLMatcher

    name, grammar = form
    with _panics(name):
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        matcher.compute_bitmask()  # finds at once what only fails at the first token
    if matcher.is_error() or matcher.is_stopped():
        raise refused(name, matcher.get_error() or matcher.stop_reason())
    return matcher


def check_speed(name: str, rules: Any, tokenizer: Any) -> None:
    """Raise RequestError if one of an output's first tokens takes more than _TOKEN_S to find.

    `rules`: those of `new_rules`, which are then somewhere in the output. The output opens and closes what JSON can
    open and close, since a form may branch there; elsewhere its tokens are drawn.
    """
    draw = random.Random(0)  # noqa: S311 - not for secrets
    marks = [token_id for mark in (b'"', b"{", b"[", b",", b":") for token_id in tokenizer.tokenize_bytes(mark)]
    ends = sum(1 << token_id for token_id in set(tokenizer.eos_tokens))
    for _ in range(_TRIED_TOKENS):
        rules.consume_tokens(rules.compute_ff_tokens())
        began = time.thread_time()
        allowed = int.from_bytes(rules.compute_bitmask(), "little") & ~ends
        if allowed:
            rules.consume_token(
                next(token_id for token_id in (*marks, _drawn(allowed, draw)) if allowed >> token_id & 1)
            )
        elapsed = time.thread_time() - began
        if elapsed > _TOKEN_S:
            raise slow(name, f"finding one token took {elapsed:.2g} s of processor time; {_TOKEN_S:g} s may be taken")
        if not allowed:
            return


def _drawn(bits: int, draw: random.Random) -> int:
    """The place of one of the bits that are set."""
    start = draw.randrange(bits.bit_length())
    remaining = bits >> start
    return start + (remaining & -remaining).bit_length() - 1


def slow(name: str, why: str) -> RequestError:
    """The error for a form whose tokens take too long to find."""
    many = "objects of many properties that may be missing, as alternatives to each other, are the usual cause"
    return RequestError(
        ErrorText.of("{} cannot be followed: it is too slow: {} ({})", FieldName(name), why, many),
        param=name,
        code="form_slow",
    )


def limits() -> Any:
    """The bounds of a grammar while it is parsed, as llguidance's LLParserLimits."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def refused(name: str, reason: str) -> RequestError:
    """The error for a form that cannot be followed. `reason`: llguidance's."""
    return RequestError(ErrorText.of("{} cannot be followed: {}", FieldName(name), readable(reason)), param=name)


def readable(reason: str) -> str:
    """A reason of llguidance for people."""
    if reason.startswith("NoExtension"):
        return "no text has this form"
    short = " ".join(reason.replace("<non-verbose/>", "").split())
    return short if len(short) <= _REASON else f"{short[:_REASON]}..."


@contextmanager
def _panics(name: str) -> Iterator[None]:
    """Turn a panic of llguidance into RequestError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":  # pyo3's, which cannot be imported
            raise
        raise refused(name, f"llguidance panicked: {panic}") from None
