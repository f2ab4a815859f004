"""A task's course so far: its starts, what each engine did with it, and how long each phase took."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from producers.contract.record import BROKEN, Record
from producers.contract.run import Run

#: Phases in order, and the time at which each begins. The last one ends when the task is settled.
PHASES: Final = ("submit", "queue", "worker", "first_token", "output", "settle")


@dataclass(frozen=True, slots=True)
class Preemption:
    """The engine took a task's room; it went on later. `at`: unix seconds; `why`: see `engine.request.Course`."""

    at: float
    why: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start. None stands for what nobody knows, as for a worker that died before its first token."""

    worker: str | None
    """The worker's incarnation."""
    why: str
    """The cause of end: `died`, `drained`, `preempted`, `lease_lost`, `breaker`; `failed`: the engine failed it, and
    Celery tries it again; `ended`: the task ended. Or `running`."""
    at: float | None = None
    """Time at which that end was known, unix seconds."""
    duration_s: float | None = None
    """From the claim until then, or until now."""
    entries: int | None = None
    """Entries of its stream by then, where the task went on elsewhere."""
    first_step_at: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had."""
    preemptions: int = 0
    preempted: list[Preemption] = field(default_factory=list)
    """The first of them."""


def attempts(record: Record, now_ms: float, orphaned: bool = False) -> list[Attempt]:
    """Those that are kept in the record: the first 32 deaths, the first 32 times that it was given back, and the last
    start. `orphaned`: the last one's worker died, and nobody has written that yet."""
    runs = record.runs
    found: list[tuple[int, Attempt]] = []
    for name in ("lost", "given_back"):
        said = record.json(name)
        for one in said if isinstance(said, list) else ():
            with suppress(*BROKEN):  # what is none is left out
                found.append(_ended(one, runs))
    last = record.count("claims")
    if last and record.status != "queued" and all(start != last for start, _ in found):
        found.append((last, _last(record, runs.get(last), now_ms, orphaned)))
    return [attempt for _, attempt in sorted(found, key=lambda one: (one[1].at or now_ms, one[0]))]


def _ended(said: Mapping[str, Any], runs: Mapping[int, Run]) -> tuple[int, Attempt]:
    """One that ended before the task did, with its number; 0: an earlier release wrote no number."""
    start, began, at = int(said.get("start", 0)), said.get("began"), int(said["at"])
    why = str(said.get("why", "died"))
    return start, _attempt(runs.get(start), str(said["owner"]), why, began, at, at, int(said["entries"]))


def _last(record: Record, run: Run | None, now_ms: float, orphaned: bool) -> Attempt:
    began, finished = record.time("began"), record.time("finished") if record.final else None
    owner = record.fields.get("owner") or (run.owner if run else None)
    why = "ended" if record.final else "died" if orphaned else "running"
    return _attempt(run, owner, why, began, finished, finished or now_ms)


def _attempt(
    run: Run | None,
    owner: str | None,
    why: str,
    began: int | None,
    at: int | None,
    until: float,
    entries: int | None = None,
) -> Attempt:
    return Attempt(
        owner,
        why,
        _seconds(at),
        None if began is None else round(max(0.0, until - began) / 1000, 3),
        entries,
        _seconds(run.step) if run else None,
        run.cached if run and run.step is not None else None,
        run.preemptions if run else 0,
        [Preemption(at / 1000, why) for at, why in run.preempted] if run else [],
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def phases(record: Record, now_ms: float) -> dict[str, float]:
    """Seconds that each phase took so far; one that has not begun, or of which nobody tells, is not there. Where no
    worker told of its first step, `first_token` begins at the start."""
    started, first, finished = (record.time(name) for name in ("started", "first", "finished"))
    last = record.last_token if record.final else None
    begins = [record.time("created"), record.time("queued"), started, record.first_step, first, last or finished]
    if begins[3] is None and first is not None:
        begins[2:4] = [None, started]
    known = [(name, at) for name, at in zip(PHASES, begins, strict=True) if at is not None]
    settled = record.time("settled")
    ends = [at for _, at in known[1:]] + [settled if settled is not None else now_ms]
    return {name: round(max(0.0, end - at) / 1000, 3) for (name, at), end in zip(known, ends, strict=False)}
