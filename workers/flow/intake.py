"""Pulls from the queue exactly what fits, and hands it to Celery's consumer.

    wake -> credit -> FETCH -> hold in the ledger -> (pipe) -> event loop -> kombu's callbacks -> Request -> pool

FETCH runs on a thread and a connection of its own, so that neither a slow broker nor a reconnecting consumer stalls the
other. When a reply is lost, the same UUIDs are asked for again, and the broker repeats itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from producers.broker import redis as broker
from producers.connection.log_throttle import complain
from producers.connection.script import run
from producers.contract import keys
from workers.flow.acker import Courier
from workers.flow.ledger import Ledger, Size
from workers.flow.waker import Waker
from workers.leases.incarnation import Incarnation
from workers.runtime.connect import LOST, connect
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

BATCH = 32
#: Looks at least this often: for what comes due after a delay, and in case a wake-up was missed.
IDLE_S = 1.0
RECONNECT_S = 0.2
#: KV tokens that a plain Celery message, which does not say its size, is taken to need.
PLAIN_TOKENS = 512


@dataclass(slots=True)
class Arrival:
    """A fetched message on its way to the event loop."""

    incarnation: Incarnation
    fetched: broker.Fetched
    payload: dict[str, Any]
    queue: str


class Holder(Protocol):
    """Who owns the deliveries; see `workers.runtime.assembly`."""

    incarnation: Incarnation

    def arrived(self, arrival: Arrival, size: Size) -> bool:
        """Take it into the books; False where it is dealt with otherwise."""

    def refused(self, uuid: str, reason: str) -> None:
        """It cannot be decoded: dead-letter it."""

    def unreadable(self, incarnation: Incarnation, uuid: str, task_id: str, reason: str) -> None:
        """No more than its id can be read: dead-letter it."""

    def celery_forgets(self, uuid: str) -> None:
        """It was not handed over: give it back."""

    def loop_answers(self) -> None:
        """The event loop runs."""

    def life_is_over(self, incarnation: Incarnation) -> None:
        """The lease is gone."""


class Intake(threading.Thread):
    def __init__(
        self, settings: WorkerSettings, queues: Sequence[str], ledger: Ledger, courier: Courier, holder: Holder
    ) -> None:
        super().__init__(name="penstock-intake", daemon=True)
        self.queues = list(queues)
        self._settings = settings
        self._ledger = ledger
        self._courier = courier
        self._holder = holder
        self._redis = connect(settings.broker)
        self._waker = Waker(settings.broker, queues, self.poke)
        self._by_list = {name: (queue, rank) for queue in queues for name, rank in broker.lists([queue])}
        self._ranks = dict(broker.lists(queues))
        self._wake = threading.Event()
        self._arrivals: deque[Arrival] = deque()
        self._attached = False
        self._stopped = False
        self._paused = False
        #: The deliveries that the next FETCH names; it may have come, and its answer been lost.
        self.asked = _fresh(BATCH)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)
        os.set_blocking(self._pipe[1], False)
        ledger.on_room = self.poke

    def poke(self) -> None:
        """Something may fit, or may have come: look again."""
        self._wake.set()

    def stop(self) -> None:
        """Fetch no more. What has arrived and was not yet handed over goes back."""
        self._stopped = True
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
        return self._attached and not self._stopped

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
            self._holder.celery_forgets(arrival.fetched.uuid)

    def hand_over(self, deliver: Callable[[dict[str, Any], str], None]) -> None:
        """Give everything that arrived to kombu's callbacks; runs in the event loop."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        self._holder.loop_answers()
        while (arrival := self._next()) is not None:
            if arrival.incarnation.over:
                continue
            try:
                deliver(arrival.payload, arrival.queue)
            except Exception as exc:
                logger.exception("A message could not be decoded: dead-lettered")
                self._holder.refused(
                    arrival.fetched.uuid, f"cannot be decoded as Celery's: {type(exc).__name__}: {exc}"
                )

    def _next(self) -> Arrival | None:
        try:
            return self._arrivals.popleft()
        except IndexError:
            return None

    # ---- the fetching side ----------------------------------------------------------------------------------

    def run(self) -> None:
        self._waker.start()
        life = self._holder.incarnation
        while not self._stopped:
            self._wake.clear()
            if life is not self._holder.incarnation:
                life, self.asked = self._holder.incarnation, _fresh(BATCH)
            if self._paused or not self._attached or not life.begun:
                self._wake.wait(IDLE_S)
                continue
            try:
                fetched = broker.read_fetch(run(self._redis, self._call(life, self.asked)))
            except LOST as exc:
                complain(logger, "Cannot fetch from the broker, trying again: %s", exc)
                self._wake.wait(RECONNECT_S)
                continue
            if fetched is None:
                self._holder.life_is_over(life)
            elif fetched:
                given = sum(not one.buried for one in fetched)
                self.asked = self.asked[given:] + _fresh(given)
                for one in fetched:
                    self._take(life, one)
            else:
                self._wake.wait(IDLE_S)

    def _call(self, life: Incarnation, names: Sequence[str]) -> Any:
        return broker.fetch(
            life.id,
            self.queues,
            names,
            self._ledger.credit(),
            capacity=self._ledger.capacity,
            plain_tokens=min(PLAIN_TOKENS, self._ledger.capacity[1]),
            ageing_ms=int(self._settings.ageing * 1000),
            max_redeliveries=self._settings.max_redeliveries,
        )

    def _take(self, life: Incarnation, one: broker.Fetched) -> None:
        if one.buried:
            self._bury(life, one, one.buried)
            return
        queue, rank = self._by_list[one.list_name]
        try:
            payload = json.loads(one.raw)
        except (ValueError, RecursionError) as exc:
            self._bury(life, one, f"not JSON in UTF-8: {exc}")
            return
        delay = 0.0 if one.condemned else _seconds_until(payload["headers"].get("eta"))
        if delay > 0:  # waited out in the broker: here it would take room, and nobody else could have it
            self._courier.back(life, one.uuid, delay)
            return
        payload["properties"]["delivery_tag"] = one.uuid
        arrival = Arrival(life, one, payload, queue)
        if self._holder.arrived(arrival, self._size(payload["headers"], rank)):
            self.pass_on(arrival)

    def _bury(self, life: Incarnation, one: broker.Fetched, reason: str) -> None:
        """A dead letter, or it becomes one; where at least its id can be read, whoever waits for it hears of it."""
        task_id = _id_of(one.raw)
        if task_id is None:
            self._courier.ack(life, one.uuid, reason)
        else:
            self._holder.unreadable(life, one.uuid, task_id, reason)

    def pass_on(self, arrival: Arrival) -> None:
        """Queue it for the event loop."""
        self._arrivals.append(arrival)
        self.nudge()
        if not self._attached:
            self.detach()
        elif self._paused:
            self._give_back()

    def _size(self, headers: dict[str, Any], rank: int) -> Size:
        """As FETCH reckons it."""
        if headers["task"] != keys.TASK_NAME:
            return Size(rank, 0, 0)
        said = headers.get("penstock")
        said = said if isinstance(said, dict) else {}
        seqs, tokens = self._ledger.capacity
        return Size(rank, _bounded(said.get("n"), 1, seqs), _bounded(said.get("tokens"), PLAIN_TOKENS, tokens))


def _bounded(value: Any, default: int, cap: int) -> int:
    """A size from a header: sane, or the default."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        value = default
    return int(min(value, cap))


def _seconds_until(eta: Any) -> float:
    """Of a header; what is no time is left to Celery, which refuses it."""
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
    return [uuid.uuid4().hex for _ in range(count)]
