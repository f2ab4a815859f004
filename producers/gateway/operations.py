"""Endpoints for operators beside keys, dead letters and the fleet: scaling, rollouts, webhooks' deliveries.

    /v1/scaling              decisions of the autoscaler; another try to start workers; a number of workers
    /v1/workers              what one runs, and how its KV cache is used; tell it to drain
    /v1/routing              which versions new tasks go to
    /v1/shadows/{name}       copies of tasks for another version, compared
    /v1/sources              when schedules last fired, replies that wait, and what became of what was taken
    /v1/webhook_deliveries   rows of the outbox; deliver one again
    /v1/whoami               the caller, for programs that show what its key may do

What changes something needs a key of the scope admin, and is in the audit log. Reasons and answers of receivers come
from elsewhere: they are cut, and are text, never markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import Redis

from producers.connection.script import aexecute_many, arun, parsed, seconds
from producers.connection.script import text as decoded
from producers.contract import keys
from producers.contract.profile import sane
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.fleet import MAX_ROWS, DecisionView, WorkerDetail, text
from producers.gateway.http.authorization import ADMINISTERS, ANYBODY, MEASURES, actor_of, principal_of
from producers.gateway.http.errors import ONCE, Problem
from producers.gateway.http.request_body import documented, read_as
from producers.gateway.tasks.views import errors
from producers.release import release
from producers.store import outbox, shadows
from producers.store.access import audit
from producers.store.fleet import scaling
from producers.store.fleet.routing import RULED, Routing
from producers.store.measurements import SOURCE_OUTCOMES, read_source_items
from producers.store.outbox import Row, State

#: Decisions and deliveries that are shown, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 50, 500
#: Decisions of all pools among which those of one are looked for.
MAX_SCANNED = 2000
router = APIRouter(prefix="/v1", tags=["fleet"])


# ---- the caller -----------------------------------------------------------------------------------------------------


class Caller(BaseModel):
    """Who asks, and what it may do."""

    object: Literal["caller"] = "caller"
    keys: bool = Field(description="whether this gateway asks for keys")
    key: str | None = Field(description="the key's id; null without keys")
    tenant: str | None = Field(description="the key's tenant; null without keys")
    scopes: list[str]
    models: list[str] = Field(description="the models that it may use; empty: all")
    tiers: list[str] = Field(description="the tiers that it may use; empty: all")
    sees_all: bool = Field(description="whether it sees what other tenants have made")
    release: str = Field(description="the gateway's")


@router.get("/whoami", dependencies=ANYBODY, response_model=Caller)
async def whoami(request: Request) -> Caller:
    """Tell whose key this is, and what it may do."""
    principal = principal_of(request)
    return Caller(
        keys=gateway_of(request).callers is not None,
        key=principal.key,
        tenant=principal.tenant,
        scopes=sorted(principal.scopes),
        models=list(principal.models),
        tiers=list(principal.tiers),
        sees_all=principal.sees_all,
        release=release(),
    )


# ---- scaling --------------------------------------------------------------------------------------------------------


class ScalingDecision(DecisionView):
    """A decision that changed the number of workers, or the trouble with them."""

    pool: str = Field(description="MODEL@VERSION, or MODEL")
    before: int | None = Field(description="workers that there were; null: nobody knew")
    signals: dict[str, float] = Field(description="the numbers that the autoscaler saw")

    @classmethod
    def of_entry(cls, pool: str, state: Mapping[str, Any], now: float) -> Self:
        actual, signals = state.get("actual"), state.get("signals")
        numbers = {
            text(name): number
            for name, value in (signals.items() if isinstance(signals, dict) else ())
            if (number := sane(value)) is not None
        }
        up = sane(actual.get("up")) if isinstance(actual, dict) else None
        view = DecisionView.of(state, now)
        return cls(
            **view.model_dump(),
            pool=text(pool),
            before=None if up is None else int(min(up, 2**31)),
            signals=numbers,
        )


class ScalingDecisions(BaseModel):
    object: Literal["list"] = "list"
    data: list[ScalingDecision] = Field(description="the latest first")


class ScalingRetried(BaseModel):
    object: Literal["scaling.retried"] = "scaling.retried"
    pool: str
    at_once: bool = Field(description="false: no autoscaler leads; the next one tries at once")


@router.get("/scaling/decisions", dependencies=MEASURES, response_model=ScalingDecisions)
async def decisions(
    request: Request,
    pool: Annotated[
        str | None,
        Query(max_length=500, description=f"of this pool of `/v1/fleet` alone, among the last {MAX_SCANNED} of all"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most decisions to answer with")] = PAGE,
) -> ScalingDecisions:
    """List the autoscaler's decisions that changed something, with what it saw and why; the latest first."""
    store = _store(request)
    now = seconds(await store.time())
    if pool is not None:
        pool = await _scaled_name(store, pool, await scaling.states(store))
    rows = await scaling.latest(store, pool, limit, MAX_SCANNED)
    return ScalingDecisions(data=[ScalingDecision.of_entry(name, state, now) for name, state in rows])


@router.post(
    "/scaling/{pool:path}/retry", dependencies=ADMINISTERS, response_model=ScalingRetried, responses=errors(404)
)
async def retry(request: Request, pool: str) -> ScalingRetried:
    """Try at once to start workers of a pool whose starts failed; the failures so far are forgotten."""
    store = _store(request)
    pool, state, now = await _scaled(store, pool)
    await scaling.retry(store, pool)
    await audit.append(store, actor_of(request).did("scaling.retry", pool))
    return ScalingRetried(pool=text(pool), at_once=scaling.is_fresh(state.get("at"), now))


class ScalingPin(BaseModel):
    """A number of workers, in place of the policy's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    workers: int = Field(ge=0, le=10**6, description="at most the pool's `max`")
    for_s: float | None = Field(
        None,
        ge=scaling.SHORTEST_PIN_S,
        le=scaling.LONGEST_PIN_S,
        description="how long (s); null: until it is removed",
    )


class ScalingPinned(BaseModel):
    object: Literal["scaling.pinned"] = "scaling.pinned"
    pool: str
    workers: int | None = Field(description="null: the policy decides")
    until: float | None = Field(description="unix seconds; null: until it is removed")
    current: bool = Field(description="false: no autoscaler leads; the next one goes by it")


@router.post(
    "/scaling/{pool:path}/pin",
    dependencies=ADMINISTERS,
    response_model=ScalingPinned,
    responses=errors(404, 413, 415),
    openapi_extra=documented(ScalingPin.model_json_schema()),
)
async def pin(request: Request, pool: str) -> ScalingPinned:
    """Set a pool's number of workers, in place of the autoscaler's policy, for a time or until it is removed."""
    requested = await read_as(request, ScalingPin, gateway_of(request).settings.max_body)
    store, actor = _store(request), actor_of(request)
    pool, state, now = await _scaled(store, pool)
    try:
        scaling.checked_pin(state, requested.workers)
    except ValueError as error:
        raise Problem(400, f"{error}.", code="invalid_value", param="workers") from None
    until = None if requested.for_s is None else now + requested.for_s
    change = actor.did("scaling.pin", f"{pool}: {requested.workers}")
    await scaling.pin(store, pool, scaling.Pin(requested.workers, actor.by, now, until), change)
    current = scaling.is_fresh(state.get("at"), now)
    return ScalingPinned(pool=text(pool), workers=requested.workers, until=until, current=current)


@router.delete(
    "/scaling/{pool:path}/pin", dependencies=ADMINISTERS, response_model=ScalingPinned, responses=errors(404)
)
async def unpin(request: Request, pool: str) -> ScalingPinned:
    """Let the autoscaler's policy decide a pool's number of workers again."""
    store = _store(request)
    pool, state, now = await _scaled(store, pool)
    await scaling.unpin(store, pool, actor_of(request).did("scaling.unpin", pool))
    return ScalingPinned(pool=text(pool), workers=None, until=None, current=scaling.is_fresh(state.get("at"), now))


async def _scaled(store: Redis, pool: str) -> tuple[str, dict[str, Any], float]:
    """A pool's name, its state, and the store's clock. Raises Problem for one that nobody scales."""
    states = await scaling.states(store)
    pool = await _scaled_name(store, pool, states)
    if pool not in states:
        message = f"Nobody scales a pool {shown(pool)}: GET /v1/fleet lists the pools."
        raise Problem(404, message, code="pool_not_found")
    return pool, states[pool], seconds(await store.time())


async def _scaled_name(store: Redis, pool: str, states: Mapping[str, Any]) -> str:
    """The name under which the autoscaler knows a pool of `/v1/fleet`.

    A pool of whatever version is current has the model's name, and that version's row in `/v1/fleet`.
    """
    model, _, version = pool.rpartition("@")
    if pool in states or model not in states:
        return pool
    card = parsed(await store.execute_command("HGET", keys.MODELS, model))
    return model if card.get("version") == version else pool


# ---- workers -------------------------------------------------------------------------------------------------------


class WorkerDraining(BaseModel):
    id: str
    object: Literal["worker.draining"] = "worker.draining"


@router.get("/workers/{worker:path}", dependencies=MEASURES, response_model=WorkerDetail, responses=errors(404))
async def worker_detail(request: Request, worker: str) -> WorkerDetail:
    """Tell what a worker runs and how its KV cache is used. `worker`: its `id` in `/v1/fleet`.

    It is from its lease, as of the last reading for all who look, at most 2 s ago.
    """
    reading = await gateway_of(request).samples.latest(2.0)
    for pool in reading.fleet.pools:
        for lease in pool.workers:
            if lease["incarnation"] == worker:
                lasts = {listed.incarnation: listed.remaining_s for listed in reading.listed}
                sees_all = principal_of(request).sees_all
                return WorkerDetail.described(pool, lease, lasts.get(worker), sees_all=sees_all)
    message = f"There is no worker {shown(worker)} (any more): GET /v1/fleet lists them by their ids."
    raise Problem(404, message, code="worker_not_found")


@router.post(
    "/workers/{worker:path}/drain", dependencies=ADMINISTERS, response_model=WorkerDraining, responses=errors(404, 409)
)
async def drain(request: Request, worker: str) -> WorkerDraining:
    """Tell a worker to take no more tasks, end those that it runs, and exit. `worker`: its `id` in `/v1/fleet`.

    What it cannot end within its drain time goes back to the queue with its tokens. Whether another worker takes its
    place is up to what started it.
    """
    store = _store(request)
    if not await store.exists(keys.lease(worker)):
        message = f"There is no worker {shown(worker)} (any more): GET /v1/fleet lists them by their ids."
        raise Problem(404, message, code="worker_not_found")
    if not await store.publish(keys.control(worker), "drain"):
        message = f"Worker {shown(worker)} does not listen at this moment; try again, or look at its log."
        raise Problem(409, message, code="worker_not_listening", headers=ONCE)
    await audit.append(store, actor_of(request).did("worker.drain", worker))
    return WorkerDraining(id=text(worker))


# ---- routing -------------------------------------------------------------------------------------------------------


class RuleView(BaseModel):
    """Sends tasks of a tenant or tier, or with a header (`Name: value`), to a target."""

    to: str = Field(description="an alias or a version")
    tenant: str | None
    tier: str | None
    header: str | None


class ShadowTarget(BaseModel):
    """The version that gets copies of tasks."""

    to: str = Field(description="an alias or a version")
    percent: float = Field(description="of the tasks that go to other versions")


class RoutingView(BaseModel):
    """The versions of a model that new tasks go to."""

    object: Literal["routing"] = "routing"
    model: str
    generation: int = Field(description="each change makes the next one")
    default: str = Field(description="the version of tasks that nothing else decides")
    aliases: dict[str, str] = Field(description="alias -> version")
    split: dict[str, float] = Field(description="alias or version -> percent of the tasks; the default gets the rest")
    rules: list[RuleView] = Field(description="the first that fits goes before the split")
    sticky: str = Field(description="what stays with its target: caller or tenant")
    stages: dict[str, str] = Field(description="version -> staging, approved or archived; others have none")
    approval: bool = Field(description="whether the default, the split and rules lead to approved versions alone")
    shadow: ShadowTarget | None = Field(description="what gets copies of tasks; null: nothing does")
    changed_at: float = Field(description="unix seconds")
    by: str = Field(description="who changed it")

    @classmethod
    def of(cls, routing: Routing) -> Self:
        shadow = routing.shadow
        return cls(
            shadow=None if shadow is None else ShadowTarget(to=text(shadow.to), percent=sane(shadow.percent) or 0.0),
            model=text(routing.model),
            generation=routing.generation,
            default=text(routing.default),
            aliases={text(alias): text(version) for alias, version in routing.aliases.items()},
            split={text(target): sane(percent) or 0.0 for target, percent in routing.split.items()},
            rules=[
                RuleView(to=text(rule.to), **{name: _optional(getattr(rule, name)) for name in RULED})
                for rule in routing.rules
            ],
            sticky=text(routing.sticky),
            stages={text(version): text(stage) for version, stage in routing.stages.items()},
            approval=bool(routing.approval),
            changed_at=(sane(routing.at) or 0.0) / 1000,
            by=text(routing.by),
        )


class RoutingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RoutingView] = Field(description="of models that have one: others go by their card alone")


@router.get("/routing", dependencies=MEASURES, response_model=RoutingList)
async def routing(request: Request) -> RoutingList:
    """List aliases, splits and rules of models: which versions new tasks go to, since when, and by whom."""
    store = _store(request)
    models = [decoded(name) for name in await store.hkeys(keys.MODELS)][:MAX_ROWS]
    states = await aexecute_many(store, [("HGET", keys.routing(model), "now") for model in models])
    routings = [Routing.of(model, raw) for model, raw in zip(models, states, strict=True)]
    views = [RoutingView.of(state) for state in routings if state is not None]
    return RoutingList(data=sorted(views, key=lambda view: view.model))


class ShadowPair(BaseModel):
    """A task and its copy. Of two values the task's is the first."""

    task: str
    version: str = Field(description="that ran the task")
    shadow: str = Field(description="that ran the copy")
    statuses: tuple[str, str]
    tokens: tuple[int, int] = Field(description="of all choices")
    same: float | None = Field(description="share of tokens before the first difference; null: one did not complete")
    reasons: tuple[list[str | None], list[str | None]] = Field(description="finish reasons, by choice")
    ms: tuple[int | None, int | None] = Field(description="from start to end")
    engine_seconds: tuple[float | None, float | None] = Field(description="the engine's time; null: nobody noted it")


class ShadowSummary(BaseModel):
    """The pairs of two versions, as far as both outputs have completed."""

    version: str
    shadow: str
    pairs: int
    completed: int = Field(description="pairs of which both have completed")
    same: float | None = Field(description="mean share of tokens before the first difference")
    equal: float | None = Field(description="share of pairs with the same tokens")
    same_reason: float | None = Field(description="share of pairs with the same finish reasons")
    length: float | None = Field(description="tokens of the copies by those of the tasks")
    time: float | None = Field(description="median of the copies' times from start to end by the tasks'")


class ShadowReport(BaseModel):
    object: Literal["shadows"] = "shadows"
    model: str
    summaries: list[ShadowSummary] = Field(description=f"of the last {shadows.KEPT} pairs, by their versions")
    drops: dict[str, int] = Field(description="reason -> tasks that were not copied, or not compared")
    data: list[ShadowPair] = Field(description="the latest pairs first")


@router.get("/shadows/{name:path}", dependencies=MEASURES, response_model=ShadowReport)
async def shadow_pairs(
    request: Request,
    name: str,
    limit: Annotated[int, Query(ge=0, le=MAX_PAGE, description="most pairs to answer with")] = PAGE,
) -> ShadowReport:
    """Compare copies of a model's tasks for another version with the tasks: shadow traffic."""
    report = shadows.Report.of(*await aexecute_many(_store(request), shadows.pairs_read(name, shadows.KEPT)))
    return ShadowReport(
        model=text(name),
        summaries=[ShadowSummary(**asdict(each)) for each in shadows.summaries(report.pairs)],
        drops={text(reason): min(count, 2**53) for reason, count in report.drops.items()},
        data=[ShadowPair.model_validate(asdict(pair)) for pair in report.pairs[:limit]],
    )


def _optional(value: str | None) -> str | None:
    return None if value is None else text(value)


# ---- sources -------------------------------------------------------------------------------------------------------


class ScheduleView(BaseModel):
    """A schedule, which makes a task or a file at each of its times."""

    name: str
    last_at: float | None = Field(description="the last of its times that was dealt with: unix seconds")


class RepliesView(BaseModel):
    """A source's replies to the messages that made tasks, which wait to be sent."""

    source: str
    due: int
    oldest_due_s: float = Field(description="for how long the oldest has been due that nobody took")


class SourceItemsView(BaseModel):
    """Counts of the messages, files and times that a source took, by outcome, of all its processes together."""

    source: str
    done: int = Field(description="made what they should")
    refused: int = Field(description="bad messages, files that failed as a whole, times that made nothing")
    missed: int = Field(description="went by, or were gone before they were read")


class Sources(BaseModel):
    """State that event sources keep in the store. Their settings are in their own files."""

    object: Literal["sources"] = "sources"
    schedules: list[ScheduleView]
    replies: list[RepliesView]
    items: list[SourceItemsView]


@router.get("/sources", dependencies=MEASURES, response_model=Sources)
async def sources(request: Request) -> Sources:
    """Tell when schedules last fired, which sources' replies wait, and what became of what sources took."""
    store = gateway_of(request).client.store
    times = {decoded(name): decoded(at) for name, at in (await store.hgetall(keys.SCHEDULES)).items()}
    due = (await outbox.backlog(store)).due
    schedules = [
        ScheduleView(name=text(name), last_at=float(at) if at.isdecimal() and len(at) < 16 else None)
        for name, at in sorted(times.items())
    ]
    replies = [
        RepliesView(source=text(source), due=waiting.rows, oldest_due_s=waiting.oldest_s)
        for source, waiting in due.items()
        if source is not None
    ]
    counts = await read_source_items(store)
    items = [
        SourceItemsView(
            source=text(source), **{outcome: counts.get((source, outcome), 0) for outcome in SOURCE_OUTCOMES}
        )
        for source in sorted({source for source, _ in counts})
    ]
    return Sources(schedules=schedules[:MAX_ROWS], replies=replies[:MAX_ROWS], items=items[:MAX_ROWS])


# ---- webhooks' deliveries -------------------------------------------------------------------------------------------


class AttemptView(BaseModel):
    """A try."""

    at: int = Field(description="unix seconds")
    latency_ms: int
    status: int | None = Field(description="of the HTTP answer, if there was one")
    answer: str = Field(description="its beginning")
    error: str = Field(description="why there was none")


class DeliveryView(BaseModel):
    """An event on its way to one receiver."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    state: Literal["due", "delivered", "dead"]
    webhook_id: str = Field(description="of the event: all its deliveries and tries have the same")
    type: str
    about: str = Field(description="id of the task, response or batch")
    at: int = Field(description="when it happened: unix seconds")
    url: str
    endpoint: str | None = Field(description="the endpoint's id; null: a task's own webhook, or a source's reply")
    tenant: str | None
    tries: int
    attempts: list[AttemptView] = Field(description="the last ones")

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(
            id=text(row.name),
            state=row.state,
            webhook_id=text(row.webhook_id),
            type=text(row.type),
            about=text(row.object),
            at=row.at,
            url=text(row.url),
            endpoint=text(row.endpoint) or None,
            tenant=text(row.tenant) or None,
            tries=row.tries,
            attempts=[
                AttemptView(
                    at=attempt.at,
                    latency_ms=attempt.latency_ms,
                    status=attempt.status,
                    answer=text(attempt.answer),
                    error=text(attempt.error),
                )
                for attempt in row.attempts
            ],
        )


class DeliveryList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DeliveryView] = Field(description="the last to enter the state first")


class DeliveryReplayed(BaseModel):
    id: str
    object: Literal["webhook_delivery.replayed"] = "webhook_delivery.replayed"


@router.get("/webhook_deliveries", dependencies=ADMINISTERS, response_model=DeliveryList)
async def deliveries(
    request: Request,
    state: Annotated[State, Query(description="due: to be tried, perhaps again; dead: given up")] = "dead",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most deliveries to answer with")] = PAGE,
) -> DeliveryList:
    """List deliveries of events to webhooks, and replies of sources, with their last tries."""
    rows: list[Row] = []
    async with aclosing(outbox.rows(_store(request), state)) as matching:
        async for row in matching:
            rows.append(row)
            if len(rows) >= limit:
                break
    return DeliveryList(data=[DeliveryView.of(row) for row in rows])


@router.post(
    "/webhook_deliveries/{delivery}/replay",
    dependencies=ADMINISTERS,
    response_model=DeliveryReplayed,
    responses=errors(404, 409),
)
async def replay(request: Request, delivery: str) -> DeliveryReplayed:
    """Deliver an event again, now, with the webhook id that it had."""
    store = _store(request)
    row = await outbox.get(store, delivery)
    answer = "gone" if row is None else decoded(await arun(store, outbox.replay(delivery)))
    if row is None or answer == "gone":
        message = f"There is no delivery {shown(delivery)} (any more): GET /v1/webhook_deliveries lists them."
        raise Problem(404, message, code="delivery_not_found")
    if answer == "held":
        message = "A process tries this delivery at this moment; look at it again in a minute."
        raise Problem(409, message, code="delivery_under_way", headers=ONCE)
    await audit.append(store, actor_of(request).did("delivery.replay", delivery, row.tenant))
    return DeliveryReplayed(id=text(delivery))


def _store(request: Request) -> Redis:
    return gateway_of(request).client.store
