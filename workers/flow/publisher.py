"""Publishes tokens as they are made: after a step, one scripted call for all sequences; when behind, for some steps.

The engine's thread only appends to a list. This thread encodes, sends, and acts on the answers; whatever ends a running
task passes through here, so that its last tokens are out before its FINISH.

A store that is nearly full takes no more tokens of worse tiers (`full`). These wait in a batch of their own, with what
comes behind them, and are sent again every RETRY_S; other sequences go on meanwhile.

**Batch.** Turns a step's events into tokens to append, prompts to score and tasks to end. No I/O.

Event of a choice -> entries of its stream, and whether the task ends with it -> APPEND, FINISH
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.errors import NOT_FINITE, EngineError, RequestError, TextError, renamed
from engine.request import Event, TokenLogprobs, Tokens
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, run, run_many, text
from producers.contract.record import error_json
from producers.contract.stream import encode_prompt, encode_rows, encode_token, quote
from producers.errors import InvalidTask
from producers.store.protocol import DEFAULT_TTL_S, Append, append, finish, prompt, read_append
from workers.breaker import Breaker
from workers.connect import LOST, connect
from workers.flow import probe
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.measure import Measured
from workers.state.delivery import Delivery
from workers.state.served import Served

#: Entries in one call: after an outage there may be many, and a script blocks the store.
MAX_ENTRIES = 2000
#: The finish reason of a choice that the deadline cut off; `_late.lua` has it too.
DEADLINE = "deadline"


@dataclass(slots=True)
class Conclusion:
    """The end that a running task is to have. `retry`: by Celery's retry, if it has tries left. `fault`: the engine is
    probably to blame. `result`: JSON, what a task that generates nothing made."""

    delivery: Delivery
    status: str
    error: str = "null"
    retry: bool = False
    fault: bool = False
    result: str = ""


@dataclass(slots=True)
class Batch:
    """The outputs of some steps, by delivery."""

    appends: dict[tuple[str, int], Append] = field(default_factory=dict)
    """(delivery, choice) -> its append."""
    scored: list[Delivery] = field(default_factory=list)
    """Deliveries whose prompt's log probabilities have come."""
    ends: dict[str, Conclusion] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)
    """When the events came (monotonic)."""
    doubted: dict[str, Conclusion] = field(default_factory=dict)
    """Ends in NaN, of the request or of some of its texts: they are to blame, or the model."""
    gaps: Counter[tuple[str, float]] = field(default_factory=Counter)
    """(tier, seconds since the choice's token before) -> number."""

    def conclude(self, end: Conclusion) -> None:
        """End it so, unless it has ended or another end came first."""
        if end.delivery.ended or (end.status == "incomplete" and end.delivery.complete):
            return
        if self.ends.setdefault(end.delivery.uuid, end) is end and end.status in ("cancelled", "incomplete"):
            self._cut(end.delivery)

    def count(self, delivery: Delivery) -> None:
        """Writes the length of the prompt into the record."""
        self._append_of(delivery, 0, delivery.next_index(0)).prompt_tokens = delivery.prompt_tokens

    def _cut(self, delivery: Delivery) -> None:
        """Writes into the record what was made for choices that nobody will see."""
        if delivery.selects and (unpublished := delivery.unpublished):
            append = self._append_of(delivery, 0, delivery.next_index(0))
            append.discarded = delivery.discarded = unpublished

    def add(self, delivery: Delivery, event: Event) -> None:
        """Adds an event of a choice. Those of best_of's choices, and of a beam search's, wait until all have come:
        one call publishes them, so no stream can hold choices of two runs."""
        if event.prompt_logprobs is not None:
            _note_prompt(delivery, event.prompt_logprobs)
            self.scored.append(delivery)
        if not delivery.selects or event.error is not None:
            if event.finish_reason is None and event.logprobs is None and len(event.token_ids) == 1 and not event.done:
                self.add_token(delivery, event.choice, event.index, event.token_ids[0], event.texts[0])
            else:
                self._note(delivery, event)
            return
        delivery.pending.append(event)
        for pending in delivery.pending if event.done else []:
            self._note(delivery, pending)

    def add_token(self, delivery: Delivery, choice: int, index: int, token_id: int, piece: str) -> None:
        """Adds a token that does not end its choice and has no log probability, of a delivery that publishes its
        choices as they come: nearly every one."""
        at, entry = self.at, f"[{choice},{index},{token_id},{quote(piece)}]"
        delivery.note_tokens(1, at)  # first: the account that goes with the entry has it
        append = self.appends.get((delivery.uuid, choice))
        if append is None:
            append = self._append_of(delivery, choice, index)
        append.scored = delivery.scored
        append.entries.append(entry)
        delivery.entries[choice].append(entry)
        before, delivery.token_at[choice] = delivery.token_at[choice], at
        if before and before < at and delivery.record is not None:
            self.gaps[delivery.record.tier, at - before] += 1

    def _note(self, delivery: Delivery, event: Event) -> None:
        """Encode the event's tokens, and see whether it is the last one."""
        choice = event.choice
        if event.token_ids:
            entries = _encode(event)
            delivery.note_tokens(len(entries), self.at)
            append = self._append_of(delivery, choice, event.index)
            append.entries += entries
            append.discarded = delivery.discarded = event.discarded
            delivery.entries[choice] += entries
            before, delivery.token_at[choice] = delivery.token_at[choice], self.at
            if before and before < self.at and not delivery.selects and delivery.record is not None:
                self.gaps[delivery.record.tier, self.at - before] += 1
        if event.finish_reason is None and not event.done:
            return
        delivery.cached_tokens = event.cached_tokens
        delivery.reasons[choice] = event.finish_reason
        if event.error is not None:
            if event.refused:
                error = refusal(delivery, RequestError(event.error, param=event.param, code=event.code))
            else:
                error = error_json("engine_error", _blamed(event.error, delivery), event.param)
            fault = not event.refused and event.error != NOT_FINITE
            failed = Conclusion(delivery, "failed", error, retry=not event.refused, fault=fault)
            (self.doubted if event.error == NOT_FINITE else self.ends)[delivery.uuid] = failed
        elif event.done and "error" not in delivery.reasons:
            end = self.ends.get(delivery.uuid)
            if end is None or end.status == "incomplete":  # all of it is there: its deadline came too late
                result = "" if event.rows is None else encode_rows(event.rows)
                errors = (row for row in event.rows or () if isinstance(row, TextError))
                ends = self.doubted if any(error.message == NOT_FINITE for error in errors) else self.ends
                ends[delivery.uuid] = Conclusion(delivery, "completed", result=result)

    def _append_of(self, delivery: Delivery, choice: int, index: int) -> Append:
        """Returns the choice's Append; a new one begins at token `index`."""
        append = self.appends.get((delivery.uuid, choice))
        if append is None:
            append = self.appends[delivery.uuid, choice] = Append(delivery.task_id, delivery.uuid, choice, index)
        append.scored = delivery.scored
        append.run = append.run or delivery.run_update(self.at)
        return append


def _blamed(error: str, delivery: Delivery) -> str:
    """The engine's error; that of a task with an adapter whose outputs are not finite says which."""
    record = delivery.record
    if error != NOT_FINITE or record is None or not (version := record.fields.get("adapter")):
        return error
    return f"{error} with the adapter {record.model} (version {version}), whose values may be too large for its base"


def _note_prompt(delivery: Delivery, logprobs: list[TokenLogprobs | None]) -> None:
    scores = [(lp.logprob, lp.top) if lp else None for lp in logprobs]
    delivery.prompt = encode_prompt(delivery.prompt_ids, scores)
    delivery.scored = True


def _encode(event: Event) -> list[str]:
    """An event's tokens as stream entries; the finish reason stands on the choice's last token."""
    token_ids, finish_reason = event.token_ids, event.finish_reason
    last = len(token_ids) - 1
    entries = []
    for k, (token_id, piece) in enumerate(zip(token_ids, event.texts, strict=True)):
        lp = event.logprobs[k] if event.logprobs else None
        entries.append(
            encode_token(
                event.choice,
                event.index + k,
                token_id,
                piece,
                (lp.logprob, lp.top) if lp else None,
                finish_reason if k == last else None,
            )
        )
    return entries


def refusal(delivery: Delivery, exc: RequestError | InvalidTask) -> str:
    """Returns the error's JSON. The engine's `prompt_ids` is named as in the task: `prompt` or `messages`."""
    record = delivery.record
    if record is None or isinstance(exc, InvalidTask) or exc.param != "prompt_ids":
        return error_json(exc.code, exc.message, exc.param)
    name = "prompt" if record.task.get("messages") is None else "messages"
    return error_json(exc.code, renamed(exc.message, {"prompt_ids": name}), name)


def part(batch: list[Append]) -> tuple[list[Append], list[Append]]:
    """Split off as much as one call should carry; return it and the rest. One task's appends stay together."""
    size = 0
    for k, tokens in enumerate(batch):
        size += len(tokens.entries)
        if size > MAX_ENTRIES and k and batch[k - 1].claim_id != tokens.claim_id:
            return batch[:k], batch[k:]
    return batch, []


def finish_call(end: Conclusion) -> Call:
    d = end.delivery
    reasons = [reason or DEADLINE for reason in d.reasons] if end.status == "incomplete" else d.reasons
    return finish(
        d.task_id,
        d.uuid,
        end.status,
        reasons=json.dumps(reasons, separators=(",", ":")),
        nexts=[d.next_index(choice) for choice in range(len(d.base))],
        error=end.error,
        prompt_tokens=d.prompt_tokens,
        cached_tokens=d.cached_tokens,
        scored=d.scored,
        run=d.run(),
        result=end.result,
        settle_ttl_s=None if d.native is None else DEFAULT_TTL_S,
    )


logger = logging.getLogger(__name__)

RETRY_S = 0.2
EXPIRED = error_json("expired", "The deadline passed before the task was finished.")
#: The message of a worker whose model no longer answers as it did when it was loaded.
BROKEN = (
    f"{NOT_FINITE} also after the prompt that it answered when it was loaded, so that its weights in memory are "
    "damaged. Its tasks go to others; start it again, and test this machine's memory or GPU if it happens again"
)


class Publisher(threading.Thread):
    """`give_up` ends this worker with a reason; called when its model is broken."""

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
        self._updates: deque[Event | Tokens | Conclusion | Delivery] = deque()
        #: What the store has no room for, of which deliveries (UUIDs), and when it is sent again.
        self._deferred = Batch()
        self._blocked: set[str] = set()
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        #: Ends in NaN, by delivery: those for which a probe was sent, and those that came since.
        self._probed: dict[str, Conclusion] = {}
        self._doubted: dict[str, Conclusion] = {}
        self.busy_since: float | None = None
        """When it began its present round (monotonic); None while there is nothing to publish."""

    # ---- called by others -----------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Runs on the engine's thread, for each event of a choice; `on_step` follows."""
        self._updates.append(event)

    def on_tokens(self, tokens: Tokens) -> None:
        """As `on_event`, for plain tokens of many deliveries."""
        self._updates.append(tokens)

    def on_step(self) -> None:
        self._wake.set()

    def count(self, delivery: Delivery, *, soon: bool) -> None:
        """Writes the length of a prompt that came as text into the record: with the engine's next step, or `soon`. Any
        thread, before the engine has the delivery."""
        self._updates.append(delivery)
        if soon:
            self._wake.set()

    def conclude(self, delivery: Delivery, status: str, error: str = "null") -> None:
        """Ends a delivery with this status, after its published tokens. Any thread."""
        self._conclude(Conclusion(delivery, status, error))

    def _conclude(self, end: Conclusion) -> None:
        self._updates.append(end)
        self._wake.set()

    def conclude_late(self, delivery: Delivery) -> None:
        """Ends a delivery whose deadline passed: `incomplete`, with the tokens it has. Any thread."""
        self.conclude(delivery, "incomplete", EXPIRED)

    def conclude_cancelled(self, delivery: Delivery) -> None:
        """Ends a delivery whose cancel was accepted. The engine frees its memory before the store has its end. Any
        thread."""
        self._engine.abort(delivery.uuid)
        self.conclude(delivery, "cancelled")

    def conclude_revoked(self, delivery: Delivery) -> None:
        self.conclude(delivery, delivery.revoked, EXPIRED if delivery.revoked == "failed" else "null")

    def stop(self, timeout: float) -> bool:
        """Returns True once all earlier updates are published."""
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
            if self._stopping and not self._updates and not self._blocked:
                return

    def _publish(self) -> None:
        batch = self._next_batch()
        while self._updates:
            item = self._updates.popleft()
            if isinstance(item, Conclusion):
                self._batch_for(item.delivery, batch).conclude(item)
            elif isinstance(item, Delivery):
                if item.uuid in self._deliveries.running:
                    self._batch_for(item, batch).count(item)
            elif isinstance(item, Tokens):
                self._add(item, batch)
            elif (delivery := self._deliveries.running.get(item.request_id)) is not None:
                self._batch_for(delivery, batch).add(delivery, item)
        for each in (batch, self._deferred):
            self._doubted |= each.doubted
            each.doubted = {}
        if batch.gaps:
            self._measured.increments.on_gaps(batch.gaps)
        self._prompt(batch.scored, batch.ends)
        self._append(list(batch.appends.values()), batch.ends)
        self._finish(batch.ends)
        self._probe()

    def _add(self, tokens: Tokens, batch: Batch) -> None:
        running = self._deliveries.running
        columns = tokens.choices, tokens.indices, tokens.token_ids, tokens.texts
        for request_id, choice, index, token_id, piece in zip(tokens.request_ids, *columns, strict=True):
            delivery = None if request_id is None else running.get(request_id)
            if delivery is None:
                continue
            target = batch if not self._blocked else self._batch_for(delivery, batch)
            if delivery.selects:
                target.add(delivery, Event(delivery.uuid, choice, index, [token_id], [piece]))
            else:
                target.add_token(delivery, choice, index, token_id, piece)

    def _next_batch(self) -> Batch:
        """Returns an empty batch; or, if it is time, the deferred one."""
        if not self._blocked or time.monotonic() < self._retry_at:
            return Batch()
        batch, self._deferred, self._blocked = self._deferred, Batch(), set()
        batch.at = time.monotonic()
        return batch

    def _batch_for(self, delivery: Delivery, batch: Batch) -> Batch:
        """Returns the batch for a delivery's updates: the deferred one, if the store had no room for earlier ones."""
        if delivery.uuid not in self._blocked:
            return batch
        self._deferred.at = time.monotonic()
        return self._deferred

    def _defer(self, delivery: Delivery, ends: dict[str, Conclusion], tokens: Append | None = None) -> None:
        """Sends a delivery's tokens again later, and its end after them: the store has no room."""
        if not self._blocked:
            self._retry_at = time.monotonic() + RETRY_S
        self._blocked.add(delivery.uuid)
        if tokens is not None:
            self._deferred.appends[tokens.claim_id, tokens.choice] = tokens
        self._defer_ends(ends)

    def _defer_ends(self, ends: dict[str, Conclusion]) -> None:
        for uuid in self._blocked & ends.keys():
            self._deferred.ends.setdefault(uuid, ends.pop(uuid))

    def _probe(self) -> None:
        """Probes the model: who is to blame for NaN? If the engine is closed, a drain hands the tasks back."""
        if self._doubted and not self._probed:
            self._probed, self._doubted = self._doubted, {}
            with suppress(EngineError):
                probe.send(self._engine, self._answered)

    def _answered(self, error: str | None) -> None:
        """Runs on the engine's thread. If the model is broken, tasks whose end waits are handed back with all
        others."""
        if error == NOT_FINITE:
            self._give_up(f"the model is broken, not a request: {BROKEN}")
            return
        probed, self._probed = self._probed, {}
        for end in probed.values():
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
                    ends.pop(delivery.uuid, None)
                    self._bury(delivery, answer)
                elif text(answer) == "full":
                    warn_throttled(logger, "Prompts and tokens wait in this worker: %s", "the store is full")
                    if delivery not in self._deferred.scored:
                        self._deferred.scored.append(delivery)
                    self._defer(delivery, ends)
                elif text(answer) != "ok":
                    self._not_ok(delivery, text(answer), ends)
            return

    def _not_ok(self, delivery: Delivery, answer: str, ends: dict[str, Conclusion]) -> None:
        """Ends or lets go a task whose tokens the store refused: it is cancelled, broken, gone, or not ours."""
        if answer == "cancel":
            self._engine.abort(delivery.uuid)
            ends[delivery.uuid] = Conclusion(delivery, "cancelled")
            return
        ends.pop(delivery.uuid, None)
        if answer == "denied":
            warn_throttled(logger, "Task %s waits for the store's user to get its rights", delivery.task_id)
            self._finisher.let_go(delivery, self._retry_after)
        elif answer == "error":
            self._bury(delivery, "its stream takes no more tokens: what it has is not what the record says")
        else:
            self._lost(delivery, answer)

    def _append(self, batch: list[Append], ends: dict[str, Conclusion]) -> None:
        """Sends APPEND until the store has it all, has no room for it, or refuses it because the claim is not ours."""
        deliveries = self._deliveries.by_uuid
        while batch:
            mine = [a for a in batch if a.claim_id in deliveries]
            for tokens in mine:
                if tokens.claim_id in self._blocked:
                    self._defer(deliveries[tokens.claim_id], ends, tokens)
            now, remaining = part([a for a in mine if a.claim_id not in self._blocked])
            if not now:
                return
            try:
                answers = read_append(run(self._redis, append(now)))
            except LOST as exc:
                warn_throttled(logger, "Cannot publish, trying again: %s", exc)
                time.sleep(RETRY_S)
                continue
            again: list[Append] = []
            for tokens, (answer, next_index) in zip(now, answers, strict=True):
                delivery = deliveries.get(tokens.claim_id)
                if delivery is None:
                    continue
                if answer == "ok":
                    if tokens.entries:
                        self._progress(delivery)
                    continue
                if answer == "full":
                    warn_throttled(logger, "Prompts and tokens wait in this worker: %s", "the store is full")
                    self._defer(delivery, ends, tokens)
                elif answer != "resend" or not self._resend(delivery, tokens.choice, next_index, again, ends):
                    self._not_ok(delivery, answer, ends)
            batch = again + remaining

    def _progress(self, delivery: Delivery) -> None:
        self._deliveries.got_on(delivery)
        if delivery.claimed_at is not None:
            if not delivery.selects:  # whose first token comes with its last
                self._measured.on_first_token(delivery.claimed_at)
            delivery.claimed_at = None

    def _resend(
        self, delivery: Delivery, choice: int, next_index: int, again: list[Append], ends: dict[str, Conclusion]
    ) -> bool:
        """Sends the end of a stream again that a failover lost. False if it lost more than this worker sent."""
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
            self._defer(delivery, ends, tokens)
        else:
            again.append(tokens)
        return True

    def _finish(self, ends: dict[str, Conclusion]) -> None:
        """Sends FINISH for tasks that ended here. Tasks to be retried go to the finisher without it."""
        self._defer_ends(ends)
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
            self._defer_ends(ends)

    def _retry(self, ends: dict[str, Conclusion]) -> None:
        """Leaves failed tasks that have tries left to Celery's retry."""
        for end in [e for e in ends.values() if e.retry and self._finisher.may_retry(e.delivery)]:
            del ends[end.delivery.uuid]
            if self._deliveries.stop(end.delivery):  # its other choices run on
                otherwise = partial(self.conclude, end.delivery, "failed", end.error)
                self._finisher.retry(end.delivery, json.loads(end.error)["message"], otherwise)

    def _finished(self, end: Conclusion, answer: Any, again: list[Append], ends: dict[str, Conclusion]) -> bool:
        """Acts upon FINISH's answer. True if FINISH is to be sent again, after the tokens in `again`."""
        delivery = end.delivery
        if isinstance(answer, Exception):
            self._bury(delivery, answer)
            return False
        word, *details = answer
        if text(word) == "resend":
            if all(self._resend(delivery, choice, int(n), again, ends) for choice, n in enumerate(details)):
                return True
        elif text(word) == "won":
            self._won(end, text(details[0]))
            return False
        self._lost(delivery, text(word))
        return False

    def _won(self, end: Conclusion, status: str) -> None:
        delivery = end.delivery
        self._deliveries.end(delivery)
        self._measured.on_end(delivery.prompt_tokens, delivery.cached_tokens, delivery.generated)
        self._measured.on_lost_time(delivery)
        if status == "completed":
            self._breaker.completed()
            self._measured.on_completed(delivery)
        if delivery.traced:
            logger.info("Task %s has ended: %s", delivery.task_id, status, extra=delivery.subject)
        if delivery.native is None:
            self._finisher.finish(delivery, status, end.error)
        else:
            self._finisher.settled(delivery, status, end.error)

    def _blame(self, ends: dict[str, Conclusion]) -> None:
        """Reports tasks that the engine failed to the breaker. If the breaker opens, they go to another worker and keep
        their tries."""
        for end in [end for end in ends.values() if end.fault and not end.delivery.put_down]:
            if self._breaker.failed():
                del ends[end.delivery.uuid]
                self._finisher.let_go(end.delivery, why="breaker")

    def _bury(self, delivery: Delivery, why: Exception | str) -> None:
        """Keeps the message of a task whose record cannot be used as a dead letter: no other worker could use it
        either."""
        logger.error("Cannot go on with task %s: %s", delivery.task_id, why, extra=delivery.subject)
        self._finisher.bury(delivery, f"its record cannot be used: {why}", claimed=True)

    def _lost(self, delivery: Delivery, answer: str) -> None:
        """Lets a delivery go: another worker holds its claim, or its stream is not what we took over. If the record is
        gone, the message is acknowledged instead, unless CLAIM would make that record again."""
        if answer == "gone" and delivery.plain is None:
            self._deliveries.end(delivery)
            self._deliveries.done(delivery, settled=True)
            return
        warn_throttled(logger, "Task %s is not ours any more: %s", delivery.task_id, answer, extra=delivery.subject)
        if answer == "other":
            delivery.incarnation.lost[delivery.uuid] = delivery.used
        self._finisher.let_go(delivery, self._retry_after)
