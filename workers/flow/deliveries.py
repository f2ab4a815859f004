"""The books: every delivery in this worker's hands, from FETCH until ACK or BACK, and the room for more.

    enter -> fetched -> run -> running -> stop, end -> done (ACK) or give_back (BACK)

A delivery is put down exactly once: settled and acknowledged, given back, or dropped because its incarnation is over
(then REAP returns it). `workers.state.delivery` has its stages, which change here alone.

The ledger counts, by tier, what was fetched and has not been put down. A tier's credit is the free room plus the room
that lower tiers hold, because the engine preempts those. So a full batch of low-tier work never hides a waiting
priority task, and nothing is fetched that would only wait here, invisible to other workers and to the autoscaler.

**Acker.** Sends ACK and BACK to the broker, on a thread and a connection of its own, until the broker has taken them.

Both name the delivery's UUID, so a repeated one does nothing. Requests of an incarnation that is over are dropped,
because REAP returned its deliveries.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from producers.broker.base import Consumer
from producers.broker.values import Ack, Back, Credit, PutDown
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run_many
from producers.contract import keys
from producers.store.protocol import release
from workers.connect import LOST, connect
from workers.state.delivery import Delivery, Incarnation, Stage, forget
from workers.state.served import Served

logger = logging.getLogger(__name__)

BATCH = 256
RETRY_S = 0.2


@dataclass(slots=True, eq=False)
class _Request:
    life: Incarnation
    answer: Ack | Back


class Acker(threading.Thread):
    """`store`: the URL of the store, where a task that turns out not to be settled is released."""

    def __init__(self, broker: Consumer, store: str) -> None:
        super().__init__(name="penstock-acker", daemon=True)
        self.broker = broker
        self._store = connect(store)
        self._requests: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def ack(self, life: Incarnation, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> None:
        """Acknowledges a delivery that used `used` KV tokens; with a reason, its message goes to the dead-letter list.

        `settled`: the id of its task, if that is settled. If the store has lost that, the message goes back.
        """
        self._add(_Request(life, Ack(life.id, uuid, reason, used, settled)))

    def back(self, life: Incarnation, uuid: str, delay: float = 0.0, to: str = "") -> None:
        """The message goes back to the front of its list, after `delay` seconds; or of its tier's in the queue `to`."""
        self._add(_Request(life, Back(life.id, uuid, delay, to)))

    @property
    def pending(self) -> list[str]:
        """UUIDs of deliveries whose ACK or BACK the broker has not taken yet."""
        with self._changed:
            return [request.answer.uuid for request in self._requests]

    def flush(self, seconds: float) -> bool:
        """Waits until the broker has taken all requests. False if it did not answer in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._requests, seconds)

    def stop(self, seconds: float) -> bool:
        """`flush`, and end."""
        flushed = self.flush(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return flushed

    def _add(self, request: _Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def run(self) -> None:
        with suppress(*LOST):  # so that handing back, which has little time, does not begin with that
            self.broker.prepare()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._stopping)
                if self._stopping and not self._requests:
                    return
                batch = [self._requests[i] for i in range(min(BATCH, len(self._requests)))]
            done = self._take(batch)
            with self._changed:
                for _ in batch:
                    self._requests.popleft()
                self._requests.extendleft(reversed([request for request in batch if id(request) not in done]))
                self._changed.notify_all()
                if len(done) < len(batch):
                    if self._stopping:
                        return
                    self._changed.wait(RETRY_S)

    def _take(self, batch: list[_Request]) -> set[int]:
        """Sends the requests. Returns the ids of those that need no second try."""
        live = [request for request in batch if not request.life.over]
        done = {id(request) for request in batch if request.life.over}
        try:
            answers = self.broker.put_down([request.answer for request in live])
            unsettled = [r.answer for r, answer in zip(live, answers, strict=True) if answer is PutDown.UNSETTLED]
            self._return([ack for ack in unsettled if isinstance(ack, Ack)])
        except LOST as exc:
            warn_throttled(logger, "The broker did not take %d answers, trying again: %s", len(live), exc)
            return done
        for request, answer in zip(live, answers, strict=True):
            if isinstance(answer, Exception):
                warn_throttled(logger, "The broker refused an answer, trying again: %s", answer)
            else:
                done.add(id(request))
        return done

    def _return(self, unsettled: Sequence[Ack]) -> None:
        """Sends RELEASE and BACK for tasks of which the store has lost that they are settled."""
        if unsettled:
            run_many(self._store, [release(ack.settled, ack.uuid) for ack in unsettled])
            self.broker.put_down([Back(ack.incarnation, ack.uuid) for ack in unsettled])
            logger.warning("A failover lost the end of %d tasks: they go back to the queue", len(unsettled))


#: The most waiting deliveries that the lease lists.
WAITS: Final = 64
NO_CREDIT = Credit((0, 0, 0, 0), (0, 0, 0, 0))


class Deliveries:
    """Thread-safe. `by_uuid` has all deliveries in this worker's hands, `running` some; both are keyed by UUID, and
    others only read them."""

    def __init__(self, served: Served, acker: Acker) -> None:
        self._name = served.settings.name
        self._abort: Callable[[str], object] = served.engine.abort
        self._acker = acker
        self.ledger = Ledger((served.engine.max_num_seqs, served.engine.kv_tokens_total))
        self.life = Incarnation(self._name)
        """The present one; it is another as soon as its lease is gone."""
        self.by_uuid: dict[str, Delivery] = {}
        self.running: dict[str, Delivery] = {}
        """Those of stage RUNNING, which the engine computes."""
        self.survived: deque[str] = deque()
        """Ids of tasks whose redeliveries the broker is to forget before the next FETCH."""
        self.fetch_uuids: list[str] = []
        """UUIDs that the next FETCH names. An earlier FETCH may have used them, if its reply was lost."""
        self.draining = False
        """Whether the worker drains: it fetches no more and begins no new incarnation."""
        self.limit: int | None = None
        """The number of deliveries that the worker's breaker lets it hold; None: as many as fit. It drops none."""
        self.changed = threading.Condition()
        """Notified when something was put down."""
        self.on_put_down: Callable[[], None] = lambda: None
        """Called, on any thread, when something was put down."""
        self.on_lapse: Callable[[Incarnation, list[Delivery]], None] = lambda life, dropped: None
        """Called, on any thread and under `changed`, with what a lapsed life held."""

    def __len__(self) -> int:
        return len(self.by_uuid)

    @property
    def serves(self) -> bool:
        """Whether the worker may fetch. If no worker of its pool may, another pool may continue tasks that they
        began."""
        return not self.draining and self.limit != 0

    def all_uuids(self) -> set[str]:
        """Returns the UUIDs of all deliveries that are held, or on their way in or out."""
        return {*self.fetch_uuids, *self.by_uuid, *self._acker.pending}

    def waits(self) -> dict[str, str]:
        """Returns UUID -> reason for at most WAITS deliveries that wait in the engine (`Delivery.waits`)."""
        waiting = ((delivery.uuid, delivery.waits) for delivery in list(self.running.values()))
        return dict(islice(((uuid, why) for uuid, why in waiting if why is not None), WAITS))

    def enter(self, delivery: Delivery, size: Size) -> bool:
        """Enters a fetched message. False if its life is over."""
        with self.changed:
            if delivery.incarnation.over:
                return False
            self.ledger.hold(delivery.uuid, size)
            self.by_uuid[delivery.uuid] = delivery
            return True

    def got_on(self, delivery: Delivery) -> None:
        """Notes that a token is published. Earlier deaths count against its message no more, as in its record.

        Else a long task that outlived several workers would be a suspect to FETCH, and hold up its tenant."""
        if delivery.returned and not delivery.incarnation.over:
            delivery.returned = False
            self.survived.append(delivery.task_id)
            self.ledger.on_room()

    def on_step(self) -> None:
        """Makes room for what the engine has computed of requests of many texts, so that it gets the next ones before
        it has none left. The engine's thread."""
        for delivery in list(self.running.values()):
            if computed := delivery.course.computed:
                self.ledger.reduce(delivery.uuid, max(0, delivery.prompt_tokens - computed))

    def run(self, delivery: Delivery) -> bool:
        """Moves a delivery to RUNNING: the engine is about to have it. False if it has come further already."""
        return self._move(delivery, Stage.RUNNING)

    def stop(self, delivery: Delivery) -> bool:
        """Moves a delivery that the engine failed to STOPPED. False if it has come so far already."""
        return self._leave(delivery, Stage.STOPPED)

    def end(self, delivery: Delivery) -> None:
        """Moves a delivery to ENDED: the engine makes no more tokens of it, and no other end counts."""
        self._leave(delivery, Stage.ENDED)

    def _leave(self, delivery: Delivery, stage: Stage) -> bool:
        """Moves the stage first: a claimer that still starts the delivery looks at it once the engine has it."""
        moved = self._move(delivery, stage)
        self._abort(delivery.uuid)
        return moved

    def _move(self, delivery: Delivery, stage: Stage) -> bool:
        """Moves a delivery's stage. False if it has come so far already."""
        with self.changed:
            if delivery.stage >= stage:
                return False
            delivery.stage = stage
            if stage is Stage.RUNNING:
                self.running[delivery.uuid] = delivery
            else:
                self.running.pop(delivery.uuid, None)
            return True

    # ---- putting down ---------------------------------------------------------------------------------------------

    def done(self, delivery: Delivery, reason: str = "", *, settled: bool = False) -> None:
        """Acknowledges a message that nobody needs. `settled`: because its task is settled, or has no record."""
        task = delivery.task_id if settled else ""
        ack = partial(self._acker.ack, delivery.incarnation, delivery.uuid, reason, delivery.used, task)
        self._put_down(delivery, ack)

    def give_back(self, delivery: Delivery, delay: float = 0.0, to: str = "") -> None:
        """Gives a message back, for another worker, to its list or to that of the queue `to`. A claimed task must be
        released first (`Finisher.let_go`)."""
        self._put_down(delivery, lambda: self._acker.back(delivery.incarnation, delivery.uuid, delay, to))

    def _put_down(self, delivery: Delivery, acknowledge: Callable[[], None]) -> None:
        """Removes a delivery from the books, once. ACK or BACK is queued first: a drain waits for empty books, and a
        message that is then in flight without either is reaped."""
        if not self._move(delivery, Stage.PUT_DOWN):
            return
        acknowledge()
        with self.changed:
            self.by_uuid.pop(delivery.uuid, None)
            self.changed.notify_all()
        self.ledger.release(delivery.uuid)
        self.on_put_down()
        _forget(delivery)

    def life_is_over(self, life: Incarnation) -> None:
        """Drops everything at once, because our lease is gone and others may hold it by now, and begins a new life.

        Where the store was away, or we were stopped, nobody may have taken it up yet: then it is let go first, so that
        no death is counted (`Lease.let_lapsed_go`).
        """
        with self.changed:
            if life.over or life is not self.life:
                return
            life.over = True
            dropped, running = list(self.by_uuid.values()), list(self.running)
            for delivery in dropped:
                self._move(delivery, Stage.PUT_DOWN)
            self.on_lapse(life, dropped)  # before the books are seen empty: a drain exits then, and would leave these
            self.by_uuid.clear()
            self.ledger.clear()
            self.changed.notify_all()
        logger.warning("The lease of %s lapsed: dropping %d deliveries, beginning anew", life.id, len(dropped))
        for uuid in running:
            self._abort(uuid)
        self.on_put_down()
        for delivery in dropped:
            _forget(delivery)
        if not self.draining:
            self.life = Incarnation(self._name)  # the housekeeper takes its lease on its next round


def _forget(delivery: Delivery) -> None:
    if delivery.job is not None:
        forget(delivery.job.request)


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
        self._sizes: dict[str, Size] = {}
        self._seqs = [0, 0, 0, 0]
        self._tokens = [0, 0, 0, 0]
        self._frozen = False
        self._lock = threading.Lock()

    def hold(self, uuid: str, size: Size) -> None:
        with self._lock:
            self._sizes[uuid] = size
            self._seqs[size.rank] += size.seqs
            self._tokens[size.rank] += size.tokens

    def release(self, uuid: str) -> None:
        with self._lock:
            size = self._sizes.pop(uuid, None)
            if size is None:
                return
            self._seqs[size.rank] -= size.seqs
            self._tokens[size.rank] -= size.tokens
        self.on_room()

    def reduce(self, uuid: str, tokens: int) -> None:
        """Counts at most these tokens for a delivery from now on."""
        with self._lock:
            size = self._sizes.get(uuid)
            if size is None or size.tokens <= tokens:
                return
            self._sizes[uuid] = replace(size, tokens=tokens)
            self._tokens[size.rank] -= size.tokens - tokens
        self.on_room()

    def clear(self) -> None:
        with self._lock:
            self._sizes.clear()
            self._seqs, self._tokens = [0, 0, 0, 0], [0, 0, 0, 0]
        self.on_room()

    def freeze(self, frozen: bool) -> None:
        """Freezes the credit at none, so that a suspect task runs alone."""
        with self._lock:
            self._frozen = frozen
        self.on_room()

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._sizes)

    @property
    def throughput_count(self) -> int:
        """The number of deliveries of the throughput tiers, flex and batch."""
        with self._lock:
            return sum(size.rank >= keys.TIERS["flex"][0] for size in self._sizes.values())

    def credit(self) -> Credit:
        with self._lock:
            if self._frozen:
                return NO_CREDIT
            return Credit(_credit(self.capacity[0], self._seqs), _credit(self.capacity[1], self._tokens))


def _credit(capacity: int, used: list[int]) -> tuple[int, int, int, int]:
    free = capacity - sum(used)
    a, b, c, d = (max(0, free + sum(used[rank + 1 :])) for rank in range(4))
    return a, b, c, d
