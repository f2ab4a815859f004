"""Counts the room that the engine has for what is still in the queue.

The ledger counts what was fetched and has not been put down, by tier. A tier's credit is the free room plus the room
that lower tiers hold, because the engine preempts those: so a full batch of low-tier work never hides a waiting
priority task, and nothing is fetched that would only wait here, invisible to other workers and to the autoscaler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from producers.broker.values import Credit
from producers.contract import keys

NO_CREDIT = Credit((0, 0, 0, 0), (0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Size:
    """A delivery's size: its tier's rank, sequences, and KV tokens at most."""

    rank: int
    seqs: int
    tokens: int


class Ledger:
    """Thread-safe. Capacity is (sequences, KV tokens) of the whole engine."""

    def __init__(self, capacity: tuple[int, int], on_room: Callable[[], None] = lambda: None) -> None:
        self.capacity = capacity
        self.on_room = on_room
        """Called, on any thread, when something was put down."""
        self._held: dict[str, Size] = {}
        self._seqs = [0, 0, 0, 0]
        self._tokens = [0, 0, 0, 0]
        self._frozen = False
        self._lock = threading.Lock()

    def hold(self, uuid: str, size: Size) -> None:
        with self._lock:
            self._held[uuid] = size
            self._seqs[size.rank] += size.seqs
            self._tokens[size.rank] += size.tokens

    def release(self, uuid: str) -> None:
        with self._lock:
            size = self._held.pop(uuid, None)
            if size is None:
                return
            self._seqs[size.rank] -= size.seqs
            self._tokens[size.rank] -= size.tokens
        self.on_room()

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._seqs, self._tokens = [0, 0, 0, 0], [0, 0, 0, 0]
        self.on_room()

    def freeze(self, frozen: bool) -> None:
        """While frozen there is no credit at all (a suspect task runs alone)."""
        with self._lock:
            self._frozen = frozen
        self.on_room()

    @property
    def held(self) -> int:
        with self._lock:
            return len(self._held)

    @property
    def patient(self) -> int:
        """Deliveries of flex and batch among those held."""
        with self._lock:
            return sum(size.rank >= keys.TIERS["flex"][0] for size in self._held.values())

    def credit(self) -> Credit:
        with self._lock:
            if self._frozen:
                return NO_CREDIT
            return Credit(_credit(self.capacity[0], self._seqs), _credit(self.capacity[1], self._tokens))


def _credit(capacity: int, held: list[int]) -> tuple[int, int, int, int]:
    free = capacity - sum(held)
    a, b, c, d = (max(0, free + sum(held[rank + 1 :])) for rank in range(4))
    return a, b, c, d
