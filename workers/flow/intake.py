"""Pulls from the queue exactly what fits. Tasks in which Celery has no part go to the claimer, others to its consumer.

    wake -> credit -> FETCH -> hold in the ledger -> claimer
                                                  -> (pipe) -> event loop -> kombu's callbacks -> Request -> pool

FETCH runs on a thread and a connection of its own, so that neither a slow broker nor a reconnecting consumer stalls the
other. When a reply is lost, FETCH names the same UUIDs again, and the broker repeats its reply.

If the store nears its `maxmemory`, no more tasks are started, of worse tiers first: running tasks need the memory.
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

from producers.broker.values import LEFT_MS, Credit, Fetched, Rules
from producers.connection.log_throttle import warn_throttled
from producers.connection.storage import STARTED, Storage, parse
from producers.contract import keys
from producers.contract.message import BODY_HEADER, BodyGone, redeem, tokens_of_texts
from workers.connect import LOST, connect
from workers.flow.celery_side import CelerySide
from workers.flow.deliveries import NO_CREDIT, Acker, Deliveries, Size
from workers.state.delivery import Delivery, Incarnation, Native
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
#: KV tokens that a plain Celery message, which does not say its size, is taken to need if it generates.
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
    """Knows for which tiers the store has room for more tasks. It reads the store's memory once in MEMORY_S. `url`: the
    store's."""

    def __init__(self, url: str) -> None:
        self._redis = connect(url)
        self._due = float("-inf")
        self._ranks = len(STARTED)

    def limit(self, credit: Credit) -> Credit:
        """Returns the credit without that of tiers that may not start. An unreachable store limits nothing: CLAIM waits
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
        seqs, tokens = deliveries.ledger.capacity
        if served.engine.kind != "generate":
            tokens = max(1, tokens // 2)  # of one message, so that the next one comes before it is computed
        settings = served.settings
        self._rules = Rules(
            (seqs, tokens), min(PLAIN_TOKENS, tokens), settings.ageing, settings.max_redeliveries, LEFT_MS
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
        self.has_part: Callable[[dict[str, Any]], bool | None] = lambda headers: None
        """Whether this worker holds a part of what a message's task needs; None: the message does not say."""
        #: Tasks taken of which it held a part, or none of what they named; fetches that left some to other workers.
        self._placed = self._unplaced = self._left = 0
        self.loop_nudged_at: float | None = None
        """When the watchdog nudged the event loop (monotonic); None once the loop has answered."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._pipe[1], False)
        deliveries.fetch_uuids = _fresh(BATCH)
        deliveries.ledger.on_room = self.poke

    def describe(self) -> dict[str, int]:
        """Counts of tasks by placement, for the lease; {} where tasks are not placed."""
        return {"placed": self._placed, "unplaced": self._unplaced, "left": self._left} if self._served.places else {}

    def poke(self) -> None:
        """Looks again: a message may fit, or may have come."""
        self._wake.set()

    def stop(self) -> None:
        """Stops fetching. Messages that were not handed over yet go back."""
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
        with contextlib.suppress(BlockingIOError):  # full: enough nudges wait for the loop
            os.write(self._pipe[1], b"!")

    def attach(self) -> None:
        """The consumer is there: begin to fetch."""
        self._attached = True
        self.poke()

    @property
    def attached(self) -> bool:
        return self._attached and not self._deliveries.draining

    def pause(self, paused: bool) -> None:
        """Stops or resumes fetching while the event loop is stuck, and gives back what waits for it."""
        self._paused = paused
        if paused:
            self._give_back()
        self.poke()

    def detach(self) -> None:
        """Stops fetching while the consumer is gone: it reconnects, or shuts down."""
        self._attached = False
        self._give_back()

    def _give_back(self) -> None:
        while (arrival := self._next()) is not None:
            self._celery.forget(arrival.fetched.uuid)

    def hand_over(self, deliver: Callable[[dict[str, Any], str], None]) -> None:
        """Give everything that arrived to kombu's callbacks, and events to monitors; runs in the event loop."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self.loop_nudged_at = None
        self._celery.monitors.send()
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
                life, books.fetch_uuids = books.life, _fresh(BATCH)
                books.survived.clear()  # others may have them, and have died since
            room = BATCH if books.limit is None else max(0, books.limit - len(books))
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
                used = sum(not message.buried for message in fetched)
                books.fetch_uuids = books.fetch_uuids[used:] + _fresh(used)
                for message in fetched:
                    self._take(life, message)
            else:
                # No wake-up comes for what was left to another worker, which may not take it.
                again = self._broker.look_again
                self._wake.wait(IDLE_S if again is None else min(IDLE_S, again))

    def _fetch(self, life: Incarnation, room: int) -> list[Fetched] | None:
        """Fetches at most `room` messages. After a lost reply, a worker with little room first repeats the request
        without credit: that returns only what the lost reply held."""
        books = self._deliveries
        uuids, credit = books.fetch_uuids[:room], self._headroom.limit(books.ledger.credit())
        if self._unanswered and room < BATCH:
            uuids, credit = books.fetch_uuids, NO_CREDIT
        if survived := list(books.survived):
            self._broker.survived(survived)
            for _ in survived:
                books.survived.popleft()
        self._unanswered = True
        fetched = self._broker.fetch(life.id, uuids, credit, self._rules)
        self._unanswered = False
        self._left += self._broker.look_again is not None
        return fetched

    def _take(self, life: Incarnation, message: Fetched) -> None:
        payload = self._read(life, message)
        if payload is None:
            return
        headers, properties = payload["headers"], payload["properties"]
        delay = 0.0 if message.condemned else _seconds_until(headers.get("eta"))
        if delay > 0:  # waited out in the broker: here it would take room, and nobody else could have it
            self._acker.back(life, message.uuid, delay)
            return
        properties |= {"delivery_tag": message.uuid, "priority": _priority(properties.get("priority"), message.rank)}
        delivery = Delivery(message.uuid, headers["id"], life, message.returned, message.condemned)
        if not self._deliveries.enter(delivery, self._size(payload, message.rank)):
            return
        if (held := self.has_part(headers)) is not None:
            self._placed += held
            self._unplaced += not held
        pass_on = partial(self._pass_on, Arrival(life, message, payload))
        if self._attached and not message.condemned and self._celery.is_apart(payload):
            self._celery.run_native(delivery, Native(payload, properties["priority"]))
        elif message.condemned:
            self._celery.condemn(delivery, headers, pass_on)
        else:
            pass_on()

    def _read(self, life: Incarnation, message: Fetched) -> dict[str, Any] | None:
        """Returns the message's content; None if it cannot be read and was put down."""
        if message.buried:
            self._bury(life, message, message.buried)
            return None
        try:
            envelope = redeem(message.raw.decode(), self._bodies) if CLAIM_CHECK in message.raw else message.raw
            payload: dict[str, Any] = json.loads(envelope)
            return payload
        except BodyGone as exc:
            self._bury(life, message, str(exc))
        except LOST as exc:
            warn_throttled(logger, "Cannot read the body of a message, trying again: %s", exc)
            self._acker.back(life, message.uuid, BODY_S)
        except (ValueError, RecursionError) as exc:
            self._bury(life, message, f"not JSON in UTF-8: {exc}")
        return None

    def _bury(self, life: Incarnation, message: Fetched, reason: str) -> None:
        """Makes the message a dead letter. If its id can be read, whoever waits for its result gets an error."""
        task_id = _id_of(message.raw)
        if task_id is None:
            self._acker.ack(life, message.uuid, reason)
        else:
            self._celery.unreadable(Delivery(message.uuid, task_id, life), reason)

    def _pass_on(self, arrival: Arrival) -> None:
        """Queue it for the event loop."""
        self._arrivals.append(arrival)
        self.nudge()
        if not self._attached:
            self.detach()
        elif self._paused:
            self._give_back()

    def _size(self, payload: dict[str, Any], rank: int) -> Size:
        """Computes a delivery's size as FETCH does."""
        headers = payload["headers"]
        if headers["task"] not in keys.NAMED_KINDS:
            return Size(rank, 0, 0)
        declared = headers.get("penstock")
        declared = declared if isinstance(declared, dict) else {}
        seqs, tokens = self._rules.capacity
        plain = tokens_of_texts(headers["task"], payload["body"]) or PLAIN_TOKENS
        return Size(rank, _bounded(declared.get("n"), 1, seqs), _bounded(declared.get("tokens"), plain, tokens))


def _priority(priority: Any, rank: int) -> int:
    """Returns the message's priority, or that of the list it came in if the two differ: plain Celery senders may use
    one list for all priorities."""
    same_tier = isinstance(priority, int) and keys.TIERS[keys.tier_of(priority)][0] == rank
    return int(priority) if same_tier else _STEPS[rank]


def _bounded(value: Any, default: int, cap: int) -> int:
    """A size from a header: sane, or the default."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        value = default
    return int(min(value, cap))


def _seconds_until(eta: Any) -> float:
    """Returns the seconds until a header's time; 0 for an invalid time, which Celery refuses."""
    try:
        due = datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return 0.0
    if due.tzinfo is None:
        due = due.replace(tzinfo=UTC)
    return (due - datetime.now(UTC)).total_seconds()


def _id_of(raw: bytes) -> str | None:
    """Reads the task's id from a message that cannot be decoded as a whole."""
    try:
        task_id = json.loads(raw.decode(errors="replace"))["headers"]["id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return task_id if isinstance(task_id, str) and task_id else None


def _fresh(count: int) -> list[str]:
    return [secrets.token_hex(16) for _ in range(count)]
