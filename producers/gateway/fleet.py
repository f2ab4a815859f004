"""`/v1/fleet`: the workers, pools and queues at this moment, for consoles and `penstock top`.

    read_fleet, leases ─▶ WorkerView, PoolView, QueueView ─▶ JSON, at most MAX_ROWS of each

A worker writes its lease itself, so that each of its figures may be missing, of another release, or nonsense: those
are null. Names are cut after MAX_TEXT characters. Times are unix seconds by the store's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from producers.admin.fleet import Fleet, Pool, read_fleet
from producers.broker.values import ListedWorker
from producers.connection.connect import SILENT_S
from producers.contract import keys
from producers.contract.profile import sane
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import MEASURES
from producers.gateway.samples import Reading, Samples
from producers.store.fleet.cards import profile_field
from producers.store.fleet.scaling import Pin, is_fresh

#: Most workers, pools and queues that one answer has.
MAX_ROWS: Final = 1000
#: Most characters of a name or reason.
MAX_TEXT: Final = 500
#: Most sequences of a worker, facts of its GPU, and adapters.
MAX_SEQUENCES, MAX_FACTS, MAX_ADAPTERS = 64, 64, 64
#: Most reasons why a worker is not ready.
MAX_REASONS: Final = 10
router = APIRouter(prefix="/v1/fleet", tags=["fleet"], dependencies=MEASURES)


class WorkerView(BaseModel):
    """A worker with a lease. Null: it did not say."""

    id: str = Field(description="its incarnation: another one after each start")
    name: str
    model: str
    version: str | None
    pool: str = Field(description="MODEL@VERSION.FINGERPRINT: workers that compute alike")
    release: str | None
    device: str | None = Field(description="the GPU's name, or the device's: cpu, cuda:0")
    kind: str | None = Field(description="what its model makes: generate, embed, rerank, classify, token_classify")
    ranks: int | None = Field(description="processes that compute its model together; null: one does")
    tensor_parallel: int | None = Field(description="ranks that each layer is divided among; null: it is not")
    pipeline_parallel: int | None = Field(description="stages that the layers are divided among; null: they are not")
    share: float | None = Field(description="its share of a device that several models share; null if it shares none")
    state: Literal["ready", "draining", "unready"]
    unready: list[str] = Field(description="why it takes no tasks")
    since: float | None = Field(description="when it began")
    lease_s: float | None = Field(description="seconds for which its lease still holds")
    running: int | None = Field(description="sequences that it generates")
    waiting: int | None = Field(description="sequences that it has taken and not begun")
    capacity: int | None = Field(description="sequences that it can generate at once")
    room: int | None = Field(description="sequences that it can still take at once")
    kv_used_ratio: float | None = Field(description="share of its KV cache that sequences hold")
    kv_blocks_total: int | None = Field(description="blocks of its KV cache")
    kv_blocks_used: int | None = Field(description="that sequences hold")
    kv_blocks_cached: int | None = Field(description="that none holds, kept for prompts that begin alike")
    generated_tokens: int | None

    @classmethod
    def of(cls, pool: Pool, lease: Mapping[str, Any], lease_s: float | None) -> Self:
        running, waiting, capacity = (count(lease.get(name)) for name in ("running", "waiting", "capacity"))
        tensor, pipeline = (count(lease.get(name)) for name in ("tensor_parallel", "pipeline_parallel"))
        used, blocks = sane(lease.get("kv_blocks_used")), sane(lease.get("kv_blocks_total"))
        reasons, gpu = lease.get("unready"), lease.get("gpu")
        unready = reasons if isinstance(reasons, list) else [reasons] if reasons else []
        device = gpu.get("name") if isinstance(gpu, dict) else None
        return cls(
            id=text(lease["incarnation"]),
            name=text(lease["worker"]) or text(lease["incarnation"]),
            model=text(pool.model),
            version=_optional(lease.get("version")),
            pool=text(pool.name),
            release=_optional(lease.get("release")),
            device=_optional(device or lease.get("device")),
            kind=_optional(lease.get("kind")),
            ranks=_ranks(tensor, pipeline),
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            share=sane(lease.get("share")),
            state="draining" if lease.get("draining") else "unready" if unready else "ready",
            unready=[text(reason) for reason in unready[:MAX_REASONS]],
            since=sane(lease.get("began")),
            lease_s=lease_s,
            running=running,
            waiting=waiting,
            capacity=capacity,
            room=None if capacity is None or running is None else max(0, capacity - running - (waiting or 0)),
            kv_used_ratio=min(1.0, used / blocks) if used is not None and blocks else None,
            kv_blocks_total=count(blocks),
            kv_blocks_used=count(used),
            kv_blocks_cached=count(lease.get("kv_blocks_cached")),
            generated_tokens=count(lease.get("generated_tokens")),
        )


class RunningSequence(BaseModel):
    """A sequence that a worker generates."""

    task: str | None = Field(description="the task's id; null for a key that does not see all tenants' tasks")
    choice: int
    tier: str
    prompt_tokens: int
    tokens: int = Field(description="of prompt and output so far")
    blocks: int = Field(description="of the KV cache, also those that it shares with others")


class WorkerDetail(WorkerView):
    """A worker, with the sequences that hold most of its KV cache."""

    object: Literal["worker"] = "worker"
    preemptions: int | None
    prompt_tokens: int | None
    cached_tokens: int | None = Field(description="of the prompts' tokens, those that were in the cache")
    engine_process: bool = Field(description="whether its engine has a process of its own")
    slow_rank: str | None = Field(description="the rank that the others wait for most of the time, in words")
    adapters: list[str] = Field(description="versions of LoRA adapters that it has loaded, at most 64")
    gpu: dict[str, float] = Field(description="what its driver says, such as temperature_c; empty without a GPU")
    sequences: list[RunningSequence] = Field(description="at most 16, the largest first")

    @classmethod
    def described(cls, pool: Pool, lease: Mapping[str, Any], lease_s: float | None, *, sees_all: bool) -> Self:
        gpu, running = lease.get("gpu"), lease.get("sequences")
        listed = islice(gpu.items(), MAX_FACTS) if isinstance(gpu, dict) else ()
        facts = {text(name): sane(value) for name, value in listed}
        adapters = lease.get("adapters")
        loaded = adapters.get("loaded") if isinstance(adapters, dict) else None
        rows = [_running(row, sees_all) for row in running[:MAX_SEQUENCES]] if isinstance(running, list) else []
        return cls(
            **WorkerView.of(pool, lease, lease_s).model_dump(),
            preemptions=count(lease.get("preemptions")),
            prompt_tokens=count(lease.get("prompt_tokens")),
            cached_tokens=count(lease.get("cached_tokens")),
            engine_process=lease.get("engine_process") is True,
            slow_rank=_optional(lease.get("slow_rank")),
            adapters=[text(name) for name in loaded[:MAX_ADAPTERS]] if isinstance(loaded, list) else [],
            gpu={name: value for name, value in facts.items() if value is not None},
            sequences=[row for row in rows if row is not None],
        )


def _ranks(tensor: int | None, pipeline: int | None) -> int | None:
    return None if tensor is None and pipeline is None else (tensor or 1) * (pipeline or 1)


def _running(row: Any, sees_all: bool) -> RunningSequence | None:
    """A sequence of a lease; None for what is none."""
    if not isinstance(row, list) or len(row) != 6:
        return None
    choice, tier, prompt, tokens, blocks = map(count, row[1:])
    tiers = tuple(keys.TIERS)
    if choice is None or tier is None or tier >= len(tiers) or prompt is None or tokens is None or blocks is None:
        return None
    return RunningSequence(
        task=text(row[0]) if sees_all else None,
        choice=choice,
        tier=tiers[tier],
        prompt_tokens=prompt,
        tokens=tokens,
        blocks=blocks,
    )


class DecisionView(BaseModel):
    """The autoscaler's last decision on a pool."""

    at: float | None
    by: str = Field(description="the autoscaler that decided")
    desired: int | None = Field(description="workers that it wants")
    ordered: int | None = Field(description="workers that it asks for: fewer while workers do not come up")
    reason: str
    trouble: str = Field(description="what keeps workers from coming up; empty if nothing does")
    current: bool = Field(description="whether it counts still: false once nobody decides")
    pinned: int | None = Field(description="the number that an operator set; null: the policy decides")
    pinned_by: str | None
    pinned_until: float | None = Field(description="unix seconds; null: until it is removed")

    @classmethod
    def of(cls, state: Mapping[str, Any], now: float) -> Self:
        pin = Pin.of(state.get("pin"))
        return cls(
            at=sane(state.get("at")),
            by=text(state.get("by") or ""),
            desired=count(state.get("wanted")),
            ordered=count(state.get("told")),
            reason=text(state.get("reason") or ""),
            trouble=text(state.get("trouble") or ""),
            current=is_fresh(state.get("at"), now),
            pinned=None if pin is None else pin.workers,
            pinned_by=None if pin is None else text(pin.by),
            pinned_until=None if pin is None else pin.until,
        )


class PoolView(BaseModel):
    """A version of a model, with all of its workers."""

    name: str = Field(description="MODEL@VERSION; MODEL where the autoscaler scales whatever version is current")
    model: str
    version: str | None
    current: bool = Field(description="whether the model's new tasks go to this version")
    workers: int = Field(description="workers with a lease")
    ready: int = Field(description="those that take tasks")
    desired: int | None = Field(description="workers that the autoscaler wants; null where none decides")
    decision: DecisionView | None


class TierView(BaseModel):
    """A queue's tasks of one tier."""

    queued: int
    tenants: int = Field(description="tenants whose tasks wait, as far as workers have sorted them")
    oldest_s: float | None = Field(description="since the task that waits longest was submitted; null: not known")


class QueueView(BaseModel):
    """A queue. `name`: MODEL@VERSION, MODEL@VERSION.FINGERPRINT of one pool, or MODEL for plain Celery senders."""

    name: str
    model: str
    queued: int = Field(description="tasks that wait, of all tiers")
    delayed: int = Field(description="tasks to be offered again later")
    in_flight: int = Field(description="tasks that its pool's workers have taken")
    tiers: dict[str, TierView]

    @classmethod
    def of(cls, pool: Pool) -> Self:
        tiers = {
            tier: TierView(
                queued=pool.queued[tier],
                tenants=pool.tenants[tier],
                oldest_s=pool.oldest_s.get(tier) if pool.queued[tier] else None,
            )
            for tier in keys.TIERS
        }
        return cls(
            name=text(pool.name),
            model=text(pool.model),
            queued=sum(pool.queued.values()),
            delayed=pool.delayed,
            in_flight=pool.in_flight,
            tiers=tiers,
        )


class TotalsView(BaseModel):
    """Counts of workers and queues; the lists end after 1,000."""

    workers: int
    pools: int
    queues: int
    queued: int = Field(description="tasks that wait")
    running: int = Field(description="sequences that workers generate")
    dead_letters: int
    webhooks_due: int


class FleetView(BaseModel):
    """Workers, pools and queues at one moment."""

    object: Literal["fleet"] = "fleet"
    at: float
    autoscaler: str | None = Field(description="the autoscaler that leads")
    sweeper: bool = Field(description="whether a sweeper leads")
    totals: TotalsView
    workers: list[WorkerView]
    pools: list[PoolView]
    queues: list[QueueView]

    @classmethod
    def of(cls, fleet: Fleet, leases: Mapping[str, float | None], model: str | None = None) -> Self:
        """`leases`: incarnation -> seconds of its lease. `model`: rows of this one alone."""
        pools = [pool for pool in fleet.pools if model in (None, pool.model)]
        workers = [
            WorkerView.of(pool, lease, leases.get(str(lease["incarnation"])))
            for pool in pools
            for lease in pool.workers
        ]
        workers.sort(key=lambda worker: (worker.model, worker.name, worker.id))
        queues = sorted((QueueView.of(pool) for pool in pools), key=lambda queue: queue.name)
        versions = [row for row in _pools(fleet, workers) if model in (None, row.model)]
        totals = TotalsView(
            workers=len(workers),
            pools=len(versions),
            queues=len(queues),
            queued=sum(queue.queued for queue in queues),
            running=sum(worker.running or 0 for worker in workers),
            dead_letters=fleet.dead_letters,
            webhooks_due=fleet.webhooks.rows.get("due", 0),
        )
        return cls(
            at=fleet.at,
            autoscaler=text(fleet.scaling.leads) if fleet.scaling.leads else None,
            sweeper=fleet.sweeper_leads,
            totals=totals,
            workers=workers[:MAX_ROWS],
            pools=versions[:MAX_ROWS],
            queues=queues[:MAX_ROWS],
        )


@router.get("", response_model=FleetView)
async def fleet(
    request: Request,
    model: Annotated[str | None, Query(description="rows of this model alone")] = None,
    max_age: Annotated[
        float, Query(ge=0, le=60, description="age (s) up to which an earlier reading will do; 0: it is read now")
    ] = 0,
) -> Response:
    """Tell the workers, pools and queues: what runs, what waits, and what the autoscaler wants."""
    gateway = gateway_of(request)
    if max_age:
        samples, reading = gateway.samples, await gateway.samples.latest(max_age)
        data = encoded_fleet(samples, reading) if model is None else _encoded(reading.fleet, reading.listed, model)
    else:
        client = gateway.client
        async with asyncio.timeout(SILENT_S):
            current = await read_fleet(client.store, client.broker)
            data = _encoded(current, await client.broker.workers(), model)
    return Response(data, media_type="application/json")


def encoded_fleet(samples: Samples, reading: Reading) -> bytes:
    """The JSON of a reading's FleetView, made once of each reading."""
    return samples.encoded("fleet", reading, lambda reading: _encoded(reading.fleet, reading.listed, None))


def _encoded(fleet: Fleet, listed: Iterable[ListedWorker], model: str | None) -> bytes:
    leases = {worker.incarnation: worker.remaining_s for worker in listed}
    return FleetView.of(fleet, leases, model).model_dump_json().encode()


def _pools(fleet: Fleet, workers: Iterable[WorkerView]) -> list[PoolView]:
    """A row for each version that is current, served or scaled."""
    rows: dict[str, PoolView] = {}

    def row(model: str, version: str | None) -> PoolView:
        name = profile_field(model, version) if version else model
        if name not in rows:
            rows[name] = PoolView(
                name=text(name),
                model=text(model),
                version=_optional(version),
                current=version is not None and fleet.versions.get(model) == version,
                workers=0,
                ready=0,
                desired=None,
                decision=None,
            )
        return rows[name]

    for model, version in fleet.versions.items():
        row(model, version)
    for worker in workers:
        pool = row(worker.model, worker.version)
        pool.workers += 1
        pool.ready += worker.state == "ready"
    for name, state in fleet.scaling.states.items():
        decision = DecisionView.of(state, fleet.at)
        if name not in rows and name in fleet.versions:
            name = profile_field(name, fleet.versions[name])
        model, at, version = name.rpartition("@")
        pool = row(model, version) if at else row(name, None)
        pool.decision, pool.desired = decision, decision.desired if decision.current else None
    return sorted(rows.values(), key=lambda pool: pool.name)


def count(value: Any) -> int | None:
    """A count of a lease; None for what is none."""
    number = sane(value)
    return None if number is None else int(min(number, 2**53))


def text(value: Any) -> str:
    """A text that others wrote, for JSON: cut, and with what is not Unicode escaped. Empty for what is no text."""
    return as_unicode(value[:MAX_TEXT]) if isinstance(value, str) else ""


def as_unicode(value: str) -> str:
    """The text with lone surrogates escaped, which JSON cannot carry."""
    return value.encode(errors="backslashreplace").decode()


def _optional(value: Any) -> str | None:
    return text(value) or None
