"""The broker in memory: all that it holds, and every change of it. A list's last element is its front, as in Redis.

Turns: turns of tenants within one list (`redis/scripts/_fair.lua`)
Server: lists, deliveries in flight, leases, dead letters
Fetch: one FETCH, which chooses what comes first and fits (`redis/scripts/fetch.lua`)
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from producers.broker.memory.message import Sent, Unusable, read, task_id_of
from producers.broker.values import Credit, Fetched, Rules
from producers.contract import keys
from producers.contract.levels import split

#: Delayed messages that come due in one FETCH.
DUE: int = 100


#: Of a tenant's messages so many are looked at for one to place; one may be overtaken by so many of its tenant
#: (docs/how/placement.md). One FETCH leaves so many to other workers.
WINDOW, COUNT, LEAVES = 8, 4, 64


@dataclass(frozen=True, slots=True)
class Left:
    """A message that was passed over. `since`: when (ms) it was first left to another worker; None: it was overtaken
    alone. `overtaken`: by how many; `to`: the incarnation that it is left to, or empty."""

    since: float | None
    overtaken: int
    to: str


@dataclass(slots=True)
class Turns:
    """A list's sorted messages: each tenant's messages by number of arrival, and its served tokens by weight.

    These are virtual token counters. `served` has tenants with waiting messages, `rested` those without that were
    served more than the least served of the others.
    """

    queues: dict[str, dict[int, Sent]] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    rested: dict[str, float] = field(default_factory=dict)
    left: dict[int, Left] = field(default_factory=dict)
    """By number, the messages that were passed over for what workers hold."""

    def add(self, number: int, message: Sent) -> None:
        tenant = message.tenant
        if tenant not in self.served:
            self.served[tenant] = max([self.rested.pop(tenant, 0.0), *self._least()])
        self.queues.setdefault(tenant, {})[number] = message

    def serve(self, tenant: str, number: int, charge: float) -> None:
        """Remove a message that was taken, and charge its tenant."""
        del self.queues[tenant][number]
        self.left.pop(number, None)
        self.served[tenant] += charge
        if not self.queues[tenant]:
            del self.queues[tenant]
            self.rested[tenant] = self.served.pop(tenant)
        self._forget()

    def correct(self, tenant: str, more: float) -> None:
        """Charge a tenant `more` (or less, if negative). No tenant falls below the least served one by that."""
        for counters in (self.served, self.rested):
            if tenant in counters:
                lowest = min([counters[tenant], *(self._least() or [0.0])])
                counters[tenant] = max(lowest, counters[tenant] + more)
        self._forget()

    def take_last(self, count: int) -> list[tuple[int, Sent]]:
        """Remove the `count` that arrived last, and return them by number. No tenant is charged."""
        last = sorted(self.messages().items(), key=_number)[-count:] if count else []
        for number, message in last:
            del self.queues[message.tenant][number]
            self.left.pop(number, None)
            if not self.queues[message.tenant]:
                del self.queues[message.tenant], self.served[message.tenant]
        if not self.queues:
            self.rested.clear()
        return last

    def first(self, tenant: str, count: int) -> list[tuple[int, Sent]]:
        """A tenant's oldest messages."""
        return sorted(self.queues[tenant].items(), key=_number)[:count]

    def head(self, passed: set[str]) -> tuple[int, Sent] | None:
        """The oldest message of the least served tenant, of those that are not passed over."""
        waiting = [tenant for tenant in self.queues if tenant not in passed]
        if not waiting:
            return None
        first = min(waiting, key=lambda tenant: (self.served[tenant], tenant.encode(errors="surrogateescape")))
        return min(self.queues[first].items(), key=_number)

    def messages(self) -> dict[int, Sent]:
        return {number: sent for queue in self.queues.values() for number, sent in queue.items()}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def _least(self) -> list[float]:
        return [min(self.served.values())] if self.served else []

    def _forget(self) -> None:
        self.rested = {t: n for t, n in self.rested.items() if any(n > lowest for lowest in self._least())}


def _number(item: tuple[int, Sent]) -> int:
    return item[0]


def places(queue: str) -> list[tuple[str, int]]:
    """The lists of a queue, each with its tier's rank, best tier first."""
    return sorted(((f"{queue}#{tier}", rank) for tier, (rank, _) in keys.TIERS.items()), key=lambda item: item[1])


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message in flight. `order`: of deliveries; `number`: of its arrival; `charge`: its tenant's, in tokens."""

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
    """All state of a broker. `places`: the lists of a queue and their ranks; `clock`: ms. Any thread may call; `lock`
    guards all of it."""

    places: Callable[[str], list[tuple[str, int]]] = places
    clock: Callable[[], float] = lambda: time.time() * 1000
    lock: threading.RLock = field(default_factory=threading.RLock)
    lists: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[str, Turns] = field(default_factory=lambda: defaultdict(Turns))
    unserved: dict[str, float] = field(default_factory=dict)
    """List -> time (ms) since when its head waits."""
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
    held: dict[str, set[str]] = field(default_factory=dict)
    """Incarnation -> marks of the prefixes that it holds."""
    prefixes: dict[str, str] = field(default_factory=dict)
    """Mark -> the incarnation that entered it last."""
    room: dict[str, Credit] = field(default_factory=dict)
    """Incarnation that holds something -> what it had free at the end of its last FETCH."""
    arrivals: int = 0
    deliveries: int = 0
    delivered_tokens: int = 0
    pokes: list[Callable[[], None]] = field(default_factory=list)
    """Called whenever a message may have arrived."""

    def lives(self, incarnation: str) -> bool:
        return self.leases.get(incarnation, 0.0) > self.clock()

    def push(self, name: str, raw: bytes, *, front: bool = False) -> None:
        self.lists[name].insert(len(self.lists[name]) if front else 0, raw)
        for poke in list(self.pokes):
            poke()

    def submitted(self, name: str) -> float | None:
        """When (ms) the oldest task of a list was submitted, by its front and the first of its sorted messages."""
        times = [sent.at for _, sent in sorted(self.turns[name].messages().items())[:1]]
        with suppress(IndexError, Unusable):
            times.append(read(self.lists[name][-1]).at)
        return min((at for at in times if 0 < at < math.inf), default=None)

    def bury(self, reason: str, name: str, raw: bytes) -> None:
        message = raw.decode(errors="surrogateescape")
        letter = {"reason": reason, "list": name, "at": int(self.clock()), "message": message}
        self.dead.append(json.dumps(letter, ensure_ascii=False).encode(errors="surrogateescape"))

    def remove(self, name: str, raw: bytes, task_id: str, reason: str = "") -> bool:
        """Remove a message from a list; with a reason, it becomes a dead letter. Returns False if it is not there."""
        if raw not in self.lists[name]:
            return False
        self.lists[name].remove(raw)
        self.reaped.pop(task_id, None)
        self.returned.pop(task_id, None)
        if reason:
            self.bury(reason, name, raw)
        return True

    def move(self, name: str, target: str, raw: bytes) -> bool:
        """Move a message from a list to the front of another. Returns False if it does not wait there."""
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
        self.correct(d, max(1, used))
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
            target = next(name for name, rank in self.places(to) if rank == d.rank) if to else d.list
            self.push(target, d.raw, front=True)
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
        self._unhold(incarnation)
        return len(gone)

    def hold(self, incarnation: str, enter: Sequence[str], drop: Sequence[str], *, anew: bool) -> int:
        if not self.lives(incarnation):
            return -1
        if anew:
            self._unhold(incarnation)
        for mark in enter:
            self.held.setdefault(incarnation, set()).add(mark)
            self.prefixes[mark] = incarnation
        for mark in drop:
            self.held.get(incarnation, set()).discard(mark)
            if self.prefixes.get(mark) == incarnation:
                del self.prefixes[mark]
        return len(self.held.get(incarnation, ()))

    def _unhold(self, incarnation: str) -> None:
        self.held.pop(incarnation, None)
        self.room.pop(incarnation, None)
        self.prefixes = {mark: holder for mark, holder in self.prefixes.items() if holder != incarnation}

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
        due = sorted((d for d in self.delayed[queue] if d.due <= until), key=lambda d: d.due)[:count]
        for d in reversed(due):
            self.push(d.list, d.raw, front=True)
            self.delayed[queue].remove(d)
        return len(due)

    def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        if self._any_lives(takers):
            return -1
        moved = 0
        for name, _ in self.places(queue):
            moved += self._unsort(name, count - moved) if moved < count else 0
        return moved

    def adopt(self, source: str, target: str) -> int:
        if self._any_lives([split(source)[0]]):
            return -1
        moved, lists = len(self.delayed[source]), {}
        for (old, _), (new, _) in zip(self.places(source), self.places(target), strict=True):
            lists[old] = new
            self._unsort(old, len(self.turns[old]))
            moved += len(self.lists[old])
            for raw in self.lists.pop(old, []):
                self.push(new, raw, front=True)
        delayed = self.delayed.pop(source, [])
        self.delayed[target] += [replace(d, list=lists.get(d.list, d.list)) for d in delayed]
        return moved

    def _any_lives(self, takers: Sequence[str]) -> bool:
        return any(pool in takers and self.lives(inc) for inc, pool in self.listed.items())

    def _unsort(self, name: str, count: int) -> int:
        """Return the last `count` sorted messages to the front of their list, in the order of their arrival. Returned
        messages at its front are merged among them; those that arrived before all of them stay in front."""
        returned, last = self._take_returned(name), self.turns[name].take_last(count)
        oldest = last[0][0] if last else None
        back, ahead = [(number, sent.raw) for number, sent in last], []
        for number, raw, task_id in returned:
            if oldest is not None and number > oldest:
                back.append((number, raw))
                self.returned.pop(task_id, None)
            else:
                ahead.append(raw)
        for raw in [raw for _, raw in sorted(back, key=lambda item: item[0])][::-1] + ahead[::-1]:
            self.push(name, raw, front=True)
        return len(last)

    def _take_returned(self, name: str) -> list[tuple[int, bytes, str]]:
        """Remove returned messages from a list's front: (number of arrival, message, task id), the front first."""
        returned, waiting = [], self.lists[name]
        while waiting and (task_id := task_id_of(waiting[-1])) is not None and task_id in self.returned:
            returned.append((self.returned[task_id], waiting.pop(), task_id))
        return returned


@dataclass(slots=True)
class Fetch:
    """One FETCH. `seqs`, `tokens`: the remaining credit, by tier. A message takes it from its own and all lower tiers:
    higher tiers may preempt it."""

    server: Server
    incarnation: str
    queues: Sequence[str]
    home: str
    rules: Rules
    seqs: list[int]
    tokens: list[int]
    blocked: int = 4
    """The best tier without room: it and lower ones get no more."""
    now: float = 0.0
    lists: dict[str, tuple[str, int]] = field(default_factory=dict)
    """List -> its queue and rank."""
    passed: dict[str, set[str]] = field(default_factory=dict)
    """List -> tenants that wait because their head is a suspect, or is left to another worker."""
    places: bool = False
    look_again: float | None = None
    """After how many ms to fetch again, since messages were left to others."""
    leaves: int = 0
    """Heads that were left so far."""

    def run(self, uuids: Sequence[str], sort_limit: int) -> list[Fetched]:
        server, mine = self.server, self.server.inflight[self.incarnation]
        self.now = server.clock()
        self.places = self.places and bool(server.prefixes)
        ranked = [(rank, name, queue) for queue in self.queues for name, rank in server.places(queue)]
        self.lists = {name: (queue, rank) for rank, name, queue in sorted(ranked, key=lambda item: item[0])}
        server.due(self.home, self.now, DUE)
        buried = [letter for name in self.lists for letter in self._sort(name, sort_limit)]
        out, looked = [], False
        for uuid in uuids:
            if uuid not in mine:
                if not looked:
                    looked = True
                    self._note_heads(self.lists)
                chosen = self._choose(mine)
                if chosen is None:
                    break
                mine[uuid] = self._take(*chosen)
            out.append(self._deliver(uuid, mine[uuid]))
        if self.places and (server.held.get(self.incarnation) or self.incarnation in server.room):
            (a, b, c, d), (e, f, g, h) = self.seqs, self.tokens
            server.room[self.incarnation] = Credit((a, b, c, d), (e, f, g, h))
        return out + buried

    def _deliver(self, uuid: str, d: Delivery) -> Fetched:
        for rank in range(d.rank, 4):
            self.seqs[rank] -= d.seqs
            self.tokens[rank] -= d.tokens
        returns = self.server.reaped.get(d.id, 0)
        return Fetched(uuid, *self.lists[d.list], d.raw, returns > 0, 0 < returns >= self.rules.max_redeliveries)

    def _sort(self, name: str, sort_limit: int) -> list[Fetched]:
        """Sort messages from the front of a list by tenant. Unusable ones become dead letters, and are returned."""
        server, buried = self.server, []
        for _ in range(min(sort_limit, len(server.lists[name]))):
            raw = server.lists[name].pop()
            try:
                message = read(raw)
            except Unusable as why:
                server.bury(str(why), name, raw)
                buried.append(Fetched("", *self.lists[name], raw, buried=str(why)))
                continue
            number = server.returned.pop(message.id, None)
            if number is None:
                number = server.arrivals = server.arrivals + 1
            server.turns[name].add(number, message)
        return buried

    def _note_heads(self, names: Sequence[str] | dict[str, tuple[str, int]]) -> None:
        """Note since when each list's head waits: a noted time after now comes from a clock that was set back."""
        for name in names:
            if self.server.turns[name].queues:
                self.server.unserved[name] = min(self.now, self.server.unserved.get(name, self.now))
            else:
                self.server.unserved.pop(name, None)

    def _choose(self, mine: dict[str, Delivery]) -> tuple[str, int, Sent] | None:
        """The next message: of the list with the best rank, then tier, then order, among those that are not blocked."""
        while heads := {
            name: head
            for name, (_, tier) in self.lists.items()
            if tier < self.blocked and (head := self.server.turns[name].head(self.passed.get(name, set())))
        }:
            best = min(heads, key=lambda name: (self._rank(name), self.lists[name][1]))
            number, message = heads[best]
            tier = self.lists[best][1]
            seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
            if seqs > self.seqs[tier] or tokens > self.tokens[tier]:
                self.blocked = tier
            elif self._suspect(message.id) and any(self._suspect(d.id) for d in mine.values()):
                self.passed.setdefault(best, set()).add(message.tenant)
            elif (chosen := self._place(best, number, message)) is not None:
                return best, *chosen
            else:
                self.leaves += 1
                self.passed.setdefault(best, set()).add(message.tenant)
        return None

    def _place(self, name: str, number: int, head: Sent) -> tuple[int, Sent] | None:
        """Of the head's tenant the message to take: of those behind it the one of which most is held here, and more
        than of the head; or if the head is left to a holder of a longer part of its prefix, the one of which most is.
        None goes before the head that is to be left itself. Else the head. None: all are left."""
        turns, rank = self.server.turns[name], self.lists[name][1]
        before = turns.left.get(number, Left(None, 0, ""))
        if not self.places or head.order_key or before.overtaken >= COUNT:
            return number, head
        here, other = self._held(head, rank)
        since = self.now if before.since is None else min(before.since, self.now)
        left_for = since + self.rules.left_ms - self.now
        leaves = self.leaves < LEAVES and other is not None and left_for > 0
        best, max_held = None, -1 if leaves else here
        for place, message in turns.first(head.tenant, WINDOW)[1:]:
            if message.order_key:
                break
            seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
            if seqs <= self.seqs[rank] and tokens <= self.tokens[rank] and not self._suspect(message.id):
                its, elsewhere = self._held(message, rank)
                if elsewhere is None and its > max_held:
                    best, max_held = (place, message), its
        if leaves and other is not None:
            if best is not None or since != before.since:
                turns.left[number] = Left(since, before.overtaken + (best is not None), other)
            self.look_again = left_for if self.look_again is None else min(self.look_again, left_for)
            return best
        if best is None:
            return number, head
        turns.left[number] = replace(before, overtaken=before.overtaken + 1)
        return best

    def _held(self, message: Sent, rank: int) -> tuple[int, str | None]:
        """How many marks of a message are held here, up to the longest part; and who holds a longer part and has room
        for it, the longest first."""
        server, mine, other = self.server, self.server.held.get(self.incarnation, ()), None
        seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
        for index in range(len(message.marks), 0, -1):
            mark = message.marks[index - 1]
            if mark in mine:
                return index, other
            holder = server.prefixes.get(mark)
            if other is None and holder not in (None, self.incarnation) and server.lives(holder):
                room = server.room.get(holder)
                if room is not None and room.seqs[rank] >= seqs and room.tokens[rank] >= tokens:
                    other = holder
        return 0, other

    def _rank(self, name: str) -> int:
        waited = (self.now - self.server.unserved[name]) / (self.rules.ageing * 1000)
        return self.lists[name][1] - math.floor(waited)

    def _suspect(self, task_id: str) -> bool:
        """Whether one more return condemns it."""
        return 0 < self.server.reaped.get(task_id, 0) >= self.rules.max_redeliveries - 1

    def _take(self, name: str, number: int, message: Sent) -> Delivery:
        server = self.server
        seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
        charge, weight = max(tokens, 1), server.weights.get(message.tenant, 1.0)
        server.turns[name].serve(message.tenant, number, charge / weight)
        server.unserved[name] = self.now
        server.deliveries += 1
        server.delivered_tokens += tokens
        self._note_heads([name])
        rank = self.lists[name][1]
        return Delivery(
            server.deliveries, name, message.id, message.raw, rank, seqs, tokens, number, message.tenant, charge, weight
        )


def fetch(
    server: Server,
    incarnation: str,
    queues: Sequence[str],
    uuids: Sequence[str],
    credit: Credit,
    rules: Rules,
    sort_limit: int,
    home: str | None = None,
    *,
    places: bool = False,
) -> tuple[list[Fetched], float | None] | None:
    """The same as `producers.broker.base.Consumer.fetch`, with `look_again`."""
    with server.lock:
        if not server.lives(incarnation):
            return None
        room = (list(credit.seqs), list(credit.tokens))
        call = Fetch(server, incarnation, queues, home or queues[0], rules, *room, places=places)
        fetched = call.run(uuids, sort_limit)
        return fetched, None if call.look_again is None else call.look_again / 1000


_servers: dict[str, Server] = {}


def server_of(url: str) -> Server:
    """The server of this process for a `memory://NAME`: made when first named, and kept until the process ends."""
    return _servers.setdefault(url, Server())
