"""A client's operations besides submitting, as steps, and messages that both clients share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from producers.client.steps import Read, Steps, persistently
from producers.client.submission import MAX_PATIENCE_S
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import TaskNotFound
from producers.store import protocol

#: Default time (s) for which a client retries a failing connection.
PATIENCE_S: Final = 8.0


def task_of(task: Task | None, fields: Mapping[str, Any]) -> Task:
    """The task in `submit`'s arguments. Raises InvalidTask, and TypeError for both a Task and fields."""
    if task is None:
        return Task(**fields)
    if fields:
        raise TypeError(f"give a Task or its fields, not a Task and {', '.join(fields)}")
    return task


def checked_patience(seconds: float) -> float:
    if not 0 <= seconds <= MAX_PATIENCE_S:
        raise ValueError(
            f"patience is {seconds} s; it must be from 0 to {MAX_PATIENCE_S:.0f}, within the submit window"
        )
    return seconds


def unfinished(task_id: str, seconds: float | None) -> str:
    return f"task {task_id} did not end within {seconds} s; it goes on"


def status(task_id: str, patience_s: float) -> Steps[Record]:
    """The task's record. Raises TaskNotFound."""
    (raw,) = yield from persistently(Read((("HGETALL", keys.task(task_id)),)), patience_s)
    if not raw:
        raise not_found(task_id)
    return Record.parse(task_id, raw)


def cancel(task_id: str, patience_s: float) -> Steps[bool]:
    """Cancel a task. Returns whether it ends or has ended `cancelled`; may be repeated. Raises TaskNotFound."""
    accepted, state = yield from persistently(protocol.cancel(task_id), patience_s)
    if not accepted and state in (b"gone", "gone"):
        raise not_found(task_id)
    return bool(accepted) or state in (b"cancelled", "cancelled")


def models(patience_s: float) -> Steps[list[dict[str, Any]]]:
    (raw,) = yield from persistently(Read((("HGETALL", keys.MODELS),)), patience_s)
    return [json.loads(card) for _, card in sorted(raw.items())]


def not_found(task_id: str) -> TaskNotFound:
    return TaskNotFound(f"There is no task {task_id}: never submitted, or past its time to live")
