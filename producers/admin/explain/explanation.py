"""An explanation, put together: place, reasons, estimate, attempts, phases, and one line of words."""

from __future__ import annotations

from dataclasses import dataclass, field

from redis.asyncio import Redis

from producers.admin.explain.attempts import Attempt, attempts, phases
from producers.admin.explain.look import Seen, look
from producers.admin.explain.reasons import Reason, counted, reasons
from producers.broker.base import Broker
from producers.contract.profile import sane
from producers.contract.record import Record


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now, reckoned from what workers measured of themselves. None: nobody can tell."""

    starts_in_s: float | None = None
    ends_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A task's place, what keeps it, and its times, in seconds."""

    id: str
    status: str
    summary: str
    """One sentence."""
    ahead: int | None = None
    """Tasks that go before it; None if it does not wait, or nobody can tell."""
    ahead_is_exact: bool = False
    waiting: int = 0
    """All tasks that wait for its version."""
    blocked_by: list[Reason] = field(default_factory=list)
    estimate: Estimate = Estimate()
    worker: str | None = None
    """The worker's incarnation that runs it."""
    starts: int = 0
    """Number of its starts."""
    attempts: list[Attempt] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Each one's duration; the last one may go on."""


async def explain(store: Redis, broker: Broker, record: Record) -> Explanation:
    """Explain a task. Raises redis.exceptions.RedisError or OSError."""
    return explanation(await look(store, broker, record))


def explanation(seen: Seen) -> Explanation:
    record, why = seen.record, reasons(seen)
    estimate = estimated(seen)
    return Explanation(
        record.id,
        record.status,
        summary(seen, why, estimate),
        seen.ahead,
        bool(seen.standing and seen.standing.exact and not seen.better and not seen.later),
        sum(seen.pool.queued.values()),
        why,
        estimate,
        record.fields.get("owner") if record.status == "in_progress" and not seen.orphaned else None,
        record.count("claims"),
        attempts(record, seen.now_ms, seen.orphaned),
        phases(record, seen.now_ms),
    )


def estimated(seen: Seen) -> Estimate:
    """Reckoned from the throughput that workers of the version measured, and what each task took of it on average, if
    this one may need as much. A task that runs for longer than that has no estimate of its end."""
    rate, per_task, knee = seen.profile.tokens_per_s, seen.profile.tokens_per_task, seen.profile.knee
    if not rate or not per_task or not knee or seen.record.final:
        return Estimate()
    service = knee * min(per_task, seen.tokens or per_task) / rate
    if seen.record.status == "in_progress" and not seen.orphaned:
        left = service - (seen.now_ms - (seen.record.time("started") or seen.now_ms)) / 1000
        return Estimate(0.0, left if left > 0 else None)
    start = _start(seen, rate / per_task, knee)
    return Estimate(start, None if start is None else start + service)


def _start(seen: Seen, tasks_per_s: float, knee: float) -> float | None:
    """Seconds until it starts. `tasks_per_s`, `knee`: of one worker."""
    wait = 0.0 if seen.standing is None else seen.standing.due_s or 0.0
    workers = len(seen.ready)
    if not workers:
        cold, state = seen.profile.cold_start.get("total"), seen.scaling or {}
        workers = int(sane(state.get("wanted")) or 0)
        if not workers or cold is None or state.get("trouble"):
            return None
        wait += cold
    if seen.ahead is None:
        return None if seen.standing is None else wait
    running = sum(sane(one.get(name)) or 0 for one in seen.ready for name in ("running", "waiting"))
    before = max(0.0, seen.ahead - max(0.0, workers * knee - running))
    return wait + before / (workers * tasks_per_s)


def summary(seen: Seen, why: list[Reason], estimate: Estimate) -> str:
    """One sentence."""
    record = seen.record
    if record.final:
        error = record.json("error")
        said = f": {error.get('message')}" if isinstance(error, dict) else ""
        return f"It has ended: {record.status}{said}"
    if seen.orphaned:
        because = f"; {why[0].message}" if why else ""
        return f"It waits for another worker: {record.fields.get('owner')} died, or was cut off{because}."
    if record.status == "in_progress":
        if why:
            return f"It is at {record.fields.get('owner')}, and waits there: {why[0].message}."
        end = _in(", and ends", estimate.ends_in_s)
        return f"It runs on {record.fields.get('owner')}; tokens so far: {sum(record.nexts)}{end}."
    place = "It waits" if seen.ahead is None else f"It waits, with {counted(seen.ahead)} before it,"
    because = f": {why[0].message}" if why else ", and is about to be taken" if seen.ahead == 0 else ""
    return f"{place} in the tier {record.tier}{because}{_in('; it starts', estimate.starts_in_s)}."


def _in(what: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{what} in about {seconds:.1f} s"
