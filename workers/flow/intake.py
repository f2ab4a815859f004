"""Pulls from the queue exactly what fits, and hands it to Celery's consumer.

    wake -> credit -> FETCH -> hold in the ledger -> (pipe) -> event loop -> kombu's callbacks -> Request -> pool

FETCH runs on a thread and a connection of its own, so that neither a slow broker nor a reconnecting consumer stalls the
other. When a reply is lost, the same UUIDs are asked for again, and the broker repeats itself.

In a store beyond its `maxmemory` no more tasks are started, of worse tiers first: what is left is for those that run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from producers.broker.values import Credit, Fetched, Rules
from producers.connection.log_throttle import warn_throttled
from producers.connection.storage import STARTED, Storage, parse
from producers.contract import keys
from producers.contract.message import BODY_HEADER, BodyGone, redeem
from workers.connect import LOST, connect
from workers.flow.acker import Acker
from workers.flow.celery_side import CelerySide
from workers.flow.deliveries import Deliveries
from workers.state.delivery import Delivery
from workers.state.incarnation import Incarnation
from workers.state.ledger import NO_CREDIT, Size
from workers.state.served import Served

logger = logging.getLogger(__name__)

BATCH = 32
#: Looks at least this often: for what comes due after a delay, and in case a wake-up was missed.
IDLE_S = 1.0
RECONNECT_S = 0.2
#: Delay (s) of a message whose body cannot be read for now.
BODY_S = 5.0
#: Stands in a message whose body travels by claim check.
CLAIM_CHECK = BODY_HEADER.encode()
#: KV tokens that a plain Celery message, which does not say its size, is taken to need.
PLAIN_TOKENS = 512
#: Time (s) for which a look at the store's memory counts.
MEMORY_S = 0.25
#: A tier's rank -> its Celery priority.
_STEPS = dict(keys.TIERS.values())


@dataclass(slots=True)
class Arrival:
    """A fetched message on its way to the event loop."""

    incarnation: Incarnation
    fetched: Fetched
    payload: dict[str, Any]


class Headroom:
    """Tells of which tiers the store has room for more tasks, by looks of MEMORY_S. `url`: the store's."""

    def __init__(self, url: str) -> None:
        self._redis = connect(url)
        self._due = float("-inf")
        self._ranks = len(STARTED)

    def limit(self, credit: Credit) -> Credit:
        """The credit without that of tiers that are not to be started. A store that is away limits nothing: CLAIM waits
        for it."""
        if time.monotonic() >= self._due:
            self._look()
        none = (0,) * (len(STARTED) - self._ranks)
        a, b, c, d = (*credit.seqs[: self._ranks], *none)
        e, f, g, h = (*credit.tokens[: self._ranks], *none)
        return Credit((a, b, c, d), (e, f, g, h))

    def _look(self) -> None:
        try:
            storage = parse(self._redis.execute_command("INFO", "memory", "persistence"))
        except LOST:
            storage = Storage(0)
        self._due = time.monotonic() + (MEMORY_S if storage.limit else IDLE_S)
        self._ranks = sum(storage.ratio < share for share in STARTED)
        if self._ranks < len(STARTED):
            tiers = ", ".join(tier for tier, (rank, _) in keys.TIERS.items() if rank >= self._ranks)
            why = f"{storage.ratio:.0%} of maxmemory is in use, which is too much for {tiers}"
            warn_throttled(logger, "The store is full, and no more tasks of some tiers are started: %s", why)


class Intake(threading.Thread):
    def __init__(self, served: Served, deliveries: Deliveries, acker: Acker, celery: CelerySide) -> None:
        super().__init__(name="penstock-intake", daemon=True)
        self.queues = served.pool.queues
        self._served = served
        self._plain = frozenset([keys.model_queue(served.model)])
        self._deliveries = deliveries
        self._acker = acker
        self._celery = celery
        capacity = deliveries.ledger.capacity
        self._rules = Rules(
            capacity, min(PLAIN_TOKENS, capacity[1]), served.settings.ageing, served.settings.max_redeliveries
        )
        self._broker = served.connect_broker()
        self._bodies = served.bodies()
        self._headroom = Headroom(served.settings.store)
        self._waker = self._broker.waker(self.poke)
        self._wake = threading.Event()
        self._arrivals: deque[Arrival] = deque()
        self._attached = False
        self._paused = False
        self._unanswered = False
        self.loop_asked: float | None = None
        """Since when the event loop is asked for a sign of life (monotonic); None once it gave one."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._pipe[1], False)
        deliveries.asked = _fresh(BATCH)
        deliveries.ledger.on_room = self.poke

    def poke(self) -> None:
        """Something may fit, or may have come: look again."""
        self._wake.set()

    def stop(self) -> None:
        """Fetch no more. What has arrived and was not yet handed over goes back."""
        self._deliveries.draining = True
        self.poke()
        self._waker.stop()
        self.detach()

    # ---- the event loop's side ------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable while messages wait to be handed over."""
        return self._pipe[0]

    def nudge(self) -> None:
        """Wake the event loop. Any thread."""
        with contextlib.suppress(BlockingIOError):  # full: the loop has been told often enough
            os.write(self._pipe[1], b"!")

    def attach(self) -> None:
        """The consumer is there: begin to fetch."""
        self._attached = True
        self.poke()

    @property
    def attached(self) -> bool:
        return self._attached and not self._deliveries.draining

    def pause(self, paused: bool) -> None:
        """The event loop takes nothing: fetch nothing for it, and give back what waits for it."""
        self._paused = paused
        if paused:
            self._give_back()
        self.poke()

    def detach(self) -> None:
        """The consumer is gone (reconnecting, or shutting down)."""
        self._attached = False
        self._give_back()

    def _give_back(self) -> None:
        while (arrival := self._next()) is not None:
            self._celery.forget(arrival.fetched.uuid)

    def hand_over(self, deliver: Callable[[dict[str, Any], str], None]) -> None:
        """Give everything that arrived to kombu's callbacks; runs in the event loop."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self.loop_asked = None
        while (arrival := self._next()) is not None:
            if arrival.incarnation.over:
                continue
            try:
                deliver(arrival.payload, arrival.fetched.queue)
            except Exception as exc:
                logger.exception("A message could not be decoded: dead-lettered")
                self._celery.refuse(arrival.fetched.uuid, f"cannot be decoded as Celery's: {type(exc).__name__}: {exc}")

    def _next(self) -> Arrival | None:
        try:
            return self._arrivals.popleft()
        except IndexError:
            return None

    # ---- the fetching side ----------------------------------------------------------------------------------

    def run(self) -> None:
        self._waker.start()
        books = self._deliveries
        life = books.life
        while not books.draining:
            self._wake.clear()
            self._broker.passed = frozenset() if self._served.takes_plain else self._plain
            if life is not books.life:
                life, books.asked = books.life, _fresh(BATCH)
                books.survived.clear()  # others may have them, and have died since
            room = BATCH if books.most is None else max(0, books.most - len(books))
            if self._paused or not self._attached or not life.begun or not (room or self._unanswered):
                self._wake.wait(IDLE_S)
                continue
            try:
                fetched = self._fetch(life, room)
            except LOST as exc:
                warn_throttled(logger, "Cannot fetch from the broker, trying again: %s", exc)
                self._wake.wait(RECONNECT_S)
                continue
            if fetched is None:
                books.life_is_over(life)
            elif fetched:
                given = sum(not one.buried for one in fetched)
                books.asked = books.asked[given:] + _fresh(given)
                for one in fetched:
                    self._take(life, one)
            else:
                self._wake.wait(IDLE_S)

    def _fetch(self, life: Incarnation, room: int) -> list[Fetched] | None:
        """Ask for at most `room` messages. Where an answer was lost, a worker of little room first hears what came."""
        books = self._deliveries
        asked, credit = books.asked[:room], self._headroom.limit(books.ledger.credit())
        if self._unanswered and room < BATCH:
            asked, credit = books.asked, NO_CREDIT
        if survived := list(books.survived):
            self._broker.survived(survived)
            for _ in survived:
                books.survived.popleft()
        self._unanswered = True
        fetched = self._broker.fetch(life.id, asked, credit, self._rules)
        self._unanswered = False
        return fetched

    def _take(self, life: Incarnation, one: Fetched) -> None:
        payload = self._read(life, one)
        if payload is None:
            return
        headers, properties = payload["headers"], payload["properties"]
        delay = 0.0 if one.condemned else _seconds_until(headers.get("eta"))
        if delay > 0:  # waited out in the broker: here it would take room, and nobody else could have it
            self._acker.back(life, one.uuid, delay)
            return
        properties |= {"delivery_tag": one.uuid, "priority": _priority(properties.get("priority"), one.rank)}
        delivery = Delivery(one.uuid, headers["id"], life, one.returned, one.condemned)
        if not self._deliveries.enter(delivery, self._size(headers, one.rank)):
            return
        pass_on = partial(self._pass_on, Arrival(life, one, payload))
        if one.condemned:
            self._celery.condemn(delivery, headers, pass_on)
        else:
            pass_on()

    def _read(self, life: Incarnation, one: Fetched) -> dict[str, Any] | None:
        """The message; None where it cannot be read, and is put down."""
        if one.buried:
            self._bury(life, one, one.buried)
            return None
        try:
            envelope = redeem(one.raw.decode(), self._bodies) if CLAIM_CHECK in one.raw else one.raw
            payload: dict[str, Any] = json.loads(envelope)
            return payload
        except BodyGone as exc:
            self._bury(life, one, str(exc))
        except LOST as exc:
            warn_throttled(logger, "Cannot read the body of a message, trying again: %s", exc)
            self._acker.back(life, one.uuid, BODY_S)
        except (ValueError, RecursionError) as exc:
            self._bury(life, one, f"not JSON in UTF-8: {exc}")
        return None

    def _bury(self, life: Incarnation, one: Fetched, reason: str) -> None:
        """A dead letter, or it becomes one; where at least its id can be read, whoever waits for it hears of it."""
        task_id = _id_of(one.raw)
        if task_id is None:
            self._acker.ack(life, one.uuid, reason)
        else:
            self._celery.unreadable(Delivery(one.uuid, task_id, life), reason)

    def _pass_on(self, arrival: Arrival) -> None:
        """Queue it for the event loop."""
        self._arrivals.append(arrival)
        self.nudge()
        if not self._attached:
            self.detach()
        elif self._paused:
            self._give_back()

    def _size(self, headers: dict[str, Any], rank: int) -> Size:
        """The delivery's size, reckoned as FETCH does."""
        if headers["task"] != keys.TASK_NAME:
            return Size(rank, 0, 0)
        said = headers.get("penstock")
        said = said if isinstance(said, dict) else {}
        seqs, tokens = self._rules.capacity
        return Size(rank, _bounded(said.get("n"), 1, seqs), _bounded(said.get("tokens"), PLAIN_TOKENS, tokens))


def _priority(said: Any, rank: int) -> int:
    """The message's own, unless it came in another tier's list: plain Celery's may have one for all priorities."""
    own = isinstance(said, int) and keys.TIERS[keys.tier_of(said)][0] == rank
    return int(said) if own else _STEPS[rank]


def _bounded(value: Any, default: int, cap: int) -> int:
    """A size from a header: sane, or the default."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        value = default
    return int(min(value, cap))


def _seconds_until(eta: Any) -> float:
    """Seconds until a header's time; 0 for what is no time, which Celery refuses."""
    try:
        due = datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return 0.0
    if due.tzinfo is None:
        due = due.replace(tzinfo=UTC)
    return (due - datetime.now(UTC)).total_seconds()


def _id_of(raw: bytes) -> str | None:
    """The task's id, in a message that can hardly be read."""
    try:
        task_id = json.loads(raw.decode(errors="replace"))["headers"]["id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return task_id if isinstance(task_id, str) and task_id else None


def _fresh(count: int) -> list[str]:
    return [secrets.token_hex(16) for _ in range(count)]
