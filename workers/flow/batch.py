"""Turns a step's events into tokens to append, prompts to score and tasks to end. No I/O.

Event of a choice -> entries of its stream, and whether the task ends with it -> APPEND, FINISH
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field

from engine.errors import NOT_FINITE
from engine.logprobs import TokenLogprobs
from engine.request import Event
from producers.connection.script import Call
from producers.contract.record import error_json
from producers.contract.stream import encode_prompt, encode_rows, encode_token, quote
from producers.store.protocol import Append, finish
from workers.state.delivery import Delivery

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
    """What some steps made, by delivery."""

    appends: dict[tuple[str, int], Append] = field(default_factory=dict)
    """(delivery, choice) -> its append."""
    scored: list[Delivery] = field(default_factory=list)
    """Deliveries whose prompt's log probabilities have come."""
    ends: dict[str, Conclusion] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)
    """When the events came (monotonic)."""
    doubted: dict[str, Conclusion] = field(default_factory=dict)
    """Ends in NaN, for which the request is to blame, or the model."""
    gaps: Counter[tuple[str, float]] = field(default_factory=Counter)
    """(tier, seconds since the choice's token before) -> number."""

    def conclude(self, end: Conclusion) -> None:
        """End it so, unless it has ended or another end came first."""
        if not (end.delivery.ended or (end.status == "incomplete" and end.delivery.complete)):
            self.ends.setdefault(end.delivery.uuid, end)

    def count(self, delivery: Delivery) -> None:
        """Writes the length of the prompt into the record."""
        self._append_of(delivery, 0, delivery.next_index(0)).prompt_tokens = delivery.prompt_tokens

    def add(self, delivery: Delivery, event: Event) -> None:
        """Adds an event of a choice. Events of best_of's choices wait until all have come: one call publishes them, so
        no stream can hold choices of two runs."""
        if event.prompt_logprobs is not None:
            _note_prompt(delivery, event.prompt_logprobs)
            self.scored.append(delivery)
        if not delivery.selects or event.error is not None:
            self._note(delivery, event)
            return
        delivery.pending.append(event)
        for pending in delivery.pending if event.done else []:
            self._note(delivery, pending)

    def _note(self, delivery: Delivery, event: Event) -> None:
        """Encode the event's tokens, and see whether it is the last one."""
        choice = event.choice
        if event.token_ids:
            entries = _encode(event)
            append = self._append_of(delivery, choice, event.index)
            append.entries += entries
            append.discarded = delivery.discarded = event.discarded
            delivery.entries[choice] += entries
            delivery.last_at = self.at
            before, delivery.token_at[choice] = delivery.token_at[choice], self.at
            if before and before < self.at and not delivery.selects and delivery.record is not None:
                self.gaps[delivery.record.tier, self.at - before] += 1
        if event.finish_reason is None and not event.done:
            return
        delivery.cached_tokens = event.cached_tokens
        delivery.reasons[choice] = event.finish_reason
        if event.error is not None:
            code = "invalid_value" if event.refused else "engine_error"
            error = error_json(code, event.error, event.param)
            fault = not event.refused and event.error != NOT_FINITE
            failed = Conclusion(delivery, "failed", error, retry=not event.refused, fault=fault)
            (self.doubted if event.error == NOT_FINITE else self.ends)[delivery.uuid] = failed
        elif event.done and "error" not in delivery.reasons:
            end = self.ends.get(delivery.uuid)
            if end is None or end.status == "incomplete":  # all of it is there: its deadline came too late
                result = "" if event.rows is None else encode_rows(event.rows)
                self.ends[delivery.uuid] = Conclusion(delivery, "completed", result=result)

    def _append_of(self, delivery: Delivery, choice: int, index: int) -> Append:
        """Returns the choice's Append; a new one begins at token `index`."""
        append = self.appends.get((delivery.uuid, choice))
        if append is None:
            append = self.appends[delivery.uuid, choice] = Append(delivery.task_id, delivery.uuid, choice, index)
        append.scored = delivery.scored
        append.run = append.run or delivery.run_update()
        return append


def _note_prompt(delivery: Delivery, logprobs: list[TokenLogprobs | None]) -> None:
    scores = [(lp.logprob, lp.top) if lp else None for lp in logprobs]
    delivery.prompt = encode_prompt(delivery.prompt_ids, scores)
    delivery.scored = True


def _encode(event: Event) -> list[str]:
    """An event's tokens as stream entries; the finish reason stands on the choice's last token."""
    token_ids, finish_reason = event.token_ids, event.finish_reason
    if finish_reason is None and event.logprobs is None and len(token_ids) == 1:  # nearly every event
        return [f"[{event.choice},{event.index},{token_ids[0]},{quote(event.texts[0])}]"]
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


def part(batch: list[Append]) -> tuple[list[Append], list[Append]]:
    """Split off as much as one call should carry; return it and the rest. One task's appends stay together."""
    size = 0
    for k, append in enumerate(batch):
        size += len(append.entries)
        if size > MAX_ENTRIES and k and batch[k - 1].claim_id != append.claim_id:
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
    )
