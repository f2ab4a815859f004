"""Finds the version of a model that a task goes to, as steps, by a cache of the store's models and their routing."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from producers.client.steps import Read, Steps, persistently
from producers.connection.script import parsed, text
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import InvalidTask, UnknownModel, shown
from producers.store.fleet import adapters
from producers.store.fleet.cards import profile_field
from producers.store.fleet.routing import ANY, DEFAULT, NO_HEADERS, Routing, Selection, Shadow

#: Time (s) for which a model's card is cached.
FRESH_S: Final = 0.9
#: Time (s) beyond FRESH_S for which a request may still be submitted for the card with which its prompt was made.
PREPARED_S: Final = 3.0
#: Time (s) after a change of the card for which tasks of its former version may still come.
SETTLED_S: Final = FRESH_S + PREPARED_S + 3.0
#: Files of a card (`engine.text.files`) by which texts and messages become token ids.
ENCODING_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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

    @property
    def is_fresh(self) -> bool:
        """Whether a prompt that was made for it may still be submitted without another look into the store."""
        return time.monotonic() - self.read_at < FRESH_S + PREPARED_S

    def now_ms(self) -> int:
        """Estimated server time (ms); never ahead of it unless a clock was set."""
        return self.clock_ms + _monotonic_ms()

    def reads(self, encoding: str) -> bool:
        """Whether token ids with this encoding (`encoding_of`) are the same text for this version."""
        return encoding in (self.encoding, f"@{self.card['version']}")


def encoding_of(record: Mapping[str, str]) -> str:
    """Digest of the encoding that made a record's token ids; `@` and its version for one of an earlier release, which
    has no digest."""
    return record.get("encoding") or f"@{record.get('version', '')}"


def encoding_of_card(card: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the files by which a version makes token ids of texts and messages."""
    files = {name: card.get("files", {}).get(name) for name in ENCODING_FILES}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Look:
    """Routing of a model as read from the store, and its versions as far as they were asked for.
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


def selection_of(task: Task, headers: Mapping[str, str] = NO_HEADERS, sticky: str | None = None) -> Selection:
    """What a task says about its version. `headers`: those of its request, with lower-case names; `sticky`: its key,
    unless the task has one."""
    return Selection(task.version, task.sticky or sticky, task.tenant, task.tier, headers)


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
