"""Submits a task, as steps: look the model up, check the task, ADMIT its record, send its message, QUEUED.

Nothing is written before ADMIT. Every step may be repeated, so a lost reply is answered by a retry.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from producers.client.steps import FAILURES, Read, Send, Steps, lost, persistently
from producers.connection.connect import SILENT_S
from producers.connection.script import parsed, text
from producers.connection.trouble import CODES, Trouble, error_text, trouble
from producers.contract import keys, levels
from producers.contract.message import Message
from producers.contract.record import FINAL
from producers.contract.task import Task
from producers.errors import InvalidTask, SubmitFailed, TaskErased, TaskExists, TokenizerChanged, UnknownModel, shown
from producers.release import release
from producers.store import batches, chunks, protocol
from producers.store.fleet import adapters
from producers.store.usage.limits import Charge
from producers.store.waiting import Room, refused

log = logging.getLogger(__name__)

#: Time (s) for which a model's card is cached.
FRESH_S: Final = 2.0
#: Time (s) beyond FRESH_S for which a request may still be submitted for the card with which its prompt was made.
PREPARED_S: Final = 3.0
#: Time (s) after a change of the card for which tasks of its former version may still come.
SETTLED_S: Final = FRESH_S + PREPARED_S + 3.0
#: Longest patience: the last try of ADMIT must be within the submit window.
MAX_PATIENCE_S: Final = protocol.SUBMIT_WINDOW_MS / 1000 - SILENT_S
ADVICE: Final[dict[Trouble | None, str]] = {
    Trouble.FULL: "its memory or disk is full, so that nothing new is taken until tasks have ended; try again later. "
}
#: Fields of a record whose task its caller reads by its id (`origin` in `producers.contract.record`).
TASK: Final[dict[str, str | int]] = {"origin": "task"}
#: Fields of a record, beside the task itself, that another run of the task has, too.
KEPT: Final = ("webhook", "webhook_secret", "reply")
#: Fields of a parent's record that its chunks have, too.
SHARED: Final = (
    *(
        "release",
        "model",
        "version",
        "encoding",
        "queue",
        "tier",
        "n",
        "level",
        "tenant",
        "order_key",
        "deadline",
        "key",
    ),
    "traceparent",
)
#: Characters of chunks' JSON after which the next ones are written in another script.
PORTION: Final = 1 << 20
#: Files of a card (`engine.text.files`) by which texts and messages become token ids.
ENCODING_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TASK_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model's card and queue, as read from the store. `encoding`: the digest of the files by which the version makes
    token ids; `fingerprint`: of its version's pool, None while there is none or several; `clock_ms`: server time minus
    this process's monotonic time."""

    card: dict[str, Any]
    queue: str
    encoding: str
    fingerprint: str | None
    clock_ms: int
    read_at: float

    def now_ms(self) -> int:
        """Estimated server time (ms); never ahead of it unless a clock was set."""
        return self.clock_ms + _monotonic_ms()

    def reads(self, encoding: str) -> bool:
        """Whether token ids with this encoding (`encoding_of`) are the same text for this version."""
        return encoding in (self.encoding, f"@{self.card['version']}")


def encoding_of(record: Mapping[str, str]) -> str:
    """What made the token ids of a record with these fields: a digest; for one of an earlier release, which has none,
    `@` and its version."""
    return record.get("encoding") or f"@{record.get('version', '')}"


def _encoding_of_card(card: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the files by which a version makes token ids of texts and messages."""
    files = {name: card.get("files", {}).get(name) for name in ENCODING_FILES}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


class Directory:
    """A cache of the store's models. `ordered`: whether the broker keeps the order of a task's `order_key`."""

    def __init__(self, *, ordered: bool = False) -> None:
        self._models: dict[str, ResolvedModel] = {}
        self._ordered = ordered

    def check(self, task: Task) -> None:
        """Raise InvalidTask if the task needs a feature that the broker lacks."""
        if task.order_key is not None and not self._ordered:
            raise InvalidTask(
                f"order_key is {shown(task.order_key)}, and this broker keeps no order per key; leave order_key out, "
                "or use FIFO queues (a broker like sqs://us-east-1?prefix=pen-&fifo=1)",
                param="order_key",
                code="unsupported_parameter",
            )

    def find(self, model: str, patience_s: float, *, withdrawn: bool = False) -> Steps[ResolvedModel]:
        """Look a model up. Raises UnknownModel, which names the models that take tasks, also for a withdrawn one
        unless `withdrawn`, for a task that was accepted before and waits anyway; redis.RedisError or OSError."""
        resolved = self._models.get(model)
        if resolved is not None and time.monotonic() - resolved.read_at < FRESH_S:
            return resolved
        commands = (("TIME",), ("HGET", keys.MODELS, model), ("HVALS", keys.POOLS))
        now, card, pools = yield from persistently(Read(commands), patience_s)
        read = None if card is None else json.loads(card)
        hidden = read is not None and "withdrawn" in read
        if read is None or hidden:
            self._models.pop(model, None)
        if read is None:
            adapter = yield from self._adapter(model, patience_s, withdrawn=withdrawn)
            if adapter is not None:
                return adapter
        if read is None or (hidden and not withdrawn):
            (cards,) = yield from persistently(Read((("HGETALL", keys.MODELS),)), patience_s)
            names = list(listed(cards))
            message = _unknown(model, names) if read is None else _withdrawn_text(model, names)
            raise UnknownModel(message, param="model", code="model_not_found")
        resolved = ResolvedModel(
            card=read,
            queue=keys.version_queue(model, read["version"]),
            encoding=_encoding_of_card(read),
            fingerprint=_only_fingerprint(pools, model, read["version"]),
            clock_ms=int(now[0]) * 1000 + int(now[1]) // 1000 - _monotonic_ms(),
            read_at=time.monotonic(),
        )
        if not hidden:
            self._models[model] = resolved
        return resolved

    def _adapter(self, model: str, patience_s: float, *, withdrawn: bool) -> Steps[ResolvedModel | None]:
        """The base's queue, with the adapter's card, of a model that is the name of an adapter, or BASE:NAME."""
        base, name = adapters.names_of(model)
        (raw,) = yield from persistently(Read((("HGET", keys.ADAPTERS, name),)), patience_s)
        adapter = adapters.StoredAdapter.parse(raw)
        if adapter is None or base not in ("", adapter.base):
            return None
        resolved = yield from self.find(adapter.base, patience_s, withdrawn=withdrawn)
        resolved = replace(resolved, card=adapter.card(resolved.card))
        if "withdrawn" not in resolved.card:
            self._models[model] = resolved
        return resolved

    def forget(self, model: str) -> None:
        """Drop a model from the cache."""
        self._models.pop(model, None)


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
) -> Steps[str]:
    """Queue the task and return its id. Raises InvalidTask, UnknownModel, TaskExists, LimitReached, QueueFull,
    SubmitFailed.

    `more`: fields of its record beside those of the task itself. `charge`: the accounts that it is charged to. `room`:
    its bounds on waiting tasks. `resolved`: the model as the caller found it, if the prompt was made for its version;
    no other version gets the task. `withdrawn`: the task may wait for a model that nobody serves, as of
    `Directory.find`.
    Raises TokenizerChanged, too, if `more` has the `encoding` of token ids that the task takes from an earlier one.
    """
    if task_id is not None and (type(task_id) is not str or not TASK_ID.fullmatch(task_id)):
        raise InvalidTask(
            f"task_id is {shown(task_id)}; it must have 1 to 128 of the characters A-Z a-z 0-9 _ . : -", param="task_id"
        )
    directory.check(task)
    try:
        if resolved is not None and time.monotonic() - resolved.read_at < FRESH_S + PREPARED_S:
            current = resolved
        else:
            current = yield from directory.find(task.model, patience_s, withdrawn=withdrawn)
    except FAILURES as error:
        response = "did not answer" if lost(error) else "refused"
        raise failed(f"The store {response}, nothing was queued", error) from error
    if resolved is not None and current.card["version"] != resolved.card["version"]:
        raise SubmitFailed(
            f"The model {shown(task.model)} got another version while the prompt was made for version "
            f"{resolved.card['version']}; nothing was queued, submit it again",
            code="model_changed",
        )
    if not current.reads(str(more.get("encoding", current.encoding))):
        raise TokenizerChanged(
            f"The token ids of task {more.get('retried_from', task_id)} were made by another tokenizer or chat "
            f"template than those of the current version of {shown(task.model)}, for which they would be another text. "
            "Nothing was queued; submit a new task with its text"
        )
    task = task.resolved(current.card)
    named, task_id = task_id is not None, task_id or str(uuid.uuid4())
    texts = task.chunks(current.card)
    fields = record_fields(task, current, whole=len(texts) == 1) | dict(more) | {"encoding": current.encoding}
    if len(texts) > 1:
        fields |= _parent_fields(task, texts, fields)
        yield from _admit(directory, task, task_id, current, fields, patience_s, charge, room)
        yield from _submit_chunks(task, task_id, current, fields, texts, patience_s)
        return task_id
    yield from _admit(directory, task, task_id, current, fields, patience_s, charge, room)
    tokens, tenant, at = int(fields["tokens"]), task.tenant or "", current.now_ms()
    message = Message(task_id, str(fields["queue"]), task.tier, task.width, tokens, tenant, at, task.order_key or "")
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
    if task.adapter is not None:
        fields["adapter"] = task.adapter
    if task.kind != "generate":
        fields["result_bytes"] = task.result_bytes(model.card)
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
) -> Steps[None]:
    """Queue a parent's chunks, a portion at a time. Raises SubmitFailed."""
    shared: dict[str, str | int] = {name: fields[name] for name in SHARED if name in fields}
    shared |= {"origin": "chunk", "ttl": int(fields.get("ttl", protocol.DEFAULT_TTL_S)) + chunks.MARGIN_S}
    unsent: Exception | None = None
    number = 0
    while number < len(texts):
        portion: list[dict[str, str | int]] = []
        while number + len(portion) < len(texts) and sum(len(str(own["task"])) for own in portion) < PORTION:
            portion.append(_chunk_fields(task, texts[number + len(portion)], model))
        ids = [chunks.chunk_id(task_id, number + k) for k in range(len(portion))]
        call = chunks.write(task_id, number, shared, portion)
        try:
            status, made = yield from persistently(call, patience_s)
        except FAILURES as error:
            if not lost(error) and (yield from _withdrawn(task_id, patience_s)):
                raise failed(f"The store refused a part of task {task_id}, which was withdrawn", error) from error
            raise failed(
                f"The store did not confirm all of task {task_id}; what it has not recorded fails it", error
            ) from error
        number += len(portion)
        if text(status) == "gone" or text(status) in FINAL:  # cancelled meanwhile, or late
            return
        if int(made) < number:
            raise SubmitFailed(f"The store has lost a part of task {task_id}, which fails; submit it again")
        try:
            if unsent is None:
                yield from _send_chunks(ids, portion, shared, model, patience_s)
        except FAILURES as error:
            unsent = error
    if unsent is not None:
        raise failed(
            f"Task {task_id} is recorded, and the sweeper will send it: the broker did not take its messages", unsent
        ) from unsent


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
    own: dict[str, str | int] = {name: fields[name] for name in chunks.OWN_FIELDS if name in fields}
    return own | {"offset": texts.start, "texts": len(texts)}


def _send_chunks(
    ids: Sequence[str],
    portion: Sequence[Mapping[str, str | int]],
    shared: Mapping[str, str | int],
    model: ResolvedModel,
    patience_s: float,
) -> Steps[None]:
    queue, tier, tenant, order = (str(shared.get(name, "")) for name in ("queue", "tier", "tenant", "order_key"))
    for name, own in zip(ids, portion, strict=True):
        message = Message(name, queue, tier, 1, int(own["tokens"]), tenant, model.now_ms(), order)
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
) -> Steps[None]:
    names, charge_json = (
        ((), "") if charge is None else (charge.names, charge.request_json(task, model.card, int(fields["tokens"])))
    )
    bounds = "" if room is None else room.to_json(model.queue, task.tier, task.tenant or "")
    now_ms, nonce = model.now_ms(), uuid.uuid4().hex
    call = protocol.admit(task_id, nonce, now_ms, fields, accounts=names, charge=charge_json, bounds=bounds)
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
        return
    answer = text(answer)
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


def _only_fingerprint(pools: Sequence[Any], model: str, version: str) -> str | None:
    """Returns the fingerprint of the version's pool; None if it has no pool, or several."""
    matching = [pool for pool in map(json.loads, pools) if (pool["model"], pool.get("version")) == (model, version)]
    matching = [pool for pool in matching if pool.get("fingerprint") != keys.UNSERVED]
    return matching[0].get("fingerprint") if len(matching) == 1 else None


def listed(cards: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """The cards of all models that take tasks, in the order of their names. `cards`: HGETALL's answer."""
    by_name = {text(name): parsed(card) for name, card in sorted(cards.items())}
    return {name: card for name, card in by_name.items() if "withdrawn" not in card}


def _unknown(model: str, names: list[str]) -> str:
    if not names:
        none = f"There is no model {shown(model)}: none is published in this store"
        return f"{none}; `penstock models publish` lets tasks wait for a worker, or start a worker"
    return f"There is no model {shown(model)}; {_names(names)}; `penstock models publish` adds one"


def _withdrawn_text(model: str, names: list[str]) -> str:
    others = f"; {_names(names)}" if names else ""
    return (
        f"Nobody serves the model {shown(model)}, and nothing starts a worker for it: start one (`penstock up` or "
        f"`penstock worker`, with --model), or let tasks wait for one (`penstock models publish`){others}"
    )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"models here: {', '.join(names[:20])}{more}"


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
