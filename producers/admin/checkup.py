"""Looks over a system for `penstock doctor`: its servers, workers, queues and webhooks. Nothing is written.

    server, storage, clock: one server        fleet, webhooks, models: what is kept there        ─▶ Finding: what to do

A check that cannot be made gives a finding with the status `skip`, and says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

from redis.exceptions import RedisError

from producers.admin.fleet import Fleet, Pool, read_fleet
from producers.broker.values import ListedWorker
from producers.connection.script import parsed, seconds, text
from producers.connection.storage import FULL, parse
from producers.connection.trouble import Trouble, error_text, trouble
from producers.contract import keys
from producers.contract.levels import split
from producers.contract.profile import sane
from producers.errors import shown
from producers.store import endpoints
from producers.store.fleet.cards import get_file, profile_field
from producers.store.fleet.scaling import is_fresh
from producers.store.servers import small_buffers

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from producers.client.aio import AsyncClient

Status = Literal["ok", "warn", "fail", "skip"]
#: Time (s) for one check.
PATIENCE_S: Final = 30.0
#: Clock skew (s) to warn of, and to fail at: a worker's lease lasts 10 s.
SKEW_S: Final = (1.0, 5.0)
#: Time (s) for which what sweepers and deliverers do may wait.
LATE_S: Final = 60.0
#: Time (s) that another sweeper needs to lead, and neighbours to clear a dead worker's lease: until then neither is a
#: finding. It is looked again every second.
SETTLE_S: Final = 6.0
#: Most names in a finding.
NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `advice`: what to do, in one sentence; empty where nothing is to be done."""

    check: str
    status: Status
    detail: str
    advice: str = ""


async def examine(client: AsyncClient, broker: Redis | None = None) -> list[Finding]:
    """All checks of a system's servers and of what they hold. Raises nothing: a server that is away is a finding.

    `broker`: a client of the broker's server, where that is a Redis or Valkey beside the store's.
    """
    findings = await _server("store", client.store)
    if broker is not None:
        findings += await _server("broker", broker)
    elif not client.one_server:
        findings += await _guarded("broker", client.broker.ping, lambda _: [Finding("broker", "ok", "it answers")])
    if any(finding.status == "fail" and finding.check in ("store", "broker") for finding in findings):
        return [*findings, Finding("system", "skip", "workers, queues and webhooks: the servers cannot be read")]

    async def read() -> tuple[Fleet, list[ListedWorker]]:
        give_up = time.monotonic() + SETTLE_S
        while True:
            fleet, listed = await read_fleet(client.store, client.broker), await client.broker.workers()
            settled = fleet.sweeper_leads and all(worker.remaining_s is not None for worker in listed)
            if settled or time.monotonic() >= give_up:
                return fleet, listed
            await asyncio.sleep(1.0)

    findings += await _guarded("workers", read, lambda answer: fleet_findings(*answer))
    findings += await _guarded("webhooks", lambda: endpoints.every(client.store), _endpoints)
    findings += await _guarded("model files", lambda: _damaged_files(client.store), lambda finding: [finding])
    return findings


async def _guarded(
    check: str, read: Callable[[], Awaitable[Any]], judge: Callable[[Any], Iterable[Finding]]
) -> list[Finding]:
    """The findings on what was read. A server that does not answer is a failure; one that refuses makes a skip."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await read()
    except (RedisError, OSError) as error:
        kind = trouble(error)
        if kind is Trouble.DENIED:
            return [Finding(check, "skip", f"no permission: {error_text(error)}", "")]
        advice = "start the server, or correct its URL" if kind is Trouble.AWAY else "correct what it says"
        return [Finding(check, "fail", error_text(error) or "no answer in time", advice)]
    return list(judge(answer))


# ---- servers --------------------------------------------------------------------------------------------------------


async def _server(role: str, redis: Redis) -> list[Finding]:
    """Version, memory, persistence and clock of a server."""

    async def read() -> tuple[dict[str, Any], float]:
        info = await redis.execute_command("INFO", "everything")
        began = time.time()
        server_time = seconds(await redis.execute_command("TIME"))
        ended = time.time()
        early, late = began - server_time, server_time - ended
        return info, max(early, late, 0.0)  # 0 where it lies within the call

    findings = await _guarded(role, read, lambda answer: [*_judged(role, answer[0]), _clock(role, answer[1])])
    if findings[0].check == role:
        return findings
    try:
        async with asyncio.timeout(PATIENCE_S):
            settings = await redis.config_get("appendfsync", "client-output-buffer-limit")
        fsync, limits = (text(settings.get(name, "")) for name in ("appendfsync", "client-output-buffer-limit"))
    except (RedisError, OSError) as error:
        return [*findings, Finding(f"{role} fsync", "skip", f"its settings cannot be read: {error_text(error)}")]
    return [*findings, *_fsync(role, fsync), *(_buffers(limits) if role == "store" else ())]


def _judged(role: str, info: dict[str, Any]) -> Iterator[Finding]:
    kind = info.get("server_name") or "redis"
    version = info.get("valkey_version") or info.get("redis_version", "?")
    yield Finding(f"{role} version", "ok", f"{kind} {version}")
    yield from _memory(f"{role} memory", info)
    persists = bool(int(info.get("aof_enabled", 0)))
    storage = parse(info)
    advice = "set appendonly yes, or accept that queued tasks are lost when the server restarts"
    if storage.fault:
        text = "look at the server's log and the space of its disk"
        yield Finding(f"{role} persistence", "fail", storage.fault, text)
    elif not persists:
        yield Finding(f"{role} persistence", "warn", "no append-only file", advice)
    else:
        replicas = int(info.get("connected_slaves", 0))
        yield Finding(f"{role} persistence", "ok", f"append-only file, {replicas} replicas")


def _memory(check: str, info: dict[str, Any]) -> Iterator[Finding]:
    policy, storage = str(info.get("maxmemory_policy", "noeviction")), parse(info)
    noeviction = "set maxmemory-policy noeviction"
    if policy.startswith("allkeys"):
        yield Finding(check, "fail", f"maxmemory-policy {policy} evicts queued tasks when memory is full", noeviction)
    elif policy != "noeviction":
        yield Finding(check, "warn", f"maxmemory-policy {policy} evicts leases and results early", noeviction)
    if not storage.limit:
        advice = "set maxmemory to about 60% of the machine's memory"
        yield Finding(check, "warn", "maxmemory is not set: the kernel would kill a full server", advice)
    elif storage.problem() and storage.ratio:
        status: Status = "fail" if storage.ratio >= FULL else "warn"
        advice = "give it more memory, or keep results for a shorter time (docs/run/servers.md, A full server)"
        yield Finding(check, status, f"{storage.ratio:.0%} of maxmemory is used", advice)
    elif policy == "noeviction":
        yield Finding(check, "ok", f"noeviction, {storage.ratio:.0%} of maxmemory used")


def _fsync(role: str, fsync: str) -> Iterator[Finding]:
    if fsync == "no":
        advice = "set appendfsync everysec, or always"
        yield Finding(f"{role} fsync", "warn", "appendfsync no: the kernel decides when data reach the disk", advice)
    elif fsync:
        yield Finding(f"{role} fsync", "ok", f"appendfsync {fsync}")


def _buffers(limits: str) -> Iterator[Finding]:
    if fault := small_buffers(limits):
        advice = "set it to 'pubsub 32mb 8mb 60', or more: a gateway hears all its streams on one connection"
        yield Finding("store buffers", "warn", fault, advice)
    elif limits:
        yield Finding("store buffers", "ok", "listeners may be slow for a moment")


def _clock(role: str, skew: float) -> Finding:
    check = f"{role} clock"
    if skew < SKEW_S[0]:
        return Finding(check, "ok", f"within {SKEW_S[0]:g} s of this machine's")
    status: Status = "fail" if skew >= SKEW_S[1] else "warn"
    advice = "synchronise the clocks of both machines (NTP): leases last 10 s, keys and deadlines go by these clocks"
    return Finding(check, status, f"{skew:.1f} s from this machine's", advice)


# ---- what runs and waits --------------------------------------------------------------------------------------------


def fleet_findings(fleet: Fleet, listed: list[ListedWorker]) -> Iterator[Finding]:
    """Findings on workers, queues, the autoscaler, the sweeper and what is left undone. Nothing is read for them."""
    yield from _workers(fleet, listed)
    yield from _unserved(fleet)
    yield from _autoscaler(fleet)
    if fleet.sweeper_leads:
        yield Finding("sweeper", "ok", "one leads")
    else:
        advice = "start `penstock sweeper`: without one, what dead processes left stays unfinished"
        yield Finding("sweeper", "fail", "none leads", advice)
    yield from _backlog(fleet)
    if fleet.dead_letters:
        advice = "look at them by `penstock dlq ls`, then replay or purge them"
        yield Finding("dead letters", "warn", f"{fleet.dead_letters} are kept", advice)
    else:
        yield Finding("dead letters", "ok", "none")


def _workers(fleet: Fleet, listed: list[ListedWorker]) -> Iterator[Finding]:
    workers = [worker for pool in fleet.pools for worker in pool.workers]
    unready = [worker for worker in workers if worker.get("unready") and not worker.get("draining")]
    if unready:
        reasons = _some(f"{_name(worker)}: {shown(worker['unready'])}" for worker in unready)
        advice = "read the log of each, and restart one that does not recover"
        yield Finding("workers", "warn", f"{len(unready)} of {len(workers)} are not ready: {reasons}", advice)
    elif workers:
        sharing = sum(sane(worker.get("share")) is not None for worker in workers)
        shared = f", of which {sharing} share a device" if sharing else ""
        yield Finding("workers", "ok", f"{len(workers)} with a lease{shared}")
    else:
        yield Finding("workers", "ok", "none is up")
    ahead = [worker for worker in workers if (sane(worker.get("began")) or 0.0) > fleet.at + SKEW_S[0]]
    if ahead:
        advice = "synchronise the clocks of their machines (NTP)"
        yield Finding("worker clocks", "warn", f"ahead of the store's: {_some(map(_name, ahead))}", advice)
    ended = [worker.incarnation for worker in listed if worker.remaining_s is None]
    if ended:
        advice = "start a sweeper or a worker, which return what they held to the queues and clear them"
        yield Finding("stale leases", "warn", f"listed, but their leases have ended: {_some(ended)}", advice)
    else:
        yield Finding("stale leases", "ok", "none")


def _unserved(fleet: Fleet) -> Iterator[Finding]:
    """Versions that tasks wait for and no worker serves."""
    served = {(pool.model, str(worker.get("version"))) for pool in fleet.pools for worker in pool.workers}
    served_models = {model for model, _ in served}
    scaled = {
        pool
        for pool, state in fleet.scaling.states.items()
        if is_fresh(state.get("at"), fleet.at) and not state.get("trouble")
    }
    waiting = [pool for pool in fleet.pools if sum(pool.queued.values()) or pool.delayed]
    findings = 0
    for pool in waiting:
        version = _version(pool)
        if (pool.model, version) in served if version else pool.model in served_models:
            continue
        findings += 1
        count, oldest = sum(pool.queued.values()) + pool.delayed, max(pool.oldest_s.values(), default=0.0)
        detail = f"{count} tasks wait for {shown(pool.name)}, the oldest for {oldest:.0f} s, and no worker serves it"
        if {pool.model, profile_field(pool.model, version or fleet.versions.get(pool.model, ""))} & scaled:
            yield Finding("unserved", "warn", detail, "wait for the worker that the autoscaler starts")
        else:
            advice = "start a worker with this version of the model, or cancel the tasks"
            yield Finding("unserved", "fail", detail, advice)
    if not findings:
        yield Finding("unserved", "ok", "no task waits for a version that nobody serves")


def _autoscaler(fleet: Fleet) -> Iterator[Finding]:
    states = fleet.scaling.states
    fresh = {pool: state for pool, state in states.items() if is_fresh(state.get("at"), fleet.at)}
    troubled = [f"{pool}: {shown(state['trouble'])}" for pool, state in sorted(fresh.items()) if state.get("trouble")]
    if troubled:
        advice = "mend what it says, then `penstock scale retry POOL`"
        yield Finding("autoscaler", "fail", f"workers do not come up: {_some(troubled)}", advice)
    elif states and not fresh:
        yield Finding("autoscaler", "warn", "pools were scaled, and none decides now", "start `penstock autoscaler`")
    elif fresh:
        yield Finding("autoscaler", "ok", f"pools that it scales: {len(fresh)}")
    else:
        yield Finding("autoscaler", "ok", "none is used")


def _backlog(fleet: Fleet) -> Iterator[Finding]:
    late = [
        f"{backlog.count} tasks {state}, the oldest for {backlog.oldest_s:.0f} s"
        for state, backlog in (("not confirmed by the broker", fleet.submitting), ("not settled", fleet.unsettled))
        if backlog.oldest_s > LATE_S
    ]
    if late:
        advice = "read the sweeper's log; plain Celery tasks settle once their model has a worker"
        yield Finding("unfinished", "warn", "; ".join(late), advice)
    else:
        yield Finding("unfinished", "ok", "nothing is left unfinished")
    dead, oldest = fleet.webhooks.rows.get("dead", 0), fleet.webhooks.oldest_due_s
    if oldest > LATE_S:
        advice = "start `penstock webhooks run`, or `penstock sources` for replies of sources"
        yield Finding("webhook deliveries", "fail", f"the oldest has been due for {oldest:.0f} s", advice)
    elif dead:
        advice = "look at them by `penstock webhooks ls --state dead`, and replay them once the receiver works"
        yield Finding("webhook deliveries", "warn", f"{dead} were given up", advice)
    else:
        yield Finding("webhook deliveries", "ok", f"{fleet.webhooks.rows.get('due', 0)} are due")


def _endpoints(existing: list[endpoints.Endpoint]) -> Iterator[Finding]:
    disabled = [f"{endpoint.id} ({endpoint.disabled_because})" for endpoint in existing if not endpoint.enabled]
    if disabled:
        advice = "mend the receiver, then enable it: POST /v1/webhook_endpoints/{id} with enabled true"
        yield Finding("webhook endpoints", "warn", f"disabled: {_some(disabled)}", advice)
    else:
        yield Finding("webhook endpoints", "ok", f"{len(existing)}, none disabled")


async def _damaged_files(store: Redis) -> Finding:
    """Compare the files that cards name with the SHA-256 they are named by: each is some megabytes."""
    wrong, files = [], set[str]()
    for raw in (await store.execute_command("HVALS", keys.MODELS)) or ():
        card = parsed(raw)
        named = card.get("files")
        for name, digest in named.items() if isinstance(named, dict) else ():
            if not isinstance(digest, str) or digest in files:
                continue
            files.add(digest)
            data = await get_file(store, digest)
            if data is None or sha256(data).hexdigest() != digest:
                wrong.append(f"{card.get('name')}: {name} is {'missing' if data is None else 'damaged'}")
    if wrong:
        advice = "publish the model again with `penstock models publish`, or restart one of its workers"
        return Finding("model files", "fail", _some(wrong), advice)
    return Finding("model files", "ok", f"{len(files)} files of models' cards are whole")


def _version(pool: Pool) -> str:
    """The version of a queue's name; empty for the queue of plain Celery senders."""
    name = split(pool.name)[0].removeprefix(f"{pool.model}@")
    return "" if name == pool.model else name.partition(".")[0]


def _name(worker: dict[str, Any]) -> str:
    return str(worker.get("worker"))[:100]


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
