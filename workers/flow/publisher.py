"""Publishes tokens as they are made: after a step, one scripted call for all sequences; when behind, for some steps.

The engine's thread only appends to a list. This thread encodes, sends, and acts on the answers; whatever ends a running
task passes through here, so that its last tokens are out before its FINISH.

A store that is nearly full takes no more tokens of worse tiers (`full`). These wait in a batch of their own, with what
comes behind them, and are said again every RETRY_S; other sequences go on meanwhile.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from engine.errors import NOT_FINITE, EngineError
from engine.request import Event
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run, run_many, text
from producers.contract.record import error_json
from producers.store.protocol import Append, append, prompt, read_append
from workers.breaker.breaker import Breaker
from workers.connect import LOST, connect
from workers.flow import probe
from workers.flow.batch import Batch, Conclusion, finish_call, part
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.measure.measured import Measured
from workers.state.delivery import Delivery
from workers.state.served import Served

logger = logging.getLogger(__name__)

RETRY_S = 0.2
EXPIRED = error_json("expired", "The deadline passed before the task was finished.")
#: The message of a worker whose model no longer answers as it did when it was loaded.
BROKEN = (
    f"{NOT_FINITE} also after the prompt that it answered when it was loaded, so that its weights in memory are "
    "damaged. Its tasks go to others; start it again, and test this machine's memory or GPU if it happens again"
)


class Publisher(threading.Thread):
    """`give_up` ends this worker, whose model is broken, with the reason."""

    def __init__(
        self,
        served: Served,
        deliveries: Deliveries,
        finisher: Finisher,
        give_up: Callable[[str], None],
        measured: Measured,
        breaker: Breaker,
    ) -> None:
        super().__init__(name="penstock-publisher", daemon=True)
        self._engine = served.engine
        self._deliveries = deliveries
        self._finisher = finisher
        self._give_up = give_up
        self._measured = measured
        self._breaker = breaker
        self._retry_after = served.settings.retry_after
        self._redis = connect(served.settings.store)
        self._news: deque[Event | Conclusion | Delivery] = deque()
        #: What the store has no room for, of which deliveries (UUIDs), and when it is said again.
        self._held = Batch()
        self._blocked: set[str] = set()
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        #: Ends in NaN, by delivery: those that the question under way is about, and those that came since.
        self._asked: dict[str, Conclusion] = {}
        self._doubted: dict[str, Conclusion] = {}
        self.busy_since: float | None = None
        """When it began with what it is at; None while there is nothing to publish."""

    # ---- called by others -----------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """The engine's thread, for each choice with news; `on_step` follows."""
        self._news.append(event)

    def on_step(self) -> None:
        self._wake.set()

    def count(self, delivery: Delivery, *, soon: bool) -> None:
        """Tell the record how long its prompt is, which came as text: with the engine's next step, or `soon`. Any
        thread, before the engine has it."""
        self._news.append(delivery)
        if soon:
            self._wake.set()

    def conclude(self, delivery: Delivery, status: str, error: str = "null") -> None:
        """End it so, after what it has published. Any thread."""
        self._conclude(Conclusion(delivery, status, error))

    def _conclude(self, end: Conclusion) -> None:
        self._news.append(end)
        self._wake.set()

    def conclude_late(self, delivery: Delivery) -> None:
        """Its deadline passed: `incomplete`, with what it has. Any thread."""
        self.conclude(delivery, "incomplete", EXPIRED)

    def conclude_cancelled(self, delivery: Delivery) -> None:
        """A cancel was accepted: its memory need not wait until the store has taken its end. Any thread."""
        self._engine.abort(delivery.uuid)
        self.conclude(delivery, "cancelled")

    def conclude_revoked(self, delivery: Delivery) -> None:
        self.conclude(delivery, delivery.revoked, EXPIRED if delivery.revoked == "failed" else "null")

    def stop(self, timeout: float) -> bool:
        """True once everything that was said before is published."""
        self._stopping = True
        self._wake.set()
        if self.is_alive():  # a drain may begin before the threads
            self.join(timeout)
        return not self.is_alive()

    # ---- the thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            self._wake.wait(RETRY_S if self._blocked else None)
            self._wake.clear()
            self.busy_since = time.monotonic()
            try:
                self._publish()
            except Exception:
                logger.exception("Publishing failed")
            self.busy_since = None
            if self._stopping and not self._news and not self._blocked:
                return

    def _publish(self) -> None:
        batch = self._next_batch()
        while self._news:
            item = self._news.popleft()
            if isinstance(item, Conclusion):
                self._place(item.delivery, batch).conclude(item)
            elif isinstance(item, Delivery):
                if item.uuid in self._deliveries.running:
                    self._place(item, batch).count(item)
            elif (delivery := self._deliveries.running.get(item.request_id)) is not None:
                self._place(delivery, batch).add(delivery, item)
        for each in (batch, self._held):
            self._doubted |= each.doubted
            each.doubted = {}
        self._prompt(batch.scored, batch.ends)
        self._append(list(batch.appends.values()), batch.ends)
        self._finish(batch.ends)
        self._ask()

    def _next_batch(self) -> Batch:
        """An empty batch; or, if it is time, what the store had no room for."""
        if not self._blocked or time.monotonic() < self._retry_at:
            return Batch()
        batch, self._held, self._blocked = self._held, Batch(), set()
        batch.at = time.monotonic()
        return batch

    def _place(self, delivery: Delivery, batch: Batch) -> Batch:
        """The batch for news of a delivery: behind what the store has no room for, if it has such."""
        if delivery.uuid not in self._blocked:
            return batch
        self._held.at = time.monotonic()
        return self._held

    def _hold(self, delivery: Delivery, ends: dict[str, Conclusion], tokens: Append | None = None) -> None:
        """The store has no room for its tokens: they are said again later, and its end behind them."""
        if not self._blocked:
            self._retry_at = time.monotonic() + RETRY_S
        self._blocked.add(delivery.uuid)
        if tokens is not None:
            self._held.appends[tokens.claim_id, tokens.choice] = tokens
        self._hold_ends(ends)

    def _hold_ends(self, ends: dict[str, Conclusion]) -> None:
        for uuid in self._blocked & ends.keys():
            self._held.ends.setdefault(uuid, ends.pop(uuid))

    def _ask(self) -> None:
        """Ask the model who is to blame for NaN (`probe`). If the engine is closed, a drain hands the tasks back."""
        if self._doubted and not self._asked:
            self._asked, self._doubted = self._doubted, {}
            with suppress(EngineError):
                probe.ask(self._engine, self._answered)

    def _answered(self, error: str | None) -> None:
        """The engine's thread. Where the model is broken, those whose end waits are handed back with all others."""
        if error == NOT_FINITE:
            self._give_up(f"the model is broken, not a request: {BROKEN}")
            return
        asked, self._asked = self._asked, {}
        for end in asked.values():
            self._conclude(end)

    def _prompt(self, deliveries: list[Delivery], ends: dict[str, Conclusion]) -> None:
        """Publish their prompts' log probabilities, before their tokens; try until the store has them."""
        while todo := [delivery for delivery in deliveries if not delivery.put_down]:
            try:
                answers = run_many(self._redis, [prompt(d.task_id, d.uuid, d.prompt) for d in todo])
            except LOST as exc:
                warn_throttled(logger, "Cannot publish, trying again: %s", exc)
                time.sleep(RETRY_S)
                continue
            for delivery, answer in zip(todo, answers, strict=True):
                if isinstance(answer, Exception):
                    logger.error("Cannot publish the prompt of task %s: %s%s", delivery.task_id, answer, delivery.trace)
                    self._not_ok(delivery, "error", ends)
                elif text(answer) == "full":
                    warn_throttled(logger, "Prompts and tokens wait in this worker: %s", "the store is full")
                    if delivery not in self._held.scored:
                        self._held.scored.append(delivery)
                    self._hold(delivery, ends)
                elif text(answer) != "ok":
                    self._not_ok(delivery, text(answer), ends)
            return

    def _not_ok(self, delivery: Delivery, answer: str, ends: dict[str, Conclusion]) -> None:
        """End or let go a task of which the store took nothing: it is cancelled, gone, or not ours."""
        if answer == "cancel":
            self._engine.abort(delivery.uuid)
            ends[delivery.uuid] = Conclusion(delivery, "cancelled")
        else:
            self._lost(delivery, answer)
            ends.pop(delivery.uuid, None)

    def _append(self, batch: list[Append], ends: dict[str, Conclusion]) -> None:
        """APPEND; try until the store has it all, has no room for it, or says that it is not ours to append."""
        held = self._deliveries.held
        while batch:
            mine = [a for a in batch if a.claim_id in held]
            for one in mine:
                if one.claim_id in self._blocked:
                    self._hold(held[one.claim_id], ends, one)
            now, rest = part([a for a in mine if a.claim_id not in self._blocked])
            if not now:
                return
            try:
                answers = read_append(run(self._redis, append(now)))
            except LOST as exc:
                warn_throttled(logger, "Cannot publish, trying again: %s", exc)
                time.sleep(RETRY_S)
                continue
            again: list[Append] = []
            for one, (answer, next_index) in zip(now, answers, strict=True):
                delivery = held.get(one.claim_id)
                if delivery is None:
                    continue
                if answer == "ok":
                    if one.entries:
                        self._progress(delivery)
                    continue
                if answer == "full":
                    warn_throttled(logger, "Prompts and tokens wait in this worker: %s", "the store is full")
                    self._hold(delivery, ends, one)
                elif answer != "resend" or not self._resend(delivery, one.choice, next_index, again, ends):
                    self._not_ok(delivery, answer, ends)
            batch = again + rest

    def _progress(self, delivery: Delivery) -> None:
        self._deliveries.got_on(delivery)
        if delivery.claimed_at is not None:
            self._measured.on_first_token(delivery.claimed_at)
            delivery.claimed_at = None

    def _resend(
        self, delivery: Delivery, choice: int, next_index: int, again: list[Append], ends: dict[str, Conclusion]
    ) -> bool:
        """A failover lost the end of the stream: say it again. False where it lost more than we have said."""
        start = next_index - delivery.base[choice]
        if start < 0 or (delivery.scored and not delivery.prompt):
            return False
        if delivery.scored:
            self._prompt([delivery], ends)
        entries = delivery.entries[choice][start:]
        tokens = Append(
            delivery.task_id,
            delivery.uuid,
            choice,
            next_index,
            entries,
            scored=delivery.scored,
            discarded=delivery.discarded,
        )
        if delivery.uuid in self._blocked:  # the prompt found no room
            self._hold(delivery, ends, tokens)
        else:
            again.append(tokens)
        return True

    def _finish(self, ends: dict[str, Conclusion]) -> None:
        """FINISH what ended here; what is to be retried goes to the finisher as it is."""
        self._hold_ends(ends)
        self._blame(ends)
        while ends:
            self._retry(ends)
            todo = [end for end in ends.values() if not end.delivery.ended]
            try:
                answers = run_many(self._redis, [finish_call(end) for end in todo])
            except LOST as exc:
                warn_throttled(logger, "Cannot finish %d tasks, trying again: %s", len(todo), exc)
                time.sleep(RETRY_S)
                continue
            again: list[Append] = []
            ends = {}
            for end, answer in zip(todo, answers, strict=True):
                if self._finished(end, answer, again, ends):
                    ends[end.delivery.uuid] = end
            self._append(again, ends)
            self._hold_ends(ends)

    def _retry(self, ends: dict[str, Conclusion]) -> None:
        """Leave to Celery's retry what has tries left."""
        for end in [e for e in ends.values() if e.retry and self._finisher.may_retry(e.delivery)]:
            del ends[end.delivery.uuid]
            if self._deliveries.stop(end.delivery):  # its other choices run on
                otherwise = partial(self.conclude, end.delivery, "failed", end.error)
                self._finisher.retry(end.delivery, json.loads(end.error)["message"], otherwise)

    def _finished(self, end: Conclusion, answer: Any, again: list[Append], ends: dict[str, Conclusion]) -> bool:
        """Act upon FINISH's answer. True where it is to be said again, after the tokens in `again`."""
        delivery = end.delivery
        if isinstance(answer, Exception):
            self._bury(delivery, answer)
            return False
        word, *rest = answer
        if text(word) == "resend":
            if all(self._resend(delivery, choice, int(n), again, ends) for choice, n in enumerate(rest)):
                return True
        elif text(word) == "won":
            self._won(end, text(rest[0]))
            return False
        self._lost(delivery, text(word))
        return False

    def _won(self, end: Conclusion, status: str) -> None:
        delivery = end.delivery
        self._deliveries.end(delivery)
        self._measured.on_end(delivery.prompt_tokens, delivery.cached_tokens, delivery.generated)
        if status == "completed":
            self._breaker.completed()
        if delivery.trace:
            logger.info("Task %s has ended: %s%s", delivery.task_id, status, delivery.trace)
        self._finisher.finish(delivery, status, end.error)

    def _blame(self, ends: dict[str, Conclusion]) -> None:
        """Tell the breaker what the engine failed. What a sick one failed goes to another worker, with no try spent."""
        for end in [end for end in ends.values() if end.fault and not end.delivery.put_down]:
            if self._breaker.failed():
                del ends[end.delivery.uuid]
                self._finisher.let_go(end.delivery, why="breaker")

    def _bury(self, delivery: Delivery, why: Exception) -> None:
        """Its record is none, whoever takes it up: its message is kept, and no worker tries for ever."""
        logger.error("Cannot finish task %s: %s%s", delivery.task_id, why, delivery.trace)
        self._finisher.bury(delivery, f"its record cannot be used: {why}", claimed=True)

    def _lost(self, delivery: Delivery, answer: str) -> None:
        """Another holds the claim, or the stream is not what we took over: the message belongs to whoever is next.
        Nobody needs it any more where the record is gone, unless CLAIM would make that again."""
        if answer == "gone" and delivery.plain is None:
            self._deliveries.end(delivery)
            self._deliveries.done(delivery, settled=True)
            return
        warn_throttled(logger, "Task %s is not ours any more%s: %s", delivery.task_id, delivery.trace, answer)
        if answer == "other":
            delivery.incarnation.lost[delivery.uuid] = delivery.used
        self._finisher.let_go(delivery, self._retry_after)
