"""A worker process's messages of SQS, which its consumers share: received, given to the worker, on their way out.

One lock guards it. Nothing waits for a server under it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, Final

from producers.broker.sqs import keys
from producers.broker.sqs.address import Address
from producers.broker.sqs.hold import calls, errand
from producers.broker.sqs.hold.buffer import Buffer, places
from producers.broker.sqs.hold.chores import Chores
from producers.broker.sqs.hold.courier import Courier
from producers.broker.sqs.hold.errand import Errand, Steps
from producers.broker.sqs.hold.held import Held, stray_of
from producers.broker.sqs.hold.poller import WAIT_S, Poller
from producers.broker.sqs.hold.polls import Blocked, Line, Wants, ask, read_look
from producers.broker.sqs.hold.reaping import Flying
from producers.broker.sqs.names import is_celery
from producers.broker.sqs.queues.lookup import RENEW_BEFORE_S, Queues
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown, Rules, sane_weights
from producers.connection import aws
from producers.connection.connect import connect
from producers.connection.script import run
from producers.contract.levels import split

#: Without a fetch for so long (s), nothing is polled for.
FRESH_S: Final = 3.0
#: A message that was not taken holds its list up for so long (s) at most: it does not fit; or it was passed over.
UNFIT_S: Final = 60.0
PASSED_S: Final = 10.0
ACCEPTED_S: Final = 1.0 + aws.CONNECT_S


class Hold:
    """`queues`: those of a worker, its own pool's first, which has none on SQS; `home`: the version's."""

    def __init__(self, address: Address, queues: Sequence[str], store_url: str, home: str) -> None:
        self.address = address
        self.redis = connect(store_url)
        self.served = [queue for queue in queues if _is_polled(queue, queues, home, address)]
        self.lines = {name: Line(name, queue, rank) for queue in self.served for name, rank in places(queue)}
        self.changed = threading.Condition()
        self.closed = False
        self.passed: frozenset[str] = frozenset()
        """Queues that are not polled for now."""
        self.users = 0
        self.pokes: list[Callable[[], None]] = []
        self._buffer = Buffer(self.served, address.fifo)
        self._held: dict[str, Held] = {}
        self._given: dict[str, Held] = {}
        self._buried: list[Fetched] = []
        self._wants: Wants | None = None
        self._finished: deque[float] = deque()
        self._courier: Courier | None = None
        self._pollers: list[Poller] = []
        self.chores = Chores(self)

    @cached_property
    def sqs(self) -> Any:
        """The courier's client."""
        return aws.client("sqs", self.address.region, self.address.endpoint_url)

    @cached_property
    def polling_sqs(self) -> Any:
        """The pollers'."""
        return aws.client("sqs", self.address.region, self.address.endpoint_url, wait_s=WAIT_S)

    @cached_property
    def queues(self) -> Queues:
        return Queues(self.sqs, self.address, self.redis)

    # ---- fetch ----------------------------------------------------------------------------------------------------

    def fetch(self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules) -> list[Fetched] | None:
        """As `producers.broker.base.Consumer.fetch`, of what was received. It also tells the pollers what has room."""
        with self.changed:
            self.give_back([one for one in self._held.values() if one.incarnation != incarnation and not one.given])
            since = {line.name: line.since for line in self.lines.values()}
            fetched, left = self._buffer.choose(incarnation, uuids, credit, rules, since)
            for one in self._held.values():
                if one.uuid and not one.given:
                    self._given[one.uuid] = one
            taken = [held for one in fetched if (held := self._given.get(one.uuid)) and not held.given]
        answer = run(self.redis, calls.take(incarnation, list(self.lines), taken))
        if answer == calls.LOST:
            self.lose(incarnation)
            return None
        moved = self._moved_on()
        with self.changed:
            for held in taken:
                held.given = True
            read_look(self.lines, answer)
            self._want(incarnation, left, rules, moved)
            buried, self._buried = self._buried, []
            self._start()
            self.changed.notify_all()
        return fetched + buried

    def _want(self, incarnation: str, left: Credit, rules: Rules, moved: set[str]) -> None:
        now = time.monotonic()
        while self._finished and self._finished[0] < now - 1:
            self._finished.popleft()
        wants = Wants(incarnation, left, rules, now, *self._buffer.amounts(), len(self._finished))
        self._wants = wants
        for line in self.lines.values():
            if (b := line.blocked) and (wants.fits(line.rank, b) or now > b.until or line.name in moved):
                line.blocked = None

    def _moved_on(self) -> set[str]:
        """Lists whose first message, which did not fit here, was taken by another worker."""
        blocked = {line.name: line.blocked for line in self.lines.values() if line.blocked}
        asked = {name: b for name, b in blocked.items() if b.member and b.mid not in self._held}
        return {name for name, b in asked.items() if self.redis.zscore(keys.waiting(name), b.member) is None}

    def next_poll(self, line: Line) -> tuple[str, int]:
        """Wait until a list is to be polled: for which incarnation, and how many messages. 0: the worker ends."""
        with self.changed:
            while not self.closed:
                now, pause = time.monotonic(), inf
                wants = self._wants
                if wants is not None and self.serves(now) and line.queue not in self.passed:
                    lines = [one for one in self.lines.values() if one.queue not in self.passed]
                    count, pause = ask(line, lines, wants, now, time.time() * 1000)
                    if count:
                        line.polling = inf
                        return wants.incarnation, count
                self.changed.wait(None if pause == inf else pause)
            return "", 0

    # ---- received -------------------------------------------------------------------------------------------------

    def known(self, received: Sequence[Held]) -> list[tuple[Held, bool]]:
        """What of it is new, and what is a copy of what the worker has: that keeps its place, and gets the receipt."""
        found = []
        with self.changed:
            for one in received:
                has = self._held.get(one.mid)
                if has is None or has.leaving or has.lost:  # what was given back, or was another incarnation's
                    self._held[one.mid] = one
                    found.append((one, False))
                else:
                    has.receipt, has.until = one.receipt, one.until
                    found.append((has, True))
        return found

    def forget(self, received: Sequence[tuple[Held, bool]]) -> None:
        """They were not entered in flight."""
        with self.changed:
            for one, known in received:
                if not known:
                    self._drop(one)

    def admit(self, received: Sequence[tuple[Held, bool]], returns: Sequence[int]) -> None:
        """They are in flight; `returns`: redeliveries of each whose worker died."""
        with self.changed:
            wants = self._wants
            for (one, known), count in zip(received, returns, strict=True):
                if known:
                    continue
                if one.sent is None:
                    self._buried.append(Fetched("", one.queue, one.rank, one.raw, buried=one.reason))
                    self.leave(one, errand.ack(one, one.reason))
                elif wants is None or wants.incarnation != one.incarnation:
                    self.give_back([one])
                else:
                    self._buffer.place(one, int(count), wants.rules)
            if wants is not None:
                wants.seqs, wants.tokens = self._buffer.amounts()
            pokes = list(self.pokes)
            if not pokes:
                self.changed.notify_all()
        for poke in pokes:  # it fetches now, and that wakes the other threads: they would only be in its way
            poke()

    # ---- put down -------------------------------------------------------------------------------------------------

    def put_down(self, what: Sequence[Ack | Back], timeout: float) -> list[PutDown | Exception]:
        """As `producers.broker.base.Consumer.put_down`. What is acknowledged is deleted soon; it waits for the rest."""
        with self.changed:
            said = [self._put_down(one) for one in what]
            backs = [one for one in said if isinstance(one, Errand)]
            if not self.changed.wait_for(lambda: all(one.answer for one in backs), timeout):
                raise ConnectionError(f"SQS or the store did not take {len(backs)} messages back within {timeout:g} s")
            return [one if isinstance(one, PutDown) else one.answer or PutDown.GONE for one in said]

    def _put_down(self, one: Ack | Back) -> Errand | PutDown:
        held = self._given.get(one.uuid)
        if held is None or held.incarnation != one.incarnation:
            return PutDown.GONE
        if held.leaving:
            found = next((e for e in self.courier.errands if e.held is held), None)
            return found if found is not None and isinstance(one, Back) else PutDown.GONE
        if isinstance(one, Ack):
            self._finished.append(time.monotonic())
            self.leave(held, errand.ack(held, one.reason, settled=bool(one.settled)), max(1, one.used))
            return PutDown.DONE
        if one.to:
            to = next(name for name, rank in places(one.to) if rank == held.rank or is_celery(one.to))
            return self.leave(held, errand.move(held, to))
        return self.leave(held, self._way_back(held, one.delay))

    def _way_back(self, held: Held, delay: float = 0.0) -> Steps:
        queue = self.queues.known(held.list)
        worn = queue is not None and time.time() + delay > held.sent_at + queue.retention - RENEW_BEFORE_S
        return errand.back(held, delay, fifo=self.address.fifo, worn=worn)

    def leave(self, held: Held, steps: Steps, used: int | None = None) -> Errand:
        """Under the lock. `used`: it is done with; what waits for it may be chosen, else that goes back, too."""
        held.leaving = True
        one = Errand(steps, held=held)
        self.courier.add(one)
        if held.uuid:
            self._forget_returns(held.id)
        self.give_back(self._buffer.drop(held, used))
        return one

    def survived(self, task_ids: Sequence[str]) -> None:
        """As `producers.broker.base.Consumer.survived`, of what this process has received."""
        with self.changed:
            for task_id in task_ids:
                self._forget_returns(task_id)

    def _forget_returns(self, task_id: str) -> None:
        """Messages whose workers died come one at a time: the next may."""
        if self._buffer.server.reaped.pop(task_id, None):
            for line in self.lines.values():
                line.blocked = None if line.blocked and line.blocked.passed else line.blocked

    def give_back(self, some: Sequence[Held]) -> None:
        for one in some:
            if not one.leaving:
                self.leave(one, self._way_back(one))

    def ended(self, one: Errand) -> None:
        """Under the lock: an errand has."""
        held = one.held
        if held is None:
            return
        if one.answer is PutDown.UNSETTLED:
            held.leaving, held.stray = False, True
            return
        self._drop(held)
        self._given.pop(held.uuid, None)

    def _drop(self, held: Held) -> None:
        if self._held.get(held.mid) is held:  # else a copy has come since
            del self._held[held.mid]

    def untaken(self, held: Held) -> None:
        """Under the lock: it does not fit, so it goes back; its list is not polled until it does, or another has it."""
        line, now, wants = self.lines[held.list], time.monotonic(), self._wants
        if line.blocked is None:
            blocked = Blocked(held.seqs, held.tokens, held.member, held.mid, now + UNFIT_S)
            if wants is not None and wants.fits(held.rank, blocked):
                blocked.passed, blocked.until = True, now + PASSED_S
            line.blocked = blocked
        self.give_back([held])

    @property
    def held(self) -> list[Held]:
        """Under the lock: all that is not put down."""
        return list(self._held.values())

    def buffered(self) -> list[Held]:
        """Under the lock: what no thread has taken, and what does not wait for another's end."""
        return self._buffer.waiting()

    def serves(self, now: float) -> bool:
        """Whether the worker fetches."""
        return self._wants is not None and now - self._wants.at < FRESH_S

    # ---- the ends of incarnations ---------------------------------------------------------------------------------

    def lose(self, incarnation: str) -> None:
        """Its lease is gone. What it has not given to the worker goes back; the rest is renewed no more."""
        with self.changed:
            some = [one for one in self._held.values() if one.incarnation == incarnation]
            for one in some:
                one.lost = True
            self.give_back([one for one in some if not one.given])
            if self._wants is not None and self._wants.incarnation == incarnation:
                self._wants = None

    def rest(self) -> None:
        """The worker fetches no more: poll no more, and give back what it has not taken. A fetch begins it anew."""
        with self.changed:
            self._wants = None
            self.give_back([one for one in self._held.values() if not one.given])

    def strays(self, incarnation: str, flying: Sequence[Flying], held: Sequence[str]) -> dict[str, str]:
        """What neither the worker nor this has, by UUID; it may be given back then."""
        with self.changed:
            mine = {one.field for one in self._held.values() if not one.stray} | set(held)
            found = [one for one in flying if one.field not in mine and not one.field.startswith("m:")]
            for one in found:
                if one.field not in self._given and one.list in self.lines:
                    line = self.lines[one.list]
                    self._given[one.field] = stray_of(incarnation, one, (line.name, line.queue, line.rank))
        return {one.field: one.id for one in found}

    def weigh(self, raw: Mapping[Any, Any]) -> dict[str, float]:
        found = sane_weights(raw)
        with self.changed:
            self._buffer.server.weights = dict(found)
        return found

    def faults(self) -> list[str]:
        """The reasons for which lists are not polled. A poll that is still waited for is not refused."""
        accepted = time.monotonic() - ACCEPTED_S
        with self.changed:
            return [line.error for line in self.lines.values() if line.error and (line.polling or inf) > accepted]

    def flush(self, timeout: float) -> bool:
        return self._courier is None or self._courier.flush(timeout)

    @property
    def courier(self) -> Courier:
        """Under the lock."""
        if self._courier is None:
            self._courier = Courier(self)
            self._courier.start()
        return self._courier

    def _start(self) -> None:
        if not self._pollers and not self.closed:
            self.courier.add()  # it has chores from now on
            self._pollers = [Poller(self, line) for line in self.lines.values()]
            for poller in self._pollers:
                poller.start()

    def close(self) -> None:
        """The last of its consumers is closed: what goes back within a second does."""
        self.rest()
        self.flush(1.0)
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def _is_polled(queue: str, queues: Sequence[str], home: str, address: Address) -> bool:
    if is_celery(queue):
        return address.celery
    return queue == home or split(queue)[0] != queues[0]
