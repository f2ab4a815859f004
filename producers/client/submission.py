"""Submits a task, as steps: look the model up, check the task, ADMIT its record, send its message, QUEUED.

Nothing is written before ADMIT. Every step may be repeated, so a lost reply is answered by a retry.
"""

from __future__ import annotations

import json
import logging
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from engine.prefix import prompt_marks
from producers.client.directory import Directory, ResolvedModel, selection_of
from producers.client.steps import FAILURES, Read, Send, Steps, lost, persistently
from producers.connection.connect import SILENT_S
from producers.connection.script import text
from producers.connection.trouble import CODES, Trouble, error_text, trouble
from producers.contract import keys, levels, model_fit
from producers.contract.message import Message
from producers.contract.record import FINAL
from producers.contract.task import Task
from producers.errors import InvalidTask, SubmitFailed, TaskErased, TaskExists, TokenizerChanged, UnknownModel, shown
from producers.release import release
from producers.store import batches, chunks, protocol, shadows
from producers.store.fleet.routing import Selection, draw_of
from producers.store.usage.limits import Charge
from producers.store.waiting import Room, refused

log = logging.getLogger(__name__)

#: Longest patience: the last try of ADMIT must be within the submit window.
MAX_PATIENCE_S: Final = protocol.SUBMIT_WINDOW_MS / 1000 - SILENT_S
ADVICE: Final[dict[Trouble | None, str]] = {
    Trouble.FULL: "its memory or disk is full, so that nothing new is taken until tasks have ended; try again later. "
}
#: How often a task is routed anew, where routing changes as it is submitted.
ROUTED_TIMES: Final = 3
#: Fields of a record whose task its caller reads by its id (`origin` in `producers.contract.record`).
TASK: Final[dict[str, str | int]] = {"origin": "task"}
#: Fields of a record, beside the task itself, that another run of the task has, too.
KEPT: Final = ("webhook", "webhook_secret", "reply")
#: Fields of a parent's record that its chunks have, too.
SHARED: Final = (
    *("release", "model", "version", "encoding", "queue", "tier", "n", "level"),
    *("tenant", "order_key", "deadline", "key", "traceparent", "alias", "generation", "drawn"),
)
#: Characters of chunks' JSON after which the next ones are written in another script.
PORTION: Final = 1 << 20
TASK_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def submit(
    directory: Directory,
    task: Task,
    task_id: str | None,
    patience_s: float,
    more: Mapping[str, str | int] = TASK,
    charge: Charge | None = None,
    room: Room | None = None,
    resolved: ResolvedModel | None = None,
    *,
    withdrawn: bool = False,
    moved: Callable[[ResolvedModel], None] | None = None,
) -> Steps[str]:
    """Queue the task and return its id. Raises InvalidTask, UnknownModel, TaskExists, LimitReached, QueueFull,
    SubmitFailed.

    `more`: fields of its record beside those of the task itself. `charge`: the accounts that it is charged to. `room`:
    its bounds on waiting tasks. `resolved`: the model as the caller found it, if the prompt was made for its version;
    no version with another tokenizer gets the task. `withdrawn`: the task may wait for a model that nobody serves, as
    of `Directory.find`. `moved`: called with the version that gets the task, if that is not `resolved`.
    Raises TokenizerChanged, too, if `more` has the `encoding` of token ids that the task takes from an earlier one.
    """
    if task_id is not None and (type(task_id) is not str or not TASK_ID.fullmatch(task_id)):
        raise InvalidTask(
            f"task_id is {shown(task_id)}; it must have 1 to 128 of the characters A-Z a-z 0-9 _ . : -", param="task_id"
        )
    directory.check(task)
    named, task_id = task_id is not None, task_id or str(uuid.uuid4())
    current, tries = resolved, 0
    while True:
        current = yield from _current(directory, task, current, patience_s, withdrawn=withdrawn)
        if not current.reads(str(more.get("encoding", current.encoding))):
            raise TokenizerChanged(
                f"The token ids of task {more.get('retried_from', task_id)} were made by another tokenizer or chat "
                f"template than those of the current version of {shown(task.model)}, for which they would be another "
                "text. Nothing was queued; submit a new task with its text"
            )
        routed = task.resolved(current.card)
        texts = model_fit.chunks(routed, current.card)
        fields = record_fields(routed, current, whole=len(texts) == 1) | dict(more) | {"encoding": current.encoding}
        if len(texts) > 1:
            fields |= _parent_fields(routed, texts, fields)
        if current.shadow is not None and shadows.is_sampled(current.shadow, fields, task_id):
            fields["shadow"] = current.shadow.to
        if (yield from _admit(directory, routed, task_id, current, fields, patience_s, charge, room)):
            break
        directory.forget(task.model)  # its routing has changed
        if (tries := tries + 1) == ROUTED_TIMES:
            raise _changed(current)
        current = None if resolved is None else replace(current, read_at=-math.inf)
    task = routed
    if moved is not None and resolved is not current:
        moved(current)
    if len(texts) > 1:
        yield from _submit_chunks(task, task_id, current, fields, texts, patience_s)
        return task_id
    tokens, tenant, at = int(fields["tokens"]), task.tenant or "", current.now_ms()
    queue, order_key, prefix = str(fields["queue"]), task.order_key or "", prefix_of(task, current.card)
    message = Message(task_id, queue, task.tier, task.width, tokens, tenant, at, order_key, prefix)
    try:
        yield from persistently(Send(message), patience_s)
    except FAILURES as error:
        if trouble(error) is Trouble.FULL and not named and (yield from _withdrawn(task_id, patience_s)):
            raise failed("The broker refused the task, which was withdrawn", error) from error
        raise failed(
            f"Task {task_id} is recorded, and the sweeper will send it: the broker did not take its message", error
        ) from error
    try:
        yield protocol.queued(task_id)
    except FAILURES as error:
        # The message was sent. At worst the sweeper sends a second one, which finds the task claimed.
        log.info("task %s was sent but not marked queued: %s", task_id, error_text(error))
    return task_id


def _current(
    directory: Directory, task: Task, resolved: ResolvedModel | None, patience_s: float, *, withdrawn: bool
) -> Steps[ResolvedModel]:
    """The version that the task goes to: `resolved`, while that is fresh. Raises SubmitFailed for one that has another
    tokenizer."""
    if resolved is not None and resolved.is_fresh:
        return resolved
    try:
        if resolved is None:
            return (yield from directory.find(task.model, patience_s, selection_of(task), withdrawn=withdrawn))
        current = yield from directory.again(resolved, patience_s, withdrawn=withdrawn)
    except FAILURES as error:
        response = "did not answer" if lost(error) else "refused"
        raise failed(f"The store {response}, nothing was queued", error) from error
    if current.encoding != resolved.encoding:
        raise _changed(resolved)
    return current


def _changed(resolved: ResolvedModel) -> SubmitFailed:
    return SubmitFailed(
        f"The model {shown(resolved.card['name'])} got another version while the prompt was made for version "
        f"{resolved.card['version']}; nothing was queued, submit it again",
        code="model_changed",
    )


def record_fields(task: Task, model: ResolvedModel, *, whole: bool = True) -> dict[str, str | int]:
    """The record's fields (`producers.contract.record`) that ADMIT writes for a resolved task. `whole`: False for a
    parent, whose chunks have its texts."""
    fields: dict[str, str | int] = {
        "task": task.to_json(texts=whole),
        "release": release(),
        "model": model.card["name"],
        "version": model.card["version"],
        "encoding": model.encoding,
        "queue": levels.queue_of(model.queue, task.level),
        "tier": task.tier,
        "n": task.n,
        "tokens": task.kv_tokens(int(model.card["context_length"])),
    }
    if model.generation:
        fields["generation"] = model.generation
    if model.alias:
        fields["alias"] = model.alias
    if model.drawn:
        fields["drawn"] = draw_of(model.selection, model.drawn)
    if task.version is not None:
        fields["named"] = task.version
    if task.adapter is not None:
        fields["adapter"] = task.adapter
    if task.form is not None:
        fields["form"] = task.form
    if task.kind != "generate":
        fields["result_bytes"] = model_fit.result_bytes(task, model.card)
    if task.level:
        fields["level"] = task.level
    if task.tenant is not None:
        fields["tenant"] = task.tenant
    if task.order_key is not None:
        fields["order_key"] = task.order_key
    if task.prompt_tokens is not None:
        fields["prompt_tokens"] = task.prompt_tokens
    if task.timeout is not None:
        fields["deadline"] = model.now_ms() + int(task.timeout * 1000)
    if task.ttl is not None:
        fields["ttl"] = task.ttl
    if task.metadata:
        fields["metadata"] = json.dumps(task.metadata)
    if task.webhook is not None:
        fields |= task.webhook.stored()
    return fields


def prefix_of(task: Task, card: Mapping[str, Any]) -> str:
    """The marks of a resolved task (`engine.prefix`) for its message; empty where no worker of its version places
    tasks, or where neither token ids nor an adapter are known."""
    block = card.get("marked_block", 0)
    tokens = () if isinstance(task.prompt, str) else task.prompt
    if not block or not (tokens or task.adapter):
        return ""
    version = str(card["version"])
    return "".join(prompt_marks(tokens, block, salt=task.tenant or "", adapter=task.adapter or "", version=version))


def _parent_fields(task: Task, texts: Sequence[range], fields: Mapping[str, str | int]) -> dict[str, str | int]:
    """Fields of a parent's record in place of a task's. `texts`: the numbers of each chunk's."""
    size = sum(len(item.encode()) if isinstance(item, str) else 4 * len(item) for item in task.input)
    return {
        "chunks": len(texts),
        "texts": len(task.input),
        "result_bytes": int(fields["result_bytes"]) + size,
    }


def _submit_chunks(
    task: Task,
    task_id: str,
    model: ResolvedModel,
    fields: Mapping[str, str | int],
    texts: Sequence[range],
    patience_s: float,
    number: int = 0,
) -> Steps[None]:
    """Queue a parent's chunks from `number` on, a portion at a time. Raises SubmitFailed."""
    shared: dict[str, str | int] = {name: fields[name] for name in SHARED if name in fields}
    shared |= {"origin": "chunk", "ttl": int(fields.get("ttl", protocol.DEFAULT_TTL_S)) + chunks.MARGIN_S}
    unsent: Exception | None = None
    while number < len(texts):
        portion: list[dict[str, str | int]] = []
        while number + len(portion) < len(texts) and sum(len(str(chunk["task"])) for chunk in portion) < PORTION:
            portion.append(_chunk_fields(task, texts[number + len(portion)], model))
        ids = [chunks.chunk_id(task_id, number + k) for k in range(len(portion))]
        call = chunks.write(task_id, number, shared, portion)
        try:
            status, count = yield from persistently(call, patience_s)
        except FAILURES as error:
            if not lost(error) and (yield from _withdrawn(task_id, patience_s)):
                raise failed(f"The store refused a part of task {task_id}, which was withdrawn", error) from error
            raise failed(
                f"The store did not confirm all of task {task_id}; what it has not recorded fails it", error
            ) from error
        if text(status) == "gone" or text(status) in FINAL:  # cancelled meanwhile, or late
            return
        first, number = number, int(count)
        if number <= first:
            raise SubmitFailed(f"The store has lost a part of task {task_id}, which fails; submit it again")
        if number != first + len(portion):  # an equal call goes on with the task, too, and sends these
            continue
        try:
            if unsent is None:
                yield from _send_chunks(ids, portion, shared, model, patience_s)
        except FAILURES as error:
            unsent = error
    if unsent is not None:
        raise failed(
            f"Task {task_id} is recorded, and the sweeper will send it: the broker did not take its messages", unsent
        ) from unsent


def submit_rest(directory: Directory, task: Task, task_id: str, patience_s: float) -> Steps[None]:
    """Queue the chunks that an earlier, equal call left unwritten when it died, if there are any. `task`: as it was
    given to that call. Raises SubmitFailed."""
    if len(task.input) < 2:
        return
    names = ("status", "chunks", "written", "ttl", *SHARED)
    try:
        (values,) = yield from persistently(Read((("HMGET", keys.task(task_id), *names),)), patience_s)
        fields = {name: text(value) for name, value in zip(names, values, strict=True) if value is not None}
        count, written = int(fields.get("chunks", 0)), int(fields.get("written", 0))
        if written >= count or fields["status"] in FINAL:
            return
        version = Selection(fields["version"])
        model = yield from directory.find(fields["model"], patience_s, version, withdrawn=True)
    except UnknownModel:  # nobody can make them any more; the sweeper ends the task
        return
    except FAILURES as error:
        raise failed(f"The store did not say whether all of task {task_id} is written", error) from error
    routed = task.resolved(model.card)
    texts = model_fit.chunks(routed, model.card)
    if len(texts) == count:
        yield from _submit_chunks(routed, task_id, model, fields, texts, patience_s, written)


def _chunk_fields(task: Task, texts: range, model: ResolvedModel) -> dict[str, str | int]:
    """A chunk's own fields (`producers.store.chunks.OWN_FIELDS`)."""
    update: dict[str, Any] = {
        "input": task.input[texts.start : texts.stop],
        "metadata": {},
        "timeout": None,
        "ttl": None,
    }
    chunk = task.model_copy(update=update)
    fields = record_fields(chunk, model)
    chunk_fields: dict[str, str | int] = {name: fields[name] for name in chunks.OWN_FIELDS if name in fields}
    return chunk_fields | {"offset": texts.start, "texts": len(texts)}


def _send_chunks(
    ids: Sequence[str],
    portion: Sequence[Mapping[str, str | int]],
    shared: Mapping[str, str | int],
    model: ResolvedModel,
    patience_s: float,
) -> Steps[None]:
    queue, tier, tenant, order = (str(shared.get(name, "")) for name in ("queue", "tier", "tenant", "order_key"))
    for name, chunk_fields in zip(ids, portion, strict=True):
        message = Message(name, queue, tier, 1, int(chunk_fields["tokens"]), tenant, model.now_ms(), order)
        yield from persistently(Send(message), patience_s)
    yield batches.queued(ids)


def _admit(
    directory: Directory,
    task: Task,
    task_id: str,
    model: ResolvedModel,
    fields: dict[str, str | int],
    patience_s: float,
    charge: Charge | None,
    room: Room | None,
) -> Steps[bool]:
    """ADMIT. Returns False if the model's routing has changed, and leads to this version no more."""
    names, charge_json = (
        ((), "") if charge is None else (charge.names, charge.request_json(task, model.card, int(fields["tokens"])))
    )
    bounds = "" if room is None else room.to_json(model.queue, task.tier, task.tenant or "")
    now_ms, nonce = model.now_ms(), uuid.uuid4().hex
    generation = None if model.named else model.generation
    call = protocol.admit(
        task_id, nonce, now_ms, fields, accounts=names, charge=charge_json, bounds=bounds, generation=generation
    )
    try:
        answer = yield from persistently(call, patience_s)
    except FAILURES as error:
        if not lost(error):
            raise failed(f"The store refused task {task_id}, nothing was queued", error) from error
        raise failed(
            f"The store did not confirm task {task_id}; if it was recorded, the sweeper will send it", error
        ) from error
    if isinstance(answer, list):
        begins = text(answer[0])
        if begins == "full":
            raise refused(answer)
        if begins == "storage":
            raise SubmitFailed(_no_room(task, int(answer[1]), int(answer[2])), CODES[Trouble.FULL])
        if charge is not None:
            charge.apply_answer(begins, answer, charge_json)
        return True
    answer = text(answer)
    if answer == "rerouted":
        return False
    if answer == "exists":
        raise TaskExists(f"There is a task {task_id} already; choose another id, or none to be given one")
    if answer == "erased":
        raise TaskErased(f"Task {task_id} was deleted, and its id is not used again so soon; choose another id")
    if answer == "late":
        # The machine may have slept, or the store failed over to a server with another clock: measure again.
        directory.forget(task.model)
        raise SubmitFailed(
            f"Task {task_id} reached the store more than {protocol.SUBMIT_WINDOW_MS // 1000} s after it was submitted "
            "and was not queued; submit it again"
        )
    return True


def _no_room(task: Task, used: int, limit: int) -> str:
    return (
        f"The store has no room for a task of the tier {task.tier}, which may fill {limit} bytes of it: {used} are in "
        "use, or promised to tasks that wait. Nothing was queued; try again later"
    )


def _withdrawn(task_id: str, patience_s: float) -> Steps[bool]:
    """Cancel a task whose message was refused, since its caller will submit it again. Returns whether it was accepted.

    Tasks with an id of the caller's choice are not withdrawn: the caller finds them by that id.
    """
    try:
        accepted, _ = yield from persistently(protocol.cancel(task_id), patience_s)
    except FAILURES:
        return False
    return bool(accepted)


def failed(message: str, error: Exception) -> SubmitFailed:
    """Returns the error for a submit that a server's error ended."""
    reason = trouble(error)
    return SubmitFailed(f"{message}: {ADVICE.get(reason, '')}{error_text(error)}", CODES.get(reason, "submit_failed"))
