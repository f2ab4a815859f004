"""Fields that are declared once: a dataclass's field carries its bounds and its option on the command line.

    threads: int | None = declare(None, Integer(1, 4096), "CPU threads.")

`checked` refuses values out of bounds: each Bound's check raises a RequestError that names the parameter, its value and
its limits. Whoever makes options, schemas or tables of the fields asks `declared`.

Bounds are plain classes: making dataclasses of them would take milliseconds at the start of every command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final

from engine.errors import ErrorText, FieldName, RequestError

MAX_INT32: Final = (1 << 31) - 1
#: A text of JSON may be this many times as long as it may be without white space.
_SPACED: Final = 4
_KEY_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(eq=False, repr=False)
class Option:
    """A field's option on the command line. `name`: as it is written, unless it is called as the field.

    `serving`: it is for an engine that serves many requests. `of_model`: a model may have a default of its own.
    """

    help: str
    name: str = ""
    metavar: str | None = None
    serving: bool = False
    of_model: bool = False


@dataclass(eq=False, repr=False)
class Declared:
    """A field as it was declared. `option`: None where there is none."""

    name: str
    default: Any
    bound: Bound
    option: Option | None


def declare(default: Any, bound: Bound, help: str = "", **more: Any) -> Any:
    """A dataclass's field. `help` and `more`: its Option, unless it has none."""
    return field(default=default, metadata={"bound": bound, "option": Option(help, **more) if help else None})


@cache
def declared(kind: type) -> dict[str, Declared]:
    """The fields of a dataclass by name, in their order."""
    return {field.name: Declared(field.name, field.default, **field.metadata) for field in fields(kind)}


def checked(instance: Any) -> None:
    """Check each field of a new, frozen dataclass that is not its default.

    Lists become tuples. Raises RequestError.
    """
    for declaration in declared(instance.__class__).values():
        value = getattr(instance, declaration.name)
        if value is not declaration.default:  # most are; a test checks the defaults
            kept = declaration.bound.check(declaration.name, value)
            if kept is not value:
                object.__setattr__(instance, declaration.name, kept)


class Bound:
    """The values that a field may have."""

    @property
    def description(self) -> str:
        """Describes the values, to follow "it must be"."""
        raise NotImplementedError

    def check(self, name: str, value: object) -> Any:
        """The value as it is kept. Raises RequestError."""
        raise NotImplementedError


class Integer(Bound):
    """An integer from `low` to `high`. `lowest`: what `low` itself means, where that is special."""

    def __init__(self, low: int, high: int, lowest: str = "") -> None:
        self.low, self.high, self.lowest = low, high, lowest

    @property
    def description(self) -> str:
        return f"an integer from {self.low}{f' ({self.lowest})' if self.lowest else ''} to {self.high}"

    def check(self, name: str, value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, value, "an integer")
        if not self.low <= value <= self.high:
            raise RequestError(
                ErrorText.of("{}={} must be from {} to {}", FieldName(name), shown(value), self.low, self.high),
                param=name,
            )
        return value


class Number(Bound):
    """A number from `low` to `high`, without `low` itself if `above`. `lowest`: what `low` itself means."""

    def __init__(self, low: float, high: float, lowest: str = "", *, above: bool = False) -> None:
        self.low, self.high, self.lowest, self.above = low, high, lowest, above

    @property
    def description(self) -> str:
        if self.above:
            return f"a number above {self.low:g}, up to {self.high:g}"
        return f"a number from {self.low:g}{f' ({self.lowest})' if self.lowest else ''} to {self.high:g}"

    def check(self, name: str, value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(name, value, "a number")
        # Compared before it is converted: no float holds an integer of 400 digits. NaN compares as false.
        if not self.low <= value <= self.high or (self.above and value == self.low):
            allowed = (
                f"above {self.low:g}, up to {self.high:g}" if self.above else f"from {self.low:g} to {self.high:g}"
            )
            raise RequestError(
                ErrorText.of("{}={} must be a number {}", FieldName(name), shown(value), allowed), param=name
            )
        return value


class Flag(Bound):
    description = "true or false"

    def check(self, name: str, value: object) -> Any:
        if not isinstance(value, bool):
            raise wrong_type(name, value, self.description)
        return value


class WatermarkName(Bound):
    """The name of a watermark's key; or False, also as text, for none."""

    description = "the name of a watermark key, 1 to 64 letters, digits, dots, - or _; or false"

    def check(self, name: str, value: object) -> Any:
        if value is False or value == "false":
            return False
        if not isinstance(value, str):
            raise wrong_type(name, value, self.description)
        if not _KEY_NAME.fullmatch(value):
            raise RequestError(
                ErrorText.of("{}={} must be {}", FieldName(name), shown(value), self.description), param=name
            )
        return value


class EarlyStopping(Bound):
    """When a beam search ends: true, false or "never", as transformers has it. Also as text."""

    description = "true, false or never"

    def check(self, name: str, value: object) -> Any:
        if isinstance(value, bool) or value == "never":
            return value
        if not isinstance(value, str):
            raise wrong_type(name, value, self.description)
        if value not in ("true", "false"):
            raise RequestError(
                ErrorText.of("{}={} must be {}", FieldName(name), shown(value), self.description), param=name
            )
        return value == "true"


class OneOf(Bound):
    """One of some texts."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    @property
    def description(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def check(self, name: str, value: object) -> Any:
        if value not in self.choices:
            raise RequestError(
                ErrorText.of("{}={} must be {}", FieldName(name), shown(value), self.description), param=name
            )
        return value


class Text(Bound):
    """A text that is not empty. `longest`: its most characters, if they are bounded."""

    def __init__(self, longest: int | None = None) -> None:
        self.longest = longest

    @property
    def description(self) -> str:
        return "a text" if self.longest is None else f"a text of 1 to {self.longest} characters"

    def check(self, name: str, value: object) -> Any:
        if not isinstance(value, str) or (not value and self.longest is None):
            raise wrong_type(name, value, self.description)
        if self.longest is not None and not 1 <= len(value) <= self.longest:
            raise RequestError(
                ErrorText.of("{} has {} characters; it must have 1 to {}", FieldName(name), len(value), self.longest),
                param=name,
            )
        return _unicode(name, value)


class JsonObject(Bound):
    """A JSON object, as a mapping or as text. Kept as text of at most `longest` characters."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @property
    def description(self) -> str:
        return f"a JSON object of at most {self.longest} characters"

    def check(self, name: str, value: object) -> Any:
        kept = None
        if isinstance(value, str) and len(value) > _SPACED * self.longest:  # before it is parsed
            raise RequestError(
                ErrorText.of("{} has {} characters; at most {} are taken", FieldName(name), len(value), self.longest),
                param=name,
            )
        try:
            read = json.loads(value) if isinstance(value, str) else value
            if isinstance(read, Mapping):
                kept = json.dumps(dict(read), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
        if kept is None:
            raise wrong_type(name, value, "a JSON object")
        if len(kept) > self.longest:
            raise RequestError(
                ErrorText.of(
                    "{} has {} characters as JSON; at most {} are taken", FieldName(name), len(kept), self.longest
                ),
                param=name,
            )
        return _unicode(name, kept)


class Strings(Bound):
    """At most `limit` strings of 1 to `longest` characters. Kept as a tuple. `allow_single`: a
    string is a list of one."""

    def __init__(self, limit: int, longest: int, *, allow_single: bool = False) -> None:
        self.limit, self.longest, self.allow_single = limit, longest, allow_single

    @property
    def description(self) -> str:
        return f"a list of at most {self.limit} strings, each of 1 to {self.longest} characters"

    def check(self, name: str, value: object) -> Any:
        items = _sequence(name, (value,) if self.allow_single and isinstance(value, str) else value, self.limit)
        for item in items:
            if not isinstance(item, str):
                raise RequestError(
                    ErrorText.of("{} has {}, which is not a string", FieldName(name), shown(item)),
                    param=name,
                    code="invalid_type",
                )
            if not 1 <= len(item) <= self.longest:
                raise RequestError(
                    ErrorText.of(
                        "{} has a string of {} characters; each must have 1 to {}",
                        FieldName(name),
                        len(item),
                        self.longest,
                    ),
                    param=name,
                )
            _unicode(name, item)
        return items


#: A token id, of whatever vocabulary.
_ID: Final = Integer(0, MAX_INT32)


class TokenIds(Bound):
    """At most `limit` token ids. Kept as a tuple."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    def description(self) -> str:
        return f"a list of at most {self.limit} token ids"

    def check(self, name: str, value: object) -> Any:
        token_ids = _sequence(name, value, self.limit)
        for token_id in token_ids:
            _ID.check(name, token_id)
        return token_ids


class Biases(Bound):
    """At most `limit` numbers from -`reach` to `reach` by token id: a mapping or pairs. Kept as pairs, in the order of
    token ids."""

    def __init__(self, limit: int, reach: float) -> None:
        self.limit, self.reach = limit, reach

    @property
    def description(self) -> str:
        return f"at most {self.limit} numbers from {-self.reach:g} to {self.reach:g} by token id"

    def check(self, name: str, value: object) -> Any:
        pairs = _sequence(name, tuple(value.items()) if isinstance(value, (dict, Mapping)) else value, self.limit)
        biases: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != 2:
                raise RequestError(
                    ErrorText.of("{} has {}, which is not a token id with its bias", FieldName(name), shown(pair)),
                    param=name,
                    code="invalid_type",
                )
            token_id, bias = _ID.check(name, pair[0]), Number(-self.reach, self.reach).check(name, pair[1])
            if token_id in biases:
                raise RequestError(ErrorText.of("{} has token id {} twice", FieldName(name), token_id), param=name)
            biases[token_id] = float(bias)
        return tuple(sorted(biases.items()))


def _unicode(name: str, text: str) -> str:
    """The text, which is Unicode. Raises RequestError for a lone surrogate, which JSON and Python can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = ErrorText.of(
            "{} is not valid Unicode: it has a lone surrogate at character {}", FieldName(name), error.start
        )
        raise RequestError(message, param=name) from None
    return text


def shown(value: object) -> str:
    """`repr(value)` for an error message, cut to at most about 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no integer of more than 4,300 digits, and nothing too deep
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def wrong_type(name: str, value: object, expected: str) -> RequestError:
    return RequestError(
        ErrorText.of("{}={} must be {}", FieldName(name), shown(value), expected), param=name, code="invalid_type"
    )


def _sequence(name: str, value: object, limit: int) -> tuple[Any, ...]:
    if value == ():  # nearly always; asking whether something is a Sequence is slow
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_type(name, value, "a list")
    if len(value) > limit:
        raise RequestError(
            ErrorText.of("{} has {} entries; at most {} are allowed", FieldName(name), len(value), limit), param=name
        )
    return tuple(value)
