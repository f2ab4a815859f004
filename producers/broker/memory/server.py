"""All that the broker in memory holds, and every change of it. A list's last element is its front, as in Redis."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from producers.broker.memory.message import Unusable, read, task_id_of
from producers.broker.memory.turns import Turns
from producers.contract import keys
from producers.contract.levels import split


def places(queue: str) -> list[tuple[str, int]]:
    """The lists of a queue, each with its tier's rank, best tier first."""
    return sorted(((f"{queue}#{tier}", rank) for tier, (rank, _) in keys.TIERS.items()), key=lambda one: one[1])


@dataclass(frozen=True, slots=True)
class Delivery:
    """In flight. `order`: of taking; `number`: of its arrival; `charge`: tokens that its tenant is charged."""

    order: int
    list: str
    id: str
    raw: bytes
    rank: int
    seqs: int
    tokens: int
    number: int
    tenant: str
    charge: int
    weight: float


@dataclass(frozen=True, slots=True)
class Delayed:
    due: float
    uuid: str
    list: str
    raw: bytes


@dataclass(slots=True)
class Server:
    """`places`: the lists of a queue and their ranks; `clock`: ms. Any thread may call; `lock` guards all of it."""

    places: Callable[[str], list[tuple[str, int]]] = places
    clock: Callable[[], float] = lambda: time.time() * 1000
    lock: threading.RLock = field(default_factory=threading.RLock)
    lists: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[str, Turns] = field(default_factory=lambda: defaultdict(Turns))
    unserved: dict[str, float] = field(default_factory=dict)
    """Since when (ms) each list's head waits."""
    inflight: dict[str, dict[str, Delivery]] = field(default_factory=lambda: defaultdict(dict))
    delayed: dict[str, list[Delayed]] = field(default_factory=lambda: defaultdict(list))
    dead: list[bytes] = field(default_factory=list)
    reaped: dict[str, int] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    """Task id -> former number of arrival, for messages that returned to their list."""
    weights: dict[str, float] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    """Incarnation -> when (ms) its lease ends."""
    listed: dict[str, str] = field(default_factory=dict)
    """Incarnation -> its pool's queue."""
    arrivals: int = 0
    taken: int = 0
    taken_tokens: int = 0
    pokes: list[Callable[[], None]] = field(default_factory=list)
    """Called whenever something may have come."""

    def lives(self, incarnation: str) -> bool:
        return self.leases.get(incarnation, 0.0) > self.clock()

    def push(self, name: str, raw: bytes, *, front: bool = False) -> None:
        self.lists[name].insert(len(self.lists[name]) if front else 0, raw)
        for poke in list(self.pokes):
            poke()

    def submitted(self, name: str) -> float | None:
        """When (ms) the oldest of a list was submitted, as its front and the first of what was sorted say it."""
        said = [sent.at for _, sent in sorted(self.turns[name].messages().items())[:1]]
        with suppress(IndexError, Unusable):
            said.append(read(self.lists[name][-1]).at)
        return min((at for at in said if 0 < at < inf), default=None)

    def bury(self, reason: str, name: str, raw: bytes) -> None:
        message = raw.decode(errors="surrogateescape")
        letter = {"reason": reason, "list": name, "at": int(self.clock()), "message": message}
        self.dead.append(json.dumps(letter, ensure_ascii=False).encode(errors="surrogateescape"))

    def remove(self, name: str, raw: bytes, task_id: str, reason: str = "") -> bool:
        """Take a message out of a list; with a reason, it becomes a dead letter. False where it does not wait there."""
        if raw not in self.lists[name]:
            return False
        self.lists[name].remove(raw)
        self.reaped.pop(task_id, None)
        self.returned.pop(task_id, None)
        if reason:
            self.bury(reason, name, raw)
        return True

    def move(self, name: str, target: str, raw: bytes) -> bool:
        """Take a message out of a list, to the front of another. False where it does not wait there."""
        if raw not in self.lists[name]:
            return False
        self.lists[name].remove(raw)
        self.push(target, raw, front=True)
        return True

    # ---- deliveries -----------------------------------------------------------------------------------------------

    def ack(self, incarnation: str, uuid: str, reason: str, used: int) -> bool:
        d = self.inflight[incarnation].pop(uuid, None)
        if d is None:
            return False
        self.reaped.pop(d.id, None)
        self.correct(d, max(1, used))  # nothing is for nothing
        if reason:
            self.bury(reason, d.list, d.raw)
        return True

    def back(self, incarnation: str, queue: str, uuid: str, delay_ms: float, to: str = "") -> bool:
        d = self.inflight[incarnation].pop(uuid, None)
        if d is None:
            return False
        if delay_ms > 0:
            self.delayed[queue].append(Delayed(self.clock() + delay_ms, uuid, d.list, d.raw))
        else:
            there = next(name for name, rank in self.places(to) if rank == d.rank) if to else d.list
            self.push(there, d.raw, front=True)
        self._returns(d)
        return True

    def reap(self, incarnation: str) -> int:
        if self.lives(incarnation):
            return -1
        self.listed.pop(incarnation, None)
        gone = sorted(self.inflight.pop(incarnation, {}).values(), key=lambda d: -d.order)
        for d in gone:
            self.push(d.list, d.raw, front=True)
            self.reaped[d.id] = self.reaped.get(d.id, 0) + 1
            self._returns(d)
        return len(gone)

    def _returns(self, d: Delivery) -> None:
        self.returned[d.id] = d.number
        self.correct(d, 0)

    def correct(self, d: Delivery, used: int) -> None:
        self.turns[d.list].correct(d.tenant, (used - d.charge) / d.weight)

    # ---- leases ---------------------------------------------------------------------------------------------------

    def lease(self, incarnation: str, ttl_ms: float, *, take: bool, queue: str = "") -> bool:
        if not take and not self.lives(incarnation):
            return False
        self.leases[incarnation] = self.clock() + ttl_ms
        if take:
            self.listed[incarnation] = queue
        return True

    # ---- queues ---------------------------------------------------------------------------------------------------

    def due(self, queue: str, until: float, count: int) -> int:
        """Move due messages to the front of their lists, the soonest due to the very front."""
        held = sorted((d for d in self.delayed[queue] if d.due <= until), key=lambda d: d.due)[:count]
        for d in reversed(held):
            self.push(d.list, d.raw, front=True)
            self.delayed[queue].remove(d)
        return len(held)

    def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        if self._one_lives(takers):
            return -1
        moved = 0
        for name, _ in self.places(queue):
            moved += self._unsort(name, count - moved) if moved < count else 0
        return moved

    def adopt(self, source: str, target: str) -> int:
        if self._one_lives([split(source)[0]]):
            return -1
        moved, lists = len(self.delayed[source]), {}
        for (here, _), (there, _) in zip(self.places(source), self.places(target), strict=True):
            lists[here] = there
            self._unsort(here, len(self.turns[here]))
            moved += len(self.lists[here])
            for raw in self.lists.pop(here, []):
                self.push(there, raw, front=True)
        held = self.delayed.pop(source, [])
        self.delayed[target] += [replace(d, list=lists.get(d.list, d.list)) for d in held]
        return moved

    def _one_lives(self, takers: Sequence[str]) -> bool:
        return any(pool in takers and self.lives(inc) for inc, pool in self.listed.items())

    def _unsort(self, name: str, count: int) -> int:
        """The last `count` of what was sorted go back to the front of their list in the order of their arrival; among
        them what came back and stood there. What stood before them all stays in front."""
        returned, last = self._take_returned(name), self.turns[name].take_last(count)
        oldest = last[0][0] if last else None
        back, ahead = [(number, sent.raw) for number, sent in last], []
        for number, raw, task_id in returned:
            if oldest is not None and number > oldest:
                back.append((number, raw))
                self.returned.pop(task_id, None)
            else:
                ahead.append(raw)
        for raw in [*(raw for _, raw in sorted(back, key=lambda one: one[0]))][::-1] + ahead[::-1]:
            self.push(name, raw, front=True)
        return len(last)

    def _take_returned(self, name: str) -> list[tuple[int, bytes, str]]:
        """Take returned messages off a list's front: (number of arrival, message, task id), the front first."""
        taken, waiting = [], self.lists[name]
        while waiting and (task_id := task_id_of(waiting[-1])) is not None and task_id in self.returned:
            taken.append((self.returned[task_id], waiting.pop(), task_id))
        return taken


_servers: dict[str, Server] = {}


def server_of(url: str) -> Server:
    """The server of this process that a `memory://NAME` names: made when first named, and there until the end."""
    return _servers.setdefault(url, Server())
