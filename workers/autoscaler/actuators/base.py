"""The interface of all actuators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
