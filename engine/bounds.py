"""Checks of single values. Each raises a RequestError that names the parameter, its value and its limits.

The classes are bounds that a field declares (`engine.declared`); the functions check values without a field. They are
plain classes: making dataclasses of them would take milliseconds at the start of every command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.errors import RequestError

MAX_INT32: Final = (1 << 31) - 1


class Bound:
    """The values that a field may have."""

    @property
    def words(self) -> str:
        """The values, as the end of a sentence that begins with "it must be"."""
        raise NotImplementedError

    def check(self, name: str, value: object) -> Any:
        """The value as it is kept. Raises RequestError."""
        raise NotImplementedError


class Integer(Bound):
    """An integer from `low` to `high`. `lowest`: what `low` itself means, where that is special."""

    def __init__(self, low: int, high: int, lowest: str = "") -> None:
        self.low, self.high, self.lowest = low, high, lowest

    @property
    def words(self) -> str:
        return f"an integer from {self.low}{f' ({self.lowest})' if self.lowest else ''} to {self.high}"

    def check(self, name: str, value: object) -> Any:
        integer(name, value, self.low, self.high)
        return value


class Number(Bound):
    """A number from `low` to `high`, without `low` itself if `above`. `lowest`: what `low` itself means."""

    def __init__(self, low: float, high: float, lowest: str = "", *, above: bool = False) -> None:
        self.low, self.high, self.lowest, self.above = low, high, lowest, above

    @property
    def words(self) -> str:
        if self.above:
            return f"a number above {self.low:g}, up to {self.high:g}"
        return f"a number from {self.low:g}{f' ({self.lowest})' if self.lowest else ''} to {self.high:g}"

    def check(self, name: str, value: object) -> Any:
        number(name, value, self.low, self.high, above=self.above)
        return value


class Flag(Bound):
    """True or false."""

    @property
    def words(self) -> str:
        return "true or false"

    def check(self, name: str, value: object) -> Any:
        flag(name, value)
        return value


class OneOf(Bound):
    """One of some words."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def check(self, name: str, value: object) -> Any:
        if value not in self.choices:
            raise RequestError(f"{name}={shown(value)} must be {self.words}", param=name)
        return value


class Strings(Bound):
    """At most `limit` strings of 1 to `longest` characters. Kept as a tuple."""

    def __init__(self, limit: int, longest: int) -> None:
        self.limit, self.longest = limit, longest

    @property
    def words(self) -> str:
        return f"a list of at most {self.limit} strings, each of 1 to {self.longest} characters"

    def check(self, name: str, value: object) -> Any:
        return strings(name, value, self.limit, self.longest)


class TokenIds(Bound):
    """At most `limit` token ids. Kept as a tuple."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    def words(self) -> str:
        return f"a list of at most {self.limit} token ids"

    def check(self, name: str, value: object) -> Any:
        return token_ids(name, value, self.limit, MAX_INT32)


class Biases(Bound):
    """At most `limit` numbers from -`reach` to `reach` by token id. Kept as pairs, in the order of token ids."""

    def __init__(self, limit: int, reach: float) -> None:
        self.limit, self.reach = limit, reach

    @property
    def words(self) -> str:
        return f"at most {self.limit} numbers from {-self.reach:g} to {self.reach:g} by token id"

    def check(self, name: str, value: object) -> Any:
        return biases(name, value, self.limit, MAX_INT32, self.reach)


def shown(value: object) -> str:
    """`repr(value)` for an error message, cut to at most about 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={shown(value)} must be an integer", param=name, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name}={shown(value)} must be from {low} to {high}", param=name)


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Check a number in [low, high]. With `above`, `low` itself is refused too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}={shown(value)} must be a number", param=name, code="invalid_type")
    # Compared before it is converted: no float holds an integer of 400 digits. NaN compares as false.
    if not low <= value <= high or (above and value == low):
        wanted = f"above {low:g}, up to {high:g}" if above else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}={shown(value)} must be a number {wanted}", param=name)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={shown(value)} must be true or false", param=name, code="invalid_type")


def strings(name: str, value: object, limit: int, longest: int) -> tuple[str, ...]:
    """Check a list of at most `limit` strings of 1 to `longest` characters. Returns it as a tuple."""
    found = _sequence(name, value, limit)
    for one in found:
        if not isinstance(one, str):
            raise RequestError(f"{name} has {shown(one)}, which is not a string", param=name, code="invalid_type")
        if not 1 <= len(one) <= longest:
            raise RequestError(
                f"{name} has a string of {len(one)} characters; each must have 1 to {longest}", param=name
            )
    return found


def token_ids(name: str, value: object, limit: int, highest: int) -> tuple[int, ...]:
    """Check a list of at most `limit` token ids from 0 to `highest`. Returns it as a tuple."""
    found = _sequence(name, value, limit)
    for one in found:
        integer(name, one, 0, highest)
    return found


def biases(name: str, value: object, limit: int, highest: int, reach: float) -> tuple[tuple[int, float], ...]:
    """Check at most `limit` biases: a mapping or pairs of token id and a number from -`reach` to `reach`.

    Returns (token id, bias) pairs in the order of token ids.
    """
    pairs = _sequence(name, tuple(value.items()) if isinstance(value, (dict, Mapping)) else value, limit)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != 2:
            raise RequestError(
                f"{name} has {shown(pair)}, which is not a token id with its bias", param=name, code="invalid_type"
            )
        integer(name, pair[0], 0, highest)
        number(name, pair[1], -reach, reach)
        if pair[0] in found:
            raise RequestError(f"{name} has token id {pair[0]} twice", param=name)
        found[pair[0]] = float(pair[1])
    return tuple(sorted(found.items()))


def _sequence(name: str, value: object, limit: int) -> tuple[Any, ...]:
    if value == ():  # nearly always; asking whether something is a Sequence is slow
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name}={shown(value)} must be a list", param=name, code="invalid_type")
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries; at most {limit} are allowed", param=name)
    return tuple(value)
