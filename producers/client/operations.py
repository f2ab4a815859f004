"""A client's operations as steps: submit once for each idempotency key, retry, read, cancel, delete."""

from __future__ import annotations

import json
import math
import uuid
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from engine.errors import TextError
from engine.labels import Entity
from producers.client.directory import Directory, ResolvedModel, encoding_of, listed, selection_of
from producers.client.steps import FAILURES, Read, Steps, lost, persistently
from producers.client.submission import KEPT, MAX_PATIENCE_S, TASK, failed, submit, submit_rest
from producers.connection.script import text
from producers.contract import keys, model_fit
from producers.contract.record import Record
from producers.contract.stream import Result, Row
from producers.contract.task import Task
from producers.errors import (
    IdempotencyKeyReused,
    InvalidTask,
    TaskErased,
    TaskExists,
    TaskFailed,
    TaskInBatch,
    TaskNotFinal,
    TaskNotFound,
    UnknownModel,
    shown,
)
from producers.store import idempotency, protocol
from producers.store.chunks import chunk_id
from producers.store.fleet import adapters
from producers.store.fleet.routing import Routing
from producers.store.idempotency import Entry, KeyBound

#: Default time (s) for which a client retries a failing connection.
PATIENCE_S: Final = 8.0


def task_of(task: Task | None, fields: Mapping[str, Any]) -> Task:
    """The task in `submit`'s arguments. Raises InvalidTask, and TypeError for both a Task and fields."""
    if task is None:
        return Task(**fields)
    if fields:
        raise TypeError(f"give a Task or its fields, not a Task and {', '.join(fields)}")
    return task


def rows_of_result(result: Result) -> list[Row]:
    """The rows of a task that generates nothing. Raises TaskFailed for a task that ended without them."""
    result.raise_for_status()
    if result.rows is None:
        message = f"Task {result.id} ended {result.status}, without a result."
        raise TaskFailed(message, status=result.status, code=(result.error or {}).get("code", result.status))
    return list(result.rows)


def scored(result: Result) -> list[float | TextError]:
    """The scores of a reranker's task. Raises as `rows_of_result`."""
    return [row[0] if isinstance(row, array) else _error_of(row) for row in rows_of_result(result)]


def labelled(
    card: Mapping[str, Any], rows: Sequence[Row], threshold: float | None = None
) -> list[dict[str, float] | TextError]:
    """The probabilities in rows, by the labels of a model's card; by their numbers, if it has others by now.
    `threshold`: without those below it."""
    labels = (card.get("pooling") or {}).get("labels") or []
    least = -math.inf if threshold is None else threshold
    return [
        {label: value for label, value in zip(_names(labels, len(row)), row, strict=True) if value >= least}
        if isinstance(row, array)
        else _error_of(row)
        for row in rows
    ]


def _names(labels: Sequence[str], count: int) -> Sequence[str]:
    return labels if len(labels) == count else [*map(str, range(count))]


def entities_of_result(result: Result) -> list[list[Entity] | TextError]:
    """The labelled parts of texts. Raises as `rows_of_result`."""
    return [[*row] if isinstance(row, tuple) else _error_of(row) for row in rows_of_result(result)]


def vectors_of_result(result: Result) -> list[array[float] | TextError]:
    """The vectors of texts. Raises as `rows_of_result`."""
    return [row if isinstance(row, array) else _error_of(row) for row in rows_of_result(result)]


def _error_of(row: Row) -> TextError:
    if not isinstance(row, TextError):
        raise TypeError(f"the task made {type(row).__name__} of a text, which is not of its kind")
    return row


def version_of(directory: Directory, record: Record, patience_s: float) -> Steps[ResolvedModel]:
    """The version that ran a task; the one that its model's name leads to, where that is not known any more. Raises
    UnknownModel."""
    with suppress(UnknownModel):
        return (yield from directory.find(record.versioned_model, patience_s, withdrawn=True))
    return (yield from directory.find(record.model, patience_s, withdrawn=True))


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


def delete(task_id: str, patience_s: float) -> Steps[None]:
    """Delete a task and all that is stored of it, cancelled if it has not ended. Raises TaskNotFound, also for one that
    another call has deleted, and TaskInBatch."""
    answer = yield from persistently(protocol.delete(task_id, uuid.uuid4().hex), patience_s)
    status = text(answer[0])
    if status == "gone":
        raise not_found(task_id)
    if status == "batch":
        raise TaskInBatch(
            f"Task {task_id} is a line of batch {text(answer[1])}, and its result goes into the batch's files; cancel "
            "the batch, or delete its files once it has ended"
        )


def models(patience_s: float) -> Steps[list[dict[str, Any]]]:
    """The cards of all models that take tasks, by name, and then those of their adapters."""
    commands = (("HGETALL", keys.MODELS), ("HGETALL", keys.ADAPTERS))
    models_raw, adapters_raw = yield from persistently(Read(commands), patience_s)
    cards = listed(models_raw)
    return [*cards.values(), *adapters.listed(adapters_raw, cards)]


def takes_tasks(name: str, patience_s: float) -> Steps[bool]:
    """Whether a model or an adapter that takes tasks has this name, which has no alias or version."""
    base, adapter_name = adapters.names_of(name)
    commands = (("HGET", keys.MODELS, name), ("HGET", keys.ADAPTERS, adapter_name))
    model_raw, adapter_raw = yield from persistently(Read(commands), patience_s)
    if model_raw is not None and listed({name: model_raw}):
        return True
    adapter = adapters.StoredAdapter.parse(adapter_raw)
    return adapter is not None and base in ("", adapter.base)


def aliases(
    directory: Directory, models: Sequence[str], patience_s: float
) -> Steps[dict[str, dict[str, dict[str, Any]]]]:
    """As `AsyncClient.aliases`. An alias whose version is not known any more is left out."""
    commands = tuple(("HGET", keys.routing(model), "now") for model in models)
    states = (yield from persistently(Read(commands), patience_s)) if commands else []
    of_models: dict[str, dict[str, dict[str, Any]]] = {model: {} for model in models}
    for model, state in zip(models, states, strict=True):
        routing = Routing.of(model, state)
        for alias in () if routing is None else sorted(routing.aliases):
            with suppress(UnknownModel):
                of_models[model][alias] = (yield from directory.find(f"{model}@{alias}", patience_s)).card
    return of_models


def not_found(task_id: str) -> TaskNotFound:
    return TaskNotFound(f"There is no task {task_id}: never submitted, deleted, or past its time to live")


def stored(
    entry: str,
    digest: str,
    new_id: str,
    patience_s: float,
    kept_s: int = idempotency.KEPT_S,
    bound: KeyBound | None = None,
) -> Steps[Entry | None]:
    """IDEMPOTENT: returns the entry of an idempotency key, with `new_id` if it is new; None if the key belongs to
    another request. Raises TooManyKeys."""
    answer = yield from persistently(idempotency.idempotent(entry, digest, new_id, kept_s, bound), patience_s)
    return idempotency.read(entry, answer)


def submit_once(
    directory: Directory,
    task: Task,
    key: str | None,
    task_id: str | None,
    patience_s: float,
    more: Mapping[str, str | int] = TASK,
) -> Steps[str]:
    """Submit as `submit` does. A call with the key of an earlier one returns the earlier id and submits nothing.

    Raises IdempotencyKeyReused if the earlier call submitted another task.
    """
    if key is None:
        return (yield from submit(directory, task, task_id, patience_s, more))
    if type(key) is not str or not idempotency.KEY.fullmatch(key):
        raise InvalidTask(
            f"idempotency_key is {shown(key)}; it must be 1 to 255 visible ASCII characters", param="idempotency_key"
        )
    webhook = json.dumps(task.webhook.fields()) if task.webhook is not None else ""
    parts = ["client", task.to_json(), webhook, task_id or "", str(more.get("retried_from", ""))]
    parts += [] if task.version is None else [f"@{task.version}"]
    digest = idempotency.digest(*(part.encode() for part in parts))
    name, new_id = idempotency.name(task.tenant, key), task_id or str(uuid.uuid4())
    submitted_id = yield from submit_as(directory, task, name, digest, new_id, patience_s, more)
    if submitted_id is None:
        raise IdempotencyKeyReused(
            f"idempotency_key {shown(key)} was used for another task within the last 24 hours; give each task its own"
        )
    return submitted_id


def submit_as(
    directory: Directory,
    task: Task,
    name: str,
    digest: str,
    new_id: str,
    patience_s: float,
    more: Mapping[str, str | int] = TASK,
    kept_s: int = idempotency.KEPT_S,
    *,
    withdrawn: bool = False,
) -> Steps[str | None]:
    """Submit the task of an idempotency entry, once. Returns the task's id; None if the entry has another digest.

    `name`: the entry's key in the store, kept for `kept_s` seconds. `withdrawn`, errors: as of `submit`.
    """
    try:
        try:
            model = yield from directory.find(task.model, patience_s, selection_of(task), withdrawn=withdrawn)
            model_fit.check(task, model.card)  # a refused task takes no key
        except UnknownModel:  # nobody serves it any more: an earlier call with the key may have submitted the task
            task_id = idempotency.made_id(digest, (yield from persistently(Read(idempotency.look(name)), patience_s)))
            if task_id is None:
                raise
            return task_id
        entry = yield from stored(name, digest, new_id, patience_s, kept_s)
    except FAILURES as error:
        response = "did not answer" if lost(error) else "refused"
        raise failed(f"The store {response}, nothing was queued", error) from error
    if entry is None:
        return None
    if entry.state == "made":
        yield from submit_rest(directory, task, entry.id, patience_s)
        return entry.id
    try:
        record_fields = {**more, "idempotency": entry.name}
        yield from submit(directory, task, entry.id, patience_s, record_fields, withdrawn=withdrawn)
    except TaskErased:  # nothing of the request may stay, not even its digest
        yield from persistently(Read((("UNLINK", entry.name),)), patience_s)
        raise
    except TaskExists:  # an equal call came at the same time; or another task has the id that the caller chose
        (existing,) = yield from persistently(Read((("HGET", keys.task(entry.id), "idempotency"),)), patience_s)
        if existing is None or text(existing) != entry.name:
            raise
        yield from submit_rest(directory, task, entry.id, patience_s)
    return entry.id


def repeated(record: Record, chunks: Sequence[str] = ()) -> tuple[Task, dict[str, str | int]]:
    """The task of a final record, to be submitted again, and the further fields of its record.

    `chunks`: of a parent, as of `chunk_tasks`. Raises TaskNotFinal, and InvalidTask for a plain Celery task that was
    refused.
    """
    if not record.final:
        raise TaskNotFinal(f"Task {record.id} is {record.status}; only a task that has ended can be retried")
    texts = {"input": [item for chunk in chunks for item in json.loads(chunk)["input"]]} if chunks else {}
    task = task_of_record(record, texts)
    if (cut := record.json("shortened")) is not None:  # as it was requested
        task = task.model_copy(update={"max_tokens": cut["from"]})
    return task, {**repeated_fields(record, task), "retried_from": record.id}


def task_of_record(record: Record, update: Mapping[str, Any] = MappingProxyType({})) -> Task:
    """The task of a record, with the alias or version that it named, and these fields in place of its own. Raises
    InvalidTask, and BrokenRecord."""
    fields: Any = record.json("task") or {}
    return Task.parse({**fields, "version": record.fields.get("named"), **update})


def chunk_tasks(record: Record, patience_s: float) -> Steps[list[str]]:
    """The tasks (JSON) of a parent's chunks, which have its texts; none of another task. Raises TaskNotFound."""
    tasks: list[str] = []
    for number in range(record.chunks):
        name = chunk_id(record.id, number)
        (task,) = yield from persistently(Read((("HGET", keys.task(name), "task"),), bulk=True), patience_s)
        if task is None:
            raise TaskNotFound(f"Texts of task {record.id} are gone from the store, or were never all written")
        tasks.append(text(task))
    return tasks


def repeated_fields(record: Record, task: Task) -> dict[str, str | int]:
    """The fields, beside those of the task itself, of the record of another run of a record's task."""
    kept = {name: record.fields[name] for name in KEPT if name in record.fields}
    return {**TASK, **kept} | ({"encoding": encoding_of(record.fields)} if task.has_token_ids else {})


def retry(directory: Directory, task_id: str, key: str | None, patience_s: float) -> Steps[str]:
    """Submit a final task again, as a new one. Returns its id.

    Raises TaskNotFound, TokenizerChanged, and as `repeated` and `submit_once`.
    """
    record = yield from status(task_id, patience_s)
    task, more = repeated(record, (yield from chunk_tasks(record, patience_s)))
    return (yield from submit_once(directory, task, key, None, patience_s, more))
