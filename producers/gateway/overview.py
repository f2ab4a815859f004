"""`/v1/overview`: one screen of the system: what waits, runs, fails, and whether anything needs an operator.

    Samples.latest ─▶ totals, findings (as of `penstock doctor`), servers, models ─▶ JSON, made once for all who ask
    Samples.follow ─▶ the same and the fleet, every FRESH_S ─▶ server-sent events
    Samples.series ─▶ the last quarter of an hour, as far as this gateway ran

Texts that workers wrote are cut, as in `/v1/fleet`. Times are unix seconds by the store's clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from producers.admin.checkup import Finding, fleet_findings
from producers.connection.storage import FULL
from producers.gateway.context import gateway_of
from producers.gateway.fleet import MAX_ROWS, count, encoded_fleet, text
from producers.gateway.http.authorization import MEASURES
from producers.gateway.http.sse import LiveStream
from producers.gateway.samples import GENERATED, Reading, Samples, buckets, outcomes, percentile, rate
from producers.gateway.tasks.views import errors
from producers.store.measurements import FIRST_TOKEN, QUEUE_WAIT, TASK, Histogram
from producers.store.waiting import STAGES, model_of

#: Tier -> the wait (s) of its oldest task from which on somebody should know. Flex and batch may wait.
LONG_S: Final = {"priority": 30.0, "default": 120.0}
#: Age (s) of the numbers that is good enough, unless a caller says otherwise, and the most.
FRESH_S, MAX_AGE_S = 2.0, 60.0
MaxAge = Annotated[float, Query(ge=0, le=MAX_AGE_S, description="age (s) up to which an earlier reading will do")]
#: The JSON schema of an event, for OpenAPI.
EVENT: Final = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": ["overview", "fleet", "error"]},
        "data": {"type": "string", "description": "JSON"},
    },
}
router = APIRouter(prefix="/v1/overview", tags=["fleet"], dependencies=MEASURES)


class FindingView(BaseModel):
    """Something that may need an operator, as a row of `penstock doctor`."""

    check: str
    status: Literal["warn", "fail"]
    detail: str
    advice: str = Field(description="what to do")


class ServerView(BaseModel):
    """The store, or a broker that is another server."""

    name: str
    used_bytes: int
    limit_bytes: int = Field(description="0: no bound")
    used_ratio: float
    fault: str = Field(description="why it cannot write its files; empty if it can")


class Latency(BaseModel):
    """Percentiles (s) of the last minute; null where nothing was measured."""

    p50: float | None
    p95: float | None


class ModelRow(BaseModel):
    """A model's tasks and tokens. `tasks`: that ended since ever, by outcome. The others are of the last minute."""

    name: str
    version: str | None
    waiting: int
    running: int
    workers: int
    overload: str = Field(description="stage of overload: normal, shed, shorten or priority")
    pressure: float = Field(description="what waits, as a share of the bound that is nearest")
    tasks: dict[str, int]
    generated_tokens: int
    tokens_per_s: float | None
    ended_per_s: float | None
    failed_per_s: float | None
    first_token: Latency
    queue_wait: Latency
    task_time: Latency


class OverviewTotals(BaseModel):
    waiting: int = Field(description="tasks that wait for a worker")
    oldest_s: float | None = Field(description="since the task that waits longest was submitted")
    running: int = Field(description="sequences that workers generate")
    capacity: int = Field(description="sequences that they can generate at once")
    workers: int
    ready: int
    dead_letters: int
    webhooks_due: int
    webhooks_dead: int
    tasks: dict[str, int] = Field(description="that ended since ever, by outcome")


class Series(BaseModel):
    """Columns, a value for each time; null where there is nothing to take it from. Percentiles are of a minute."""

    at: list[float]
    waiting: list[int]
    running: list[int]
    capacity: list[int]
    tokens_per_s: list[float | None]
    ended_per_s: list[float | None]
    failed_per_s: list[float | None]
    first_token_p95_s: list[float | None]
    queue_wait_p95_s: list[float | None]


class Overview(BaseModel):
    """The system at one moment, and how it came there."""

    object: Literal["overview"] = "overview"
    at: float = Field(description="by the store's clock")
    totals: OverviewTotals
    findings: list[FindingView] = Field(description="the worst first; empty if nothing needs anybody")
    servers: list[ServerView]
    models: list[ModelRow]
    series: Series = Field(description="the last quarter of an hour, as far as this gateway ran")


@router.get("", response_model=Overview)
async def overview(request: Request, max_age: MaxAge = FRESH_S) -> Response:
    """Tell in one answer what waits, runs and fails, what needs an operator, and how the last minutes were."""
    samples = gateway_of(request).samples
    return Response(_encoded(samples, await samples.latest(max_age)), media_type="application/json")


def _encoded(samples: Samples, reading: Reading) -> bytes:
    return samples.encoded("overview", reading, lambda reading: _view(reading, samples).model_dump_json().encode())


@router.get(
    "/events",
    response_class=Response,
    responses={200: {"content": {LiveStream.media_type: {"schema": EVENT}}}, **errors(429)},
)
async def follow(request: Request) -> Response:
    """Stream the overview as events `overview`, each followed by one `fleet` as of `/v1/fleet`, every two seconds until
    the caller leaves. An event `error` says why it ends otherwise."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "events")
    settings = gateway.settings
    return LiveStream(_events(gateway.samples), gateway.streams, heartbeat=settings.heartbeat, stall=settings.stall)


async def _events(samples: Samples) -> AsyncGenerator[bytes]:
    async with aclosing(samples.follow(FRESH_S)) as readings:
        async for reading in readings:
            yield samples.encoded("events", reading, lambda reading: _lines(samples, reading))


def _lines(samples: Samples, reading: Reading) -> bytes:
    """A reading as events. Many clients take other characters for the ends of lines, too."""
    lines = b""
    for name, data in (("overview", _encoded(samples, reading)), ("fleet", encoded_fleet(samples, reading))):
        for end in ("\u2028", "\u2029", "\x85"):
            data = data.replace(end.encode(), f"\\u{ord(end):04x}".encode())
        lines += b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    return lines


def _view(reading: Reading, samples: Samples) -> Overview:
    fleet = reading.fleet
    leases = [lease for pool in fleet.pools for lease in pool.workers]
    ages = [age for pool in fleet.pools for tier, age in pool.oldest_s.items() if pool.queued[tier]]
    tasks: dict[str, int] = {}
    for measured in reading.measured.values():
        for outcome, number in outcomes(measured).items():
            tasks[outcome] = tasks.get(outcome, 0) + number
    totals = OverviewTotals(
        waiting=sum(sum(pool.queued.values()) for pool in fleet.pools),
        oldest_s=max(ages, default=None),
        running=sum(count(lease.get("running")) or 0 for lease in leases),
        capacity=sum(count(lease.get("capacity")) or 0 for lease in leases),
        workers=len(leases),
        ready=sum(not (lease.get("draining") or lease.get("unready")) for lease in leases),
        dead_letters=fleet.dead_letters,
        webhooks_due=fleet.webhooks.rows.get("due", 0),
        webhooks_dead=fleet.webhooks.rows.get("dead", 0),
        tasks=tasks,
    )
    findings = sorted(_findings(reading), key=lambda finding: finding.status != "fail")
    return Overview(
        at=fleet.at,
        totals=totals,
        findings=[
            FindingView(
                check=finding.check,
                status="fail" if finding.status == "fail" else "warn",
                detail=text(finding.detail),
                advice=finding.advice,
            )
            for finding in findings
        ],
        servers=[
            ServerView(
                name=name,
                used_bytes=server.used,
                limit_bytes=server.limit,
                used_ratio=server.ratio,
                fault=server.fault,
            )
            for name, server in reading.storage.items()
        ],
        models=list(_models(reading, samples))[:MAX_ROWS],
        series=Series(**samples.series(reading)),
    )


def _findings(reading: Reading) -> Iterator[Finding]:
    for finding in fleet_findings(reading.fleet, reading.listed):
        if finding.status in ("warn", "fail"):
            yield finding
    for pool in reading.fleet.pools:
        for tier, limit in LONG_S.items():
            waited = pool.oldest_s.get(tier, 0.0) if pool.queued[tier] else 0.0
            if waited > limit:
                detail = f"{pool.queued[tier]} {tier} tasks of {pool.name}, the oldest for {waited:.0f} s"
                yield Finding("long waits", "warn", detail, "add workers, or let an autoscaler add them")
    for name, server in reading.storage.items():
        if problem := server.problem():
            advice = "give it more memory, or keep results for a shorter time (docs/run/servers.md, A full server)"
            yield Finding(f"{name} memory", "fail" if server.fault or server.ratio >= FULL else "warn", problem, advice)
    for queue, pressure in reading.overload.items():
        if pressure.stage:
            advice = "add workers, or wait: it ends by itself once less waits (docs/run/admission.md)"
            detail = f"{model_of(queue)}: stage {STAGES[pressure.stage]}, {pressure.share:.0%} of what may wait"
            yield Finding("overload", "warn", detail, advice)


def _models(reading: Reading, samples: Samples) -> Iterator[ModelRow]:
    first_at, before = samples.recent[0] if samples.recent else (reading.fleet.at, reading.measured)
    seconds = reading.fleet.at - first_at
    overload = {model_of(queue): pressure for queue, pressure in reading.overload.items()}
    for model in sorted({*reading.measured, *reading.fleet.versions, *(pool.model for pool in reading.fleet.pools)}):
        pools = [pool for pool in reading.fleet.pools if pool.model == model]
        leases = [lease for pool in pools for lease in pool.workers]
        version = reading.fleet.versions.get(model)
        pressure = overload.get(f"{model}@{version}")
        new, old = reading.measured.get(model, {}), before.get(model, {})
        ended = outcomes(new)

        def by_second(now: int, then: int) -> float | None:
            return rate(now, then, seconds) if seconds > 0 else None

        yield ModelRow(
            name=text(model),
            version=text(version) or None,
            waiting=sum(sum(pool.queued.values()) for pool in pools),
            running=sum(count(lease.get("running")) or 0 for lease in leases),
            workers=len(leases),
            overload=STAGES[pressure.stage] if pressure else STAGES[0],
            pressure=pressure.share if pressure else 0.0,
            tasks=ended,
            generated_tokens=new.get(GENERATED, 0),
            tokens_per_s=by_second(new.get(GENERATED, 0), old.get(GENERATED, 0)),
            ended_per_s=by_second(sum(ended.values()), sum(outcomes(old).values())),
            failed_per_s=by_second(ended["failed"], outcomes(old)["failed"]),
            first_token=_latency(FIRST_TOKEN, new, old),
            queue_wait=_latency(QUEUE_WAIT, new, old),
            task_time=_latency(TASK, new, old),
        )


def _latency(histogram: Histogram, new: Mapping[str, int], old: Mapping[str, int]) -> Latency:
    now, then = buckets(new, histogram), buckets(old, histogram)
    return Latency(p50=percentile(histogram, now, then, 0.5), p95=percentile(histogram, now, then))
