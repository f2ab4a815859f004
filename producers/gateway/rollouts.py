"""Rollouts over HTTP: what they did, and what operators do with them.

    GET  /v1/rollouts                               the last of each model
    GET  /v1/rollouts/{model}/report                what one by steps compared and decided
    POST /v1/rollouts/{model}/start                 begin one by steps that are judged
    POST /v1/rollouts/{model}/pause, /resume        let it stay at its step, and go on
    POST /v1/rollouts/{model}/promote               go to the next step now, or past all
    POST /v1/rollouts/{model}/abort                 the version before gets all new tasks again

What changes something needs a key of the scope admin and is in the audit log, under the key. The work is `penstock
rollout`'s own (`producers.rollouts.operations`), on a thread with a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from redis import Redis as Store
from redis.exceptions import NoPermissionError

from producers.contract import keys
from producers.contract.profile import sane
from producers.errors import shown
from producers.gateway.changes import on_thread, refused
from producers.gateway.context import gateway_of
from producers.gateway.fleet import MAX_ROWS, text
from producers.gateway.http.authorization import ADMINISTERS, MEASURES, actor_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import documented, read_as, schema_of
from producers.gateway.tasks.views import errors
from producers.rollouts import operations
from producers.rollouts.metrics import BY_NAME, defaults, usual
from producers.rollouts.operations import RolloutError
from producers.rollouts.refusals import LONGEST, MOST
from producers.rollouts.report import report
from producers.store.access import audit
from producers.store.fleet import canaries
from producers.store.fleet.canaries import Canary, Plan
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import RoutingError

#: Decisions that a report has at most.
DECISIONS: Final = 100
router = APIRouter(prefix="/v1", tags=["fleet"])


# ---- what they did -------------------------------------------------------------------------------------------------


class RolloutView(BaseModel):
    """A model's last rolling update."""

    object: Literal["rollout"] = "rollout"
    model: str
    version: str = Field(description="the new one")
    before: str = Field(description="the version that new tasks had when it was asked for")
    phase: str = Field(description="starting, draining, done, failed or cancelled")
    reason: str = Field(description="why it failed, or what it waits for")
    workers: int = Field(description="ready workers of the new version to wait for")
    asked_at: float = Field(description="unix seconds")
    changed_at: float = Field(description="when its phase began")

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        return cls(
            model=text(rollout.model),
            version=text(rollout.version),
            before=text(rollout.before),
            phase=text(rollout.phase),
            reason=text(rollout.reason),
            workers=int(min(sane(rollout.workers) or 0, 2**31)),
            asked_at=sane(rollout.asked) or 0.0,
            changed_at=sane(rollout.changed) or 0.0,
        )


class JudgedRollout(BaseModel):
    """A model's last rollout by steps that are judged."""

    object: Literal["rollout.judged"] = "rollout.judged"
    model: str
    version: str = Field(description="the candidate")
    before: str = Field(description="the baseline")
    phase: str = Field(description="preparing, judging, paused, promoted, rolled_back, aborted or failed")
    percent: float = Field(description="the candidate's part of new tasks")
    reason: str = Field(description="of its last decision")
    begun_at: float = Field(description="unix seconds")
    changed_at: float = Field(description="since when the routing gives that part; 0: it is yet to")

    @classmethod
    def of(cls, state: Canary) -> Self:
        return cls(
            model=text(state.model),
            version=text(state.version),
            before=text(state.before),
            phase=text(state.phase),
            reason=text(state.reason),
            percent=sane(state.percent) or 0.0,
            begun_at=(sane(state.begun) or 0.0) / 1000,
            changed_at=(sane(state.since) or 0.0) / 1000,
        )


class RolloutList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RolloutView]
    judged: list[JudgedRollout] = Field(description="by steps that are judged; the latest first")


class ComparedMetric(BaseModel):
    """A metric of both versions. Differences are of the candidate from the baseline; above 0 it is worse."""

    name: str
    text: str
    kind: str = Field(description="share, rank, score, tail or pair")
    margin: float = Field(description="the difference that is allowed")
    tolerance: float
    limit: float = Field(description="the odds at which it is rolled back")
    verdict: str = Field(description="worse, looks worse or not found worse")
    candidate: dict[str, float | None] = Field(description="share, mean, or p50 and p95")
    baseline: dict[str, float | None]
    n: int = Field(description="comparisons")
    lower: float
    mean: float
    upper: float
    odds: float = Field(description="that it is worse, to 1")


class RolloutDecision(BaseModel):
    """A change of a rollout."""

    at: float = Field(description="unix seconds")
    what: str = Field(description="start, raise, promote, roll_back, abort, fail, pause or resume")
    by: str
    phase: str
    percent: float = Field(description="the candidate's part since")
    reason: str


class RolloutReport(JudgedRollout):
    """Comparisons and decisions of a rollout, with their reasons."""

    by: str = Field(description="who began it")
    steps: list[float] = Field(description="percentages below 100")
    step: int = Field(description="of these, from 0; -1 before the first")
    hold_s: float
    min_samples: int
    alpha: float
    waits: str = Field(description="what it waits for; empty once it has ended")
    tasks: dict[str, int] = Field(description="of the candidate and the baseline, as far as they were compared")
    metrics: list[ComparedMetric]
    decisions: list[RolloutDecision] = Field(description="the last 100, the oldest first")


@router.get("/rollouts", dependencies=MEASURES, response_model=RolloutList)
async def rollouts(request: Request) -> RolloutList:
    """List each model's last rolling update, and its last rollout by steps: how far they came, and why; the latest
    first."""
    store = gateway_of(request).client.store
    raw = await store.execute_command("HVALS", keys.ROLLOUTS)
    views = [RolloutView.of(rollout) for rollout in map(Rollout.of, raw or ()) if rollout is not None]
    try:
        states = map(Canary.of, await store.execute_command("HVALS", keys.CANARIES) or ())
    except NoPermissionError:  # users of the server as an earlier release made them
        states = map(Canary.of, ())
    judged = [JudgedRollout.of(state) for state in states if state is not None]
    return RolloutList(
        data=sorted(views, key=lambda view: -view.changed_at)[:MAX_ROWS],
        judged=sorted(judged, key=lambda view: -view.begun_at)[:MAX_ROWS],
    )


@router.get("/rollouts/{name:path}/report", dependencies=MEASURES, response_model=RolloutReport, responses=errors(404))
async def rollout_report(request: Request, name: str) -> RolloutReport:
    """Report what a model's last rollout by steps compared and decided, as `penstock rollout report`."""

    def work(store: Store) -> RolloutReport | None:
        state = canaries.read(store, name)
        if state is None:
            return None
        data = report(store, state)
        return RolloutReport(
            **JudgedRollout.of(state).model_dump(),
            by=text(state.by),
            steps=list(state.plan.steps),
            step=state.step,
            hold_s=state.plan.hold_s,
            min_samples=state.plan.min_samples,
            alpha=state.plan.alpha,
            waits=text(data["waits"]),
            tasks=data["tasks"],
            metrics=data["metrics"],
            decisions=[
                RolloutDecision(
                    at=row["at"] / 1000,
                    percent=row["percent"],
                    **{field: text(row[field]) for field in ("what", "by", "phase", "reason")},
                )
                for row in data["decisions"][-DECISIONS:]
            ],
        )

    compared = await on_thread(request, work)
    if compared is None:
        raise Problem(404, f"No rollout of {shown(name)} by steps was ever started.", code="rollout_not_found")
    return compared


# ---- what operators do with them ------------------------------------------------------------------------------------


class MetricChange(BaseModel):
    """The margin by which a metric may become worse. Unset: the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    margin: float | None = Field(None, ge=0, lt=1)
    tolerance: float | None = Field(None, ge=0, le=10)


#: Longest time (s) of a rollout's settings: a month.
LONGEST_S: Final = 31 * 86_400.0
USUAL: Final = Plan()


class RolloutStart(BaseModel):
    """A rollout by steps that are judged: what `penstock rollout start` takes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    to: str = Field(description="the candidate: a version or an alias", max_length=200)
    steps: list[float] = Field(
        list(USUAL.steps), max_length=operations.MOST_STEPS + 1, description="rising percentages of new tasks"
    )
    hold_s: float = Field(USUAL.hold_s, ge=0, le=LONGEST_S, description="shortest time of a step")
    min_samples: int = Field(USUAL.min_samples, ge=1, le=10**9, description="fewest comparisons of a step")
    workers: int = Field(USUAL.workers, ge=1, le=10**6, description="ready workers of the candidate to wait for")
    timeout_s: float = Field(USUAL.timeout_s, ge=0, le=LONGEST_S, description="longest time for them to become ready")
    lost_s: float = Field(
        USUAL.lost_s, ge=0, le=LONGEST_S, description="time without one after which it is rolled back"
    )
    warm_up_s: float = Field(
        USUAL.warm_up_s, ge=0, le=LONGEST_S, description="from the first traffic, in which times are not compared"
    )
    block_s: float = Field(
        USUAL.block_s, ge=0, le=LONGEST_S, description="in which comparisons of times count as one; 0: each counts"
    )
    per_tenant: int = Field(
        USUAL.per_tenant, ge=0, le=10**9, description="most tasks of a tenant's compared in a step; 0: no bound"
    )
    alpha: float = Field(USUAL.alpha, description="probability of rolling back a candidate that is no worse")
    metrics: dict[str, MetricChange] = Field(
        {}, max_length=100, description="those with another margin or tolerance, or that are not compared as usual"
    )
    without: list[str] = Field([], max_length=100, description="metrics to leave out")
    refusals: list[Annotated[str, Field(max_length=LONGEST)]] = Field(
        [], max_length=MOST, description="how refusals begin, instead of the usual phrases"
    )

    def plan(self) -> Plan:
        """Raises RolloutError for what makes no sense."""
        metrics = defaults()
        for name in (*self.metrics, *self.without):
            if name not in BY_NAME:
                raise RolloutError(f"there is no metric {shown(name)}; there are {', '.join(BY_NAME)}")
            metrics.setdefault(name, usual(name))
        for name, change in self.metrics.items():
            metrics[name] |= change.model_dump(exclude_none=True)
        kept = {name: values for name, values in metrics.items() if name not in self.without}
        if not kept:
            raise RolloutError("no metric is left to compare: leave out fewer")
        settings = self.model_dump(exclude={"to", "steps", "metrics", "without"})
        return operations.checked(Plan(steps=tuple(self.steps), metrics=kept, **settings))


START: Final = schema_of(RolloutStart)


class RolloutAborted(BaseModel):
    object: Literal["rollout.aborted"] = "rollout.aborted"
    model: str
    version: str = Field(description="that gets no new tasks any more")
    phase: str


@router.post(
    "/rollouts/{model:path}/start",
    dependencies=ADMINISTERS,
    response_model=JudgedRollout,
    responses=errors(404, 409, 413, 415),
    openapi_extra=documented(START),
)
async def start_rollout(request: Request, model: str) -> JudgedRollout:
    """Give a version a growing part of a model's new tasks, compare it with the default, and promote it or roll back.

    The sweeper that leads carries it out. The version's workers come up first: start them now, unless `penstock up` or
    an autoscaler does.
    """
    start = await read_as(request, RolloutStart, gateway_of(request).settings.max_body)
    try:
        plan = start.plan()
    except RolloutError as error:
        raise Problem(400, f"{error}.", code="invalid_value") from None
    by = actor_of(request).by
    return await _rollout(request, model, "start", lambda store: operations.start(store, model, start.to, plan, by=by))


@router.post(
    "/rollouts/{model:path}/pause", dependencies=ADMINISTERS, response_model=JudgedRollout, responses=errors(409)
)
async def pause_rollout(request: Request, model: str) -> JudgedRollout:
    """Let a rollout stay at its step. It is still rolled back if it turns out worse."""
    by = actor_of(request).by
    return await _rollout(request, model, "pause", lambda store: operations.pause(store, model, by))


@router.post(
    "/rollouts/{model:path}/resume", dependencies=ADMINISTERS, response_model=JudgedRollout, responses=errors(409)
)
async def resume_rollout(request: Request, model: str) -> JudgedRollout:
    """Go on with a paused rollout."""
    by = actor_of(request).by
    return await _rollout(request, model, "resume", lambda store: operations.resume(store, model, by))


@router.post(
    "/rollouts/{model:path}/promote", dependencies=ADMINISTERS, response_model=JudgedRollout, responses=errors(409)
)
async def promote_rollout(
    request: Request,
    model: str,
    full: Annotated[bool, Query(description="make the candidate the default now, past all steps")] = False,
) -> JudgedRollout:
    """Go to a rollout's next step now, whatever it has compared."""
    by = actor_of(request).by
    return await _rollout(request, model, "promote", lambda store: operations.promote(store, model, by, full=full))


async def _rollout(request: Request, model: str, did: str, work: Callable[[Store], Canary]) -> JudgedRollout:
    """Change a rollout, and note who did."""
    try:
        state = await on_thread(request, work)
    except RoutingError as error:
        raise refused(str(error)) from None
    except RolloutError as error:
        raise Problem(409, f"{error}.", code="rollout_refused") from None
    change = actor_of(request).did(f"rollout.{did}", f"{model}@{state.version}")
    await audit.append(gateway_of(request).client.store, change)
    return JudgedRollout.of(state)


@router.post(
    "/rollouts/{model:path}/abort", dependencies=ADMINISTERS, response_model=RolloutAborted, responses=errors(404, 409)
)
async def abort_rollout(request: Request, model: str) -> RolloutAborted:
    """End a rollout that is under way: the version before gets all new tasks again. One that waits for its workers is
    cancelled; one that has ended, or whose version has all new tasks, is refused."""
    actor = actor_of(request)

    def work(store: Store) -> RolloutAborted:
        judged = canaries.read(store, model)
        if judged is not None and judged.under_way:
            ended = operations.abort(store, model, actor.by)
            return RolloutAborted(model=model, version=ended.version, phase=ended.phase)
        short = operations.cancel(store, model)
        return RolloutAborted(model=model, version=short.version, phase=short.phase)

    try:
        aborted = await on_thread(request, work)
    except (RolloutError, RoutingError) as error:
        raise Problem(409, f"{error}.", code="rollout_not_aborted") from None
    await audit.append(gateway_of(request).client.store, actor.did("rollout.abort", f"{model}@{aborted.version}"))
    return aborted
