"""Submits a task, as steps: look the model up, check the task, ADMIT its record, send its message, QUEUED.

Nothing is written before ADMIT. Every step may be repeated, so a lost reply is answered by a retry.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from engine.prefix import prompt_marks
from producers.client.steps import FAILURES, Read, Send, Steps, lost, persistently
from producers.connection.connect import SILENT_S
from producers.connection.script import parsed, text
from producers.connection.trouble import CODES, Trouble, error_text, trouble
from producers.contract import keys, levels, model_fit
from producers.contract.message import Message
from producers.contract.record import FINAL
from producers.contract.task import Task
from producers.errors import InvalidTask, SubmitFailed, TaskErased, TaskExists, TokenizerChanged, UnknownModel, shown
from producers.release import release
from producers.store import batches, chunks, protocol, shadows
from producers.store.fleet import adapters
from producers.store.fleet.cards import profile_field
from producers.store.fleet.routing import ANY, DEFAULT, NO_HEADERS, Routing, Selection, Shadow, draw_of
from producers.store.usage.limits import Charge
from producers.store.waiting import Room, refused

log = logging.getLogger(__name__)

#: Time (s) for which a model's card is cached.
FRESH_S: Final = 0.9
#: Time (s) beyond FRESH_S for which a request may still be submitted for the card with which its prompt was made.
PREPARED_S: Final = 3.0
#: Time (s) after a change of the card for which tasks of its former version may still come.
SETTLED_S: Final = FRESH_S + PREPARED_S + 3.0
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
#: Files of a card (`engine.text.files`) by which texts and messages become token ids.
ENCODING_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TASK_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The version of a model that a task goes to: its card and queue, as read from the store. `encoding`: the digest of
    the files by which the version makes token ids; `fingerprint`: of its version's pool, None while there is none or
    several; `clock_ms`: server time minus this process's monotonic time. `alias`: what led to it, empty where
    no alias did; `generation`: of the model's routing, 0 where it has none; `selection`: what the task said of it;
    `shadow`: the version that gets copies of a part of the model's tasks; `drawn`: the routing's `sticky`, where the
    split decided, or that there is none; empty where the task, a rule, or another task of its request did."""

    card: dict[str, Any]
    queue: str
    encoding: str
    fingerprint: str | None
    clock_ms: int
    read_at: float
    alias: str = ""
    generation: int = 0
    selection: Selection = ANY
    shadow: Shadow | None = None
    drawn: str = ""

    def of(self, selection: Selection) -> ResolvedModel:
        """The same for another task. Each submit calls it, and `replace` takes three times as long."""
        card, queue, encoding, fingerprint = self.card, self.queue, self.encoding, self.fingerprint
        resolution = (card, queue, encoding, fingerprint, self.clock_ms, self.read_at, self.alias, self.generation)
        return ResolvedModel(*resolution, selection, self.shadow, self.drawn)

    @property
    def named(self) -> bool:
        """Whether the task names this version itself, so that no routing decides."""
        return bool(self.selection.version == self.card["version"])

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


def encoding_of_card(card: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the files by which a version makes token ids of texts and messages."""
    files = {name: card.get("files", {}).get(name) for name in ENCODING_FILES}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Look:
    """What a look into the store said of a model: its routing, and its versions as far as they were asked for.
    `state`: the routing as the store has it. `targets`: what each target leads to, by whether the task names it, may
    wait for a withdrawn model, was drawn."""

    routing: Routing | None
    default: str
    versions: dict[str, ResolvedModel]
    pools: Sequence[Any]
    clock_ms: int
    at: float
    state: Any
    targets: dict[tuple[str, bool, bool, bool], ResolvedModel] = field(default_factory=dict)


class Directory:
    """A cache of the store's models. `ordered`: whether the broker keeps the order of a task's `order_key`."""

    def __init__(self, *, ordered: bool = False) -> None:
        self._models: dict[str, _Look] = {}
        self._adapters: dict[str, tuple[adapters.StoredAdapter, float]] = {}
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

    def find(
        self, model: str, patience_s: float, selection: Selection | None = None, *, withdrawn: bool = False
    ) -> Steps[ResolvedModel]:
        """Look a model up, in the version that a task goes to. `model`: its name, perhaps with `@` and an alias or
        version; `selection`: what the task says, None for the model's default.

        Raises UnknownModel, which names the models that take tasks, or the model's aliases and versions; also for a
        withdrawn model unless `withdrawn`, for a task that was accepted before and waits anyway; redis.RedisError or
        OSError.
        """
        name, at, version = model.partition("@")
        if at or selection is None:
            selection = replace(selection or ANY, version=version or DEFAULT)
        look = self._models.get(name)
        if look is None or time.monotonic() - look.at >= FRESH_S:
            located = yield from self._look(name, patience_s, withdrawn=withdrawn)
            if not isinstance(located, _Look):
                base = yield from self.find(located.base, patience_s, selection, withdrawn=withdrawn)
                return replace(base, card=located.card(base.card))
            look = located
        routing = look.routing
        target, drawn = (selection.version or DEFAULT, False) if routing is None else routing.route(selection)
        of_target = target, selection.version is not None, withdrawn, drawn
        if (resolution := look.targets.get(of_target)) is not None:
            return resolution.of(selection)
        version = look.default if target == DEFAULT else target if routing is None else routing.version_at(target)
        resolved = look.versions.get(version)
        if resolved is None:
            field = profile_field(name, version)
            (raw,) = yield from persistently(Read((("HGET", keys.VERSIONS, field),)), patience_s)
            card = parsed(raw)
            if card.get("version") != version:
                message = yield from _no_version(name, target, look, patience_s)
                raise UnknownModel(message, param="model", code="model_not_found")
            resolved = look.versions[version] = _resolved(name, card, look)
        if selection.version is not None and not withdrawn and not _is_served(name, version, look):
            raise UnknownModel(
                f"No worker serves the version {version} of the model {shown(name)}, and its routing names it no more: "
                f"start a worker of it, or `penstock models alias {name} NAME={version}`",
                param="model",
                code="model_not_found",
            )
        if (
            routing is not None
            and selection.version is not None
            and not withdrawn
            and routing.stage(version) == "archived"
        ):
            raise UnknownModel(
                f"The version {version} of the model {shown(name)} is archived and gets no new tasks: name another "
                f"one, or `penstock models stage {name} {version}=staging`",
                param="model",
                code="model_not_found",
            )
        if routing is not None:
            alias = target if target == DEFAULT or target in routing.aliases else ""
            resolved = replace(
                resolved,
                alias=alias,
                generation=routing.generation,
                shadow=routing.copied_to(),
                drawn=routing.sticky if drawn else "",
            )
        elif selection.version == DEFAULT:
            resolved = replace(resolved, alias=DEFAULT)
        look.targets[of_target] = resolved
        return resolved.of(selection)

    def again(self, resolved: ResolvedModel, patience_s: float, *, withdrawn: bool = False) -> Steps[ResolvedModel]:
        """The version of `resolved`, if such tasks may go there still; else as `find`."""
        card = resolved.card
        current = yield from self.find(card["name"], patience_s, resolved.selection, withdrawn=withdrawn)
        look, version = self._models.get(card.get("parent", card["name"])), card["version"]
        if look is None or look.routing is None or not look.routing.leads_to(version):
            return current
        return replace(resolved, generation=look.routing.generation, read_at=look.at)

    def _look(self, name: str, patience_s: float, *, withdrawn: bool) -> Steps[_Look | adapters.StoredAdapter]:
        """Look a model up in the store; the adapter, where it is the name of one, or BASE:NAME."""
        adapter, at = self._adapters.get(name, (None, -math.inf))
        if adapter is not None and time.monotonic() - at < FRESH_S:
            return adapter
        # The routing first: of what is changed meanwhile, ADMIT sees that the generation is another.
        # With what the last look needed besides, so that routing takes no second round trip.
        before = self._models.get(name)
        others: list[str] = []
        if before is not None and before.routing is not None:
            others = sorted(before.routing.versions() & {*before.versions} - {before.default})
        commands = (
            ("TIME",),
            ("HGET", keys.routing(name), "now"),
            ("HGET", keys.MODELS, name),
            ("HVALS", keys.POOLS),
            *(("HGET", keys.VERSIONS, profile_field(name, version)) for version in others),
        )
        now, state, raw, pools, *stored = yield from persistently(Read(commands), patience_s)
        card = None if raw is None else json.loads(raw)
        hidden = card is not None and "withdrawn" in card
        if card is None or hidden:
            self._models.pop(name, None)
        if card is None and (adapter := (yield from self._adapter(name, patience_s))) is not None:
            return adapter
        if card is None or (hidden and not withdrawn):
            (cards,) = yield from persistently(Read((("HGETALL", keys.MODELS),)), patience_s)
            names = list(listed(cards))
            message = _unknown(name, names) if card is None else _withdrawn_text(name, names)
            raise UnknownModel(message, param="model", code="model_not_found")
        clock_ms = int(now[0]) * 1000 + int(now[1]) // 1000 - _monotonic_ms()
        default = str(card["version"])
        if before is not None and before.state == state and before.default == default:
            routing = before.routing
        elif (routing := Routing.of(name, state)) is not None:
            routing = replace(routing, default=default)
        look = _Look(routing, default, {}, pools, clock_ms, time.monotonic(), state)
        for version, other in zip(others, map(parsed, stored), strict=True):
            if other.get("version") == version:
                look.versions[version] = _resolved(name, other, look)
        look.versions[default] = _resolved(name, card, look)
        if not hidden:
            self._models[name] = look
        return look

    def _adapter(self, model: str, patience_s: float) -> Steps[adapters.StoredAdapter | None]:
        base, name = adapters.names_of(model)
        (raw,) = yield from persistently(Read((("HGET", keys.ADAPTERS, name),)), patience_s)
        adapter = adapters.StoredAdapter.parse(raw)
        if adapter is None or base not in ("", adapter.base):
            self._adapters.pop(model, None)
            return None
        self._adapters[model] = adapter, time.monotonic()
        return adapter

    def forget(self, model: str) -> None:
        """Drop a model from the cache."""
        name = model.partition("@")[0]
        adapter, _ = self._adapters.pop(name, (None, 0.0))
        self._models.pop(name if adapter is None else adapter.base, None)


def _resolved(name: str, card: dict[str, Any], look: _Look) -> ResolvedModel:
    return ResolvedModel(
        card=card,
        queue=keys.version_queue(name, card["version"]),
        encoding=encoding_of_card(card),
        fingerprint=_only_fingerprint(look.pools, name, card["version"]),
        clock_ms=look.clock_ms,
        read_at=look.at,
    )


def _is_served(name: str, version: str, look: _Look) -> bool:
    """Whether somebody looks after the queue of a version: it has a pool, or new tasks may come without naming it."""
    if version == look.default or (look.routing is not None and look.routing.leads_to(version)):
        return True
    pools = map(json.loads, look.pools)
    return any((pool["model"], pool.get("version")) == (name, version) for pool in pools)


def _no_version(name: str, target: str, look: _Look, patience_s: float) -> Steps[str]:
    (raw,) = yield from persistently(Read((("HKEYS", keys.VERSIONS),)), patience_s)
    fields = (text(field).rpartition("@") for field in raw)
    versions = sorted({look.default, *(version for model, _, version in fields if model == name)})
    aliases = sorted({DEFAULT, *(look.routing.aliases if look.routing is not None else ())})
    return (
        f"The model {shown(name)} has no version or alias {shown(target)}; its aliases are {', '.join(aliases)}, its "
        f"versions {', '.join(versions[:10])}"
    )


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
    if resolved is not None and time.monotonic() - resolved.read_at < FRESH_S + PREPARED_S:
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


def selection_of(task: Task, headers: Mapping[str, str] = NO_HEADERS, sticky: str | None = None) -> Selection:
    """What a task says about its version. `headers`: those of its request, with lower-case names; `sticky`: its key,
    unless the task has one."""
    return Selection(task.version, task.sticky or sticky, task.tenant, task.tier, headers)


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
    base, adapter = adapters.names_of(model)
    if base in names:
        more = "`penstock adapters ls` lists them, `penstock adapters add` adds one"
        return f"The model {shown(base)} has no adapter {shown(adapter)}; {more}"
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
