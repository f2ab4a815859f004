"""The store's data of models: cards, the files that cards name, and profiles of what workers measured.

The hash `penstock:models` has the cards: the card of a name decides which version its new tasks go to, unless its
routing sends some to other versions (`producers.store.fleet.routing`). The hash `penstock:versions` has a card of each
version that was announced or published, under `model@version`, for what a routing names.

A worker that starts announces its model; an operator publishes one, with no worker up. The result:

    before                          a worker announced              somebody published
    nothing, or not published       the worker's card               the publisher's card
    published, of the same version  the worker's, still published   the publisher's, with WORKER_FIELDS
    published, of another version   unchanged                       the publisher's card
    withdrawn, of the same version  the worker's, still published   the publisher's, with WORKER_FIELDS
    withdrawn, of another version   the worker's card               the publisher's card

So new workers may come up while new tasks still go to the version before, and an old worker that starts again turns
nothing back. Only workers know WORKER_FIELDS: `context_length`, if theirs is set shorter, `kv_capacity`,
`watermark`, if they have keys, and `marked_block`, the tokens of a block, if they place tasks
(docs/how/placement.md): the latter two are those of the worker that announced last.
They write it into their pool's entry first, and into the card if that is of their version. A publisher writes the card
first, and then reads the pools. So either sees the other.

A published card says who published it: `publisher` is `cli:USER@HOST` of `penstock models publish`,
`up:HOST.PID.ID-PLACE` of `penstock up`, `rollout:USER@HOST` of a rolling update that nobody had published before. An
earlier release wrote none, and its workers leave it out of a card that they announce: the sweeper that leads writes it
again if it has seen it.
Only what an operator published, or an earlier release, lets tasks wait for a worker that nobody starts. Any other model
that no worker serves and no autoscaler scales is **withdrawn**: its card stays, with `withdrawn`, and clients neither
list the model nor send it tasks. Whoever announces or publishes it writes a card without that.

    who withdraws                                               when
    `penstock up`, its own models                               at its end
    the next `penstock up`, those of one that has died          at its start, if that ran in this place: host,
                                                                system's start, namespace of process ids
    the sweeper that leads, all others                          a minute after nobody served or scaled them

A withdrawal replaces the card that was looked at (SWAP), so a worker that announces the model meanwhile wins. The
sweeper gives a model back that is served or scaled again. A worker of any version that sees its model withdrawn
announces it, as nobody else serves it: the card is of its version then.

A version whose card is replaced may have tasks in its queue, but no pool that names them: no worker was ever up, or
a sweeper has forgotten its pool. It then gets the pool `unserved`, which a sweeper forgets once nothing is left.

    dies after          what remains                                    who repairs it
    files               files that no card names                        the sweeper removes them
    a pool's entry      a pool without workers                          the sweeper forgets it
    the card            a card, perhaps without WORKER_FIELDS           the next worker; a task too large fails
    `up`, its workers   a card that is listed                           the next `up`, or the sweeper: withdrawn
    some withdrawals    the others are listed                           the same
    `rm`: kept pool     the pool `unserved` beside the card             the sweeper forgets it
    `rm`: card          the model's routing                             who announces or publishes it: removed

Files lie in the store as `penstock:blob:<sha256>`: written once, read by gateways, removed once no card names them. The
hash `penstock:profiles` has one profile (`producers.contract.profile`) under each `model@version`, so that it is known
with no worker up.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping
from dataclasses import asdict, replace
from typing import Any

from redis import Redis, WatchError
from redis.asyncio import Redis as AsyncRedis

from producers.connection.script import Call, arun, parsed, run, script, text
from producers.contract import keys
from producers.contract.profile import Profile
from producers.store.access.audit import Change, operator
from producers.store.fleet import routing
from producers.store.protocol import PACKAGE, enter, swap

#: A card's keys that workers set.
WORKER_FIELDS = ("context_length", "kv_capacity", "watermark", "marked_block")
#: A card's keys that say how its model is published, not what the version is.
OF_MODEL = ("published", "publisher", "served", "withdrawn")
#: Versions of a model whose cards are kept, though nothing serves or names them.
KEPT_VERSIONS = 10
#: How the publishers begin whose models are withdrawn once nobody serves or scales them.
UP, ROLLOUT = "up:", "rollout:"


def put_file(store: Redis, sha256: str, data: bytes) -> None:
    """Write the file unless it exists: it is megabytes, and its name is its hash."""
    if not store.exists(keys.blob(sha256)):
        store.set(keys.blob(sha256), data, nx=True)


async def get_file(store: AsyncRedis, sha256: str) -> bytes | None:
    """The file's bytes; None if it is missing. The reader compares them with the name."""
    data: bytes | None = await store.execute_command("GET", keys.blob(sha256))
    return data


async def file_names(store: AsyncRedis) -> AsyncIterator[str]:
    """The SHA-256 of all files."""
    async for key in store.scan_iter(match=keys.blob("*"), count=1000):
        yield text(key).removeprefix(keys.blob(""))


async def remove_unused_file(store: AsyncRedis, sha256: str) -> bool:
    """Remove a file unless a card names it, in one step. False if one does, or the file is missing."""
    return bool(await arun(store, unused_file(sha256)))


def unused_file(sha256: str) -> Call:
    """Answers 1 where the blob was there, and no card of a model or version named it."""
    return Call(script(PACKAGE, "unused"), (keys.MODELS, keys.VERSIONS, keys.blob(sha256)), (sha256,))


Card = dict[str, Any]


def announce(store: Redis, card: Card, pool: keys.Pool, files: Mapping[str, bytes]) -> Card:
    """Write a worker's model: its files, its pool, and the card by the rule above. Returns the current card.

    `card`: the model's own, with the worker's WORKER_FIELDS. Raises redis.RedisError or OSError; may be called again.
    """
    worker_fields = {name: card[name] for name in WORKER_FIELDS if name in card}
    # When: a sweeper that is about to forget the pool sees that it is back.
    pool_entry = {**asdict(pool), **worker_fields, "announced": _now_ms()}

    def change(before: Card | None) -> Card | None:
        if not takes_new(before, card["version"]) or not _may_be_default(store, card, before):
            return None
        kept = before if before is not None and before["version"] == card["version"] else {}
        return _learnt(card, before) | {name: kept[name] for name in ("published", "publisher") if name in kept}

    entry = enter(pool.queue, json.dumps(pool_entry), keys.pool_queue(pool.model, pool.version, keys.UNSERVED))

    def first() -> None:
        run(store, entry)
        _keep_version(store, card, announced=True)

    return _put(store, card, files, change, first)


def publish(
    store: Redis, card: Card, files: Mapping[str, bytes], over: str | None = None, publisher: str | None = None
) -> Card:
    """Write a model's card and files, with no worker up. Returns the current card.

    `over`: only if the current version is this one, or the card's own. `publisher`: an `up` or a rollout; None: the
    operator. What an operator has published of the same version stays the operator's. Errors as of `announce`, and
    RoutingError for a version whose stage does not let it be the default.
    """

    def change(before: Card | None) -> Card | None:
        current = before and before["version"]
        if over is not None and current not in (over, card["version"]):
            return None
        new = card | {"published": _now_ms(), "served": False} | _publisher(publisher, before, card["version"])
        if before is not None and current == card["version"]:
            new |= {name: before[name] for name in WORKER_FIELDS if name in before}
            new["served"] = before.get("served", "published" not in before)
        return new

    audit = _published(card["name"], card["version"])
    _put(store, card, files, change, lambda: _keep_version(store, card), audit)
    return _write(store, card["name"], lambda before: _with_worker_fields(store, card["version"], before))


def pin(store: Redis, name: str, version: str) -> Card:
    """Publish the current card if it has this version, so that no worker replaces it. Returns the current card."""

    def change(before: Card | None) -> Card | None:
        if before is None or before["version"] != version or "published" in before:
            return None
        return before | {"published": _now_ms(), "served": True, "publisher": rollout_publisher()}

    return _write(store, name, change, _published(name, version))


def check_default(store: Redis, name: str, version: str) -> None:
    """Raise RoutingError if the version's stage does not let it be the default."""
    current = routing.read(store, name)
    if current is not None:
        routing.staged(replace(current, default=version))


def rollout_publisher(before: Card | None = None) -> str | None:
    """The publisher of a rollout's new card: that of the card before, or the rollout's own. None: the operator, or an
    earlier release."""
    if before is None or "published" not in before:
        return operator().replace("cli:", ROLLOUT, 1)
    return None if waits_alone(before) else str(before["publisher"])


def waits_alone(card: Card) -> bool:
    """Whether tasks may wait for this model though nobody serves or scales it."""
    return "published" in card and not str(card.get("publisher", "")).startswith((UP, ROLLOUT))


def withdraw(raw: str | bytes, card: Card) -> Call:
    """SWAP: withdraw a model whose card is stored as `raw`. Answers 0 if its card has changed."""
    return swap(keys.MODELS, card["name"], text(raw), json.dumps(card | {"withdrawn": _now_ms()}))


def name_publisher(raw: str | bytes, card: Card, publisher: str) -> Call:
    """SWAP: name the publisher again that a worker of an earlier release has left out. Answers as `withdraw`."""
    return swap(keys.MODELS, card["name"], text(raw), json.dumps(card | {"publisher": publisher}))


def offer(raw: str | bytes, card: Card) -> Call:
    """SWAP: list a withdrawn model again. Answers as `withdraw`."""
    return swap(keys.MODELS, card["name"], text(raw), json.dumps(_offered(card)))


def take_over(store: Redis, name: str, publisher: str) -> None:
    """List the model again, as published by this `up` if its card is another one's. An operator's stays."""

    while True:
        raw: Any = store.hget(keys.MODELS, name)
        card = _parsed(raw)
        if card is None:
            return
        mine = "published" in card and not waits_alone(card)
        new = _offered(card) | ({"publisher": publisher} if mine else {})
        if run(store, swap(keys.MODELS, name, text(raw), json.dumps(new))):
            return


def remove(store: Redis, name: str, raw: str | bytes, version: str) -> bool:
    """Remove the card that is stored as `raw`; tasks of its version that wait are kept. False if it has changed."""
    keep_known(store, name, version)
    change = Change(operator(), "model.remove", f"{name}@{version}")
    if not run(store, swap(keys.MODELS, name, text(raw), "", audit=change)):
        return False
    change.say()
    store.hdel(keys.ROLLOUTS, name)
    store.unlink(keys.routing(name))
    return True


def add_version(store: Redis, card: Card, files: Mapping[str, bytes]) -> None:
    """Write a version's card and files, so that a routing may name it. New tasks go on as before.

    Raises redis.RedisError or OSError; may be called again.
    """
    for _ in range(2):  # again: a sweeper removes files that no card names, as these were until now
        for name, data in files.items():
            put_file(store, card["files"][name], data)
        _keep_version(store, card)
    keep_known(store, card["name"], card["version"])


def of_version(store: Redis, name: str, version: str) -> Card | None:
    """A version's card; None where nobody announced or published it, or a sweeper has removed it."""
    current = read(store, name)
    if current is not None and current["version"] == version:
        return current
    return _parsed(store.hget(keys.VERSIONS, profile_field(name, version)))


def versions_of(cards: Mapping[Any, Any], name: str) -> dict[str, Card]:
    """The cards of a model's versions, the newest first. `cards`: HGETALL's answer of VERSIONS."""
    parsed_ = (_parsed(raw) for field, raw in cards.items() if text(field).rpartition("@")[0] == name)
    version_cards = sorted((card for card in parsed_ if card is not None), key=lambda card: -int(card.get("at", 0)))
    return {card["version"]: card for card in version_cards}


def unused_versions(cards: Mapping[Any, Any], used: Container[tuple[str, str]], models: Container[str]) -> list[Call]:
    """SWAPs that remove the cards of versions that are not among the newest KEPT_VERSIONS of those of their model that
    are not `used`: (model, version). Of a model that is none of `models` none is kept. `cards`: HGETALL's answer of
    VERSIONS."""
    by_model: dict[str, list[tuple[int, str, str]]] = {}
    for field, raw in cards.items():
        name, _, version = text(field).rpartition("@")
        if (name, version) not in used:
            at = int((_parsed(raw) or {}).get("at", 0))
            by_model.setdefault(name, []).append((at, text(field), text(raw)))
    old = [
        entry
        for model, entries in by_model.items()
        for entry in sorted(entries)[: -KEPT_VERSIONS if model in models else None]
    ]
    return [swap(keys.VERSIONS, field, raw, "") for _, field, raw in old]


def all_of(store: Redis) -> dict[str, tuple[bytes, Card]]:
    """All cards by their models, each with its stored form. Unreadable ones are left out."""
    return parsed_cards(store.hgetall(keys.MODELS))


def parsed_cards(raw: Mapping[Any, Any]) -> dict[str, tuple[bytes, Card]]:
    """The same from HGETALL's answer. A card that has another name than its field is unreadable."""
    cards = {text(name): (value, _parsed(value)) for name, value in raw.items()}
    return {name: (value, card) for name, (value, card) in cards.items() if card and card.get("name") == name}


def read(store: Redis, name: str) -> Card | None:
    """A model's card. Returns None if the key is missing or does not hold a card."""
    return _parsed(store.hget(keys.MODELS, name))


def takes_new(card: Card | None, version: str) -> bool:
    """Whether new tasks go to this version, for a worker of it. Unpublished cards change with each worker, and so do
    withdrawn ones."""
    return card is None or "published" not in card or "withdrawn" in card or bool(card["version"] == version)


def _publisher(publisher: str | None, before: Card | None, version: str) -> Card:
    """The field `publisher` of a card that is published now."""
    kept = before.get("publisher", "") if before is not None and before["version"] == version else ""
    if publisher is None or not kept or kept.startswith((UP, ROLLOUT)):
        return {"publisher": publisher or operator()}
    return {"publisher": kept}


def _offered(card: Card) -> Card:
    return {name: value for name, value in card.items() if name != "withdrawn"}


def _learnt(card: Card, before: Card | None) -> Card:
    """A worker's card, with the largest KV capacity of its version's workers; with none where that is the context."""
    new = card | {"served": True}
    if before is None or before["version"] != card["version"] or not before.get("served", "published" not in before):
        return new
    context = int(card["context_length"])
    capacity = max(int(card.get("kv_capacity", context)), int(before.get("kv_capacity", context)))
    new["kv_capacity"] = capacity
    if capacity >= context:
        del new["kv_capacity"]
    return new


def _with_worker_fields(store: Redis, version: str, before: Card | None) -> Card | None:
    """The card with WORKER_FIELDS of its version's pools; None if it has some, or is of another version."""
    if before is None or before["version"] != version or before.get("served", True):
        return None
    card = None
    for pool in _pools(store, before["name"], version):
        if pool.get("fingerprint") != keys.UNSERVED:
            worker_fields = {name: pool[name] for name in WORKER_FIELDS if name in pool}
            card = _learnt({**before, **worker_fields}, card or before)
    return card


def _pools(store: Redis, name: str, version: str) -> list[dict[str, Any]]:
    entries = map(json.loads, store.hvals(keys.POOLS))
    return [entry for entry in entries if (entry["model"], entry.get("version")) == (name, version)]


def _keep_version(store: Redis, card: Card, *, announced: bool = False) -> None:
    """Write the version's card. `announced`: by a worker, so it has WORKER_FIELDS; else those that are there stay."""
    field = profile_field(card["name"], card["version"])
    version_card = {name: value for name, value in card.items() if name not in OF_MODEL}
    while True:
        raw: Any = store.hget(keys.VERSIONS, field)
        before = _parsed(raw)
        new = _learnt(version_card, before and before | {"served": True}) if announced else dict(version_card)
        new.pop("served", None)
        if before is not None and not announced:
            new |= {name: before[name] for name in WORKER_FIELDS if name in before}
        if before is not None and new == {name: value for name, value in before.items() if name != "at"}:
            return
        new["at"] = _now_ms()
        if run(store, swap(keys.VERSIONS, field, raw or "", json.dumps(new))):
            return


def keep_card(store: Redis, card: Card) -> None:
    """Keep a model's card as its version's, where that has none: an earlier release wrote it."""
    if not store.hexists(keys.VERSIONS, profile_field(card["name"], card["version"])):
        _keep_version(store, card)


def published(store: Redis, card: Card, before: Card) -> Card:
    """A version's card as the model's, published by what published `before`. Raises redis.RedisError or OSError."""
    pools = _pools(store, card["name"], card["version"])
    served = any(pool.get("fingerprint") != keys.UNSERVED for pool in pools)
    kept = {name: before[name] for name in ("publisher",) if name in before and "published" in before}
    version_card = {name: value for name, value in card.items() if name not in (*OF_MODEL, "at")}
    return version_card | {"published": _now_ms(), "served": served, "publisher": operator()} | kept


def keep_known(store: Redis, name: str, version: str) -> None:
    """Let a version that tasks may wait for have a pool."""
    if not _pools(store, name, version):
        pool = keys.Pool(name, version, keys.UNSERVED)
        store.hset(keys.POOLS, pool.queue, json.dumps({**asdict(pool), "announced": _now_ms()}))


def _put(
    store: Redis,
    card: Card,
    files: Mapping[str, bytes],
    change: Callable[[Card | None], Card | None],
    first: Callable[[], object] = lambda: None,
    audit: Change | None = None,
) -> Card:
    def put() -> None:
        for name, data in files.items():
            put_file(store, card["files"][name], data)

    put()
    first()
    current = _write(store, card["name"], change, audit)
    put()  # a sweeper removes files that no card names, as these were until now
    store.hdel(keys.ROUTES, card["name"])  # clients of earlier releases send to all pools of the model then
    return current


def _published(name: str, version: str) -> Change:
    """New tasks of a name go to this version, as its publisher decided."""
    return Change(operator(), "model.publish", f"{name}@{version}")


def _write(store: Redis, name: str, change: Callable[[Card | None], Card | None], audit: Change | None = None) -> Card:
    """Replace a card by what `change` makes of it; None leaves it. Returns the current card.

    `audit`: logged unless the same version was published before, as by each start of `penstock up`.
    """
    while True:
        raw: Any = store.hget(keys.MODELS, name)
        before = _parsed(raw)
        after = change(before)
        if after is None:
            assert before is not None, "a change begins with a card"
            return before
        if before is not None and before["version"] != after["version"]:
            keep_card(store, before)
            keep_known(store, name, before["version"])
        if raw is None:
            store.unlink(keys.routing(name))  # a `remove` that died has left it
        same = before is not None and before["version"] == after["version"] and "published" in before
        logged = None if same else audit
        if run(store, _replacing(store, name, raw or "", after, logged)):
            if logged is not None:
                logged.say()
            return after


def _replacing(store: Redis, name: str, raw: Any, after: Card, audit: Change | None) -> Call:
    """SWAP, or ROUTE where the model has a routing and its default changes: that is a new generation."""
    current = routing.read(store, name)
    if current is None or current.default == after["version"]:
        return swap(keys.MODELS, name, raw, json.dumps(after), audit=audit)
    changed = current.changed(operator(), default=after["version"])
    return routing.route(routing.staged(changed), audit, text(raw), json.dumps(after))


def _may_be_default(store: Redis, card: Card, before: Card | None) -> bool:
    if before is None or before["version"] == card["version"]:
        return True
    try:
        check_default(store, card["name"], card["version"])
    except routing.RoutingError:
        return False
    return True


def _parsed(raw: str | bytes | None) -> Card | None:
    """A stored card; None if it names no version: the next writer replaces it."""
    card = parsed(raw)
    return card if isinstance(card.get("version"), str) else None


def _now_ms() -> int:
    return int(time.time() * 1000)


def profile_field(model: str, version: str) -> str:
    """The name of a version's profile in the hash."""
    return f"{model}@{version}"


async def profiles(store: AsyncRedis) -> dict[str, Profile]:
    """All profiles, by `model@version`. Raises redis.RedisError or OSError."""
    return read_profiles(await store.execute_command("HGETALL", keys.PROFILES))


def read_profiles(raw: Mapping[Any, Any]) -> dict[str, Profile]:
    """Profiles from HGETALL's answer, without unusable values."""
    return {text(name): Profile.from_json(profile) for name, profile in raw.items()}


def keep_profile(store: Redis, name: str, observed: Profile, *, fresh: bool, started: bool) -> bool:
    """Merge what a worker has `observed` into the version's profile (`Profile.merged`). A value that makes no sense is
    replaced. False if another process wrote at the same time: say it again later. Raises redis.RedisError or OSError.
    """
    with store.pipeline() as pipe:
        pipe.watch(keys.PROFILES)
        raw: Any = pipe.hget(keys.PROFILES, name)
        kept = Profile.from_json(raw)
        merged = kept.merged(observed, fresh=fresh, started=started)
        if merged == kept:
            return True
        pipe.multi()
        pipe.hset(keys.PROFILES, name, merged.to_json())
        try:
            pipe.execute()
        except WatchError:
            return False
    return True
