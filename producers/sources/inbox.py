"""An inbox: a queue of messages that are hidden from others while one process works on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class BadMessage(Exception):
    """A message of which nothing can be made, however often it is tried. The text says why."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message, as it was received once."""

    id: str
    """The same each time that the message is received."""
    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    receipt: str = ""
    """Names this receive."""


class Inbox(ABC):
    """A queue. Calls raise redis.exceptions.RedisError or OSError, and may be repeated.

    A message that is not put down within `hidden_s` seconds is received again, by whoever asks.
    """

    hidden_s: float

    @abstractmethod
    async def open(self) -> None:
        """Check that the queue is there and fits. Raises OSError, which says what to do."""

    @abstractmethod
    async def receive(self) -> list[Received]:
        """The next messages, at most ten. Waits a few seconds for the first."""

    @abstractmethod
    async def remove(self, messages: Sequence[Received]) -> None:
        """Remove messages whose work is done."""

    @abstractmethod
    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        """Hide messages for `seconds` from now on; 0 gives them back at once. Those that are gone are left out."""

    @abstractmethod
    async def bury(self, message: Received, reason: str) -> None:
        """Put a bad message where an operator finds it."""

    @abstractmethod
    def close(self) -> None:
        """End what is open."""
