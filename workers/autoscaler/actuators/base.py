"""The interface of all actuators."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, parse_qsl, unquote


class ActuatorError(OSError):
    """The platform refused or did not answer; the text says what, and what to do."""


@dataclass(frozen=True, slots=True)
class Actual:
    """A platform's state. `wanted`: the number it was last told. `up`: workers that run or are starting."""

    wanted: int
    up: int
    failing: str = ""
    """Why workers do not come up, in words (the last output of a process that died, say); empty if none is known."""
    failures: int = 0
    """Starts in a row that failed."""


class Actuator(Protocol):
    """Keeps a number of workers running. Any call may be repeated, and is cancelled after `acting.CALL_S`."""

    @property
    def name(self) -> str:
        """The thing that it acts on, for people: `kubernetes default/worker-tiny`, say."""

    async def actual(self) -> Actual:
        """The platform's state now. Raises ActuatorError."""

    async def scale(self, wanted: int, first: Sequence[str]) -> None:
        """Have so many workers run; those that are too many drain. Raises ActuatorError.

        `first`: names of workers (as in their leases), those that should go first in front. Workers that are not named
        serve nothing yet, and go before all.
        """

    async def aclose(self) -> None:
        """Close connections. Workers go on, except those of local processes, which drain."""


@dataclass(frozen=True, slots=True)
class Address:
    """`host` and `name` as the platform spells them; `name` is empty where the URL has none."""

    host: str
    name: str
    options: dict[str, str]


def read(parts: SplitResult, form: str, options: Collection[str], *, named: bool = True) -> Address:
    """A URL's parts. `form`: how it must look, for the error. Raises ValueError."""
    host, name = unquote(parts.netloc), unquote(parts.path.strip("/"))
    if not host or bool(name) != named or parts.fragment:
        raise ValueError(f"actuator is {parts.geturl()!r}; it must look like {form}")
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option, value in found.items():
        if option not in options or not value:
            raise ValueError(
                f"actuator is {parts.geturl()!r}; {option}={value} makes no sense, it must look like {form}"
            )
    return Address(host, name, found)
