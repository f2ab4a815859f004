"""Counters and histograms of each model that no process's end takes back: what its tasks and its engines have taken.

    a final end ─▶ row of the ledger ─ sweeper, each second: count_ended ─┐
    a worker's tokens and steps ─▶ Tally ─ each second, while it works ───┴ MEASURE ─▶ `penstock:metrics:model:<model>`
    what became of a source's message, file or time ─ each second ────────── MEASURE ─▶ `penstock:metrics:sources`

Every gateway exports the same sums (`producers.gateway.metrics`). MEASURE adds increments once: a source's mark says
which it has sent last. A worker's source is its process, and its mark counts its calls; the source `ledger` has one
mark for all sweepers, the id of the last row that was counted.

A model's hash maps `<metric> <tier or outcome> <upper bound, sum or n>` to an integer: a bucket's own observations (not
those of smaller buckets), the sum of all in units of the metric's `scale`, or a count. A reader passes over fields that
its release does not know. Only models with a card have a hash, each of MAX_FIELDS fields at most. It goes 30 days after
its last increment.

| lost | when |
| --- | --- |
| up to a second of a worker's tokens and steps, none of its tasks | it is killed |
| up to a second of a sources process's outcomes | it is killed |
| nothing: increments wait in constant memory, and rows in the ledger | the store is away |
| tasks that ended | a sweeper of an earlier release leads: it folds rows that were not counted |
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, aexecute, aexecute_many, arun, script, text
from producers.contract import keys
from producers.store import shadows
from producers.store.protocol import PACKAGE
from producers.store.usage.ledger import STATUSES

#: Upper bounds of times (s), from a millisecond to an hour.
SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
#: Upper bounds of sizes.
SIZES: Final = tuple(float(2**k) for k in range(15))
MICRO: Final = 1_000_000
#: Time (s) after its last increment for which a model's hash, or a source's mark, is kept.
KEPT_S: Final = 30 * 24 * 3600
#: The most fields of a model's hash: all tiers, outcomes and buckets have some 900.
MAX_FIELDS: Final = 2048
#: Rows of the ledger that are counted at a time.
PAGE: Final = 500
#: The source of what is counted from the ledger.
LEDGER: Final = "ledger"
#: The label of a metric that is not apart by tier.
ALL: Final = "all"


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """`name` ends with the unit. `scale`: parts of the unit that sums count."""

    name: str
    text: str
    bounds: tuple[float, ...] = SECONDS
    scale: int = MICRO
    by_tier: bool = True

    @property
    def buckets(self) -> tuple[str, ...]:
        """The fields' names of the buckets."""
        return (*map(repr, self.bounds), "+Inf")


QUEUE_WAIT: Final = Histogram("queue_wait_seconds", "From a task's submission to its first claim by a worker.")
FIRST_TOKEN: Final = Histogram(
    "time_to_first_token_seconds", "From a task's submission to its first token in the store."
)
CLAIM_TO_FIRST: Final = Histogram(
    "claim_to_first_token_seconds", "From a task's first claim by a worker to its first token in the store."
)
INTER_TOKEN: Final = Histogram(
    "inter_token_seconds",
    "Between publications of tokens of one choice by one worker; tokens of one step are published at once.",
)
PER_TOKEN: Final = Histogram(
    "time_per_output_token_seconds",
    "From the first token of a completed task to its end, by each further token of its longest choice.",
)
TASK: Final = Histogram("task_seconds", "From a task's submission to its end, however it ended.")
#: OpenTelemetry's GenAI metrics, with the boundaries that its conventions name; sent by `producers.sweeper.gen_ai`.
GEN_AI_FIRST_TOKEN: Final = Histogram(
    "gen_ai.server.time_to_first_token",
    "From a completed task's submission to its first token in the store.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_PER_TOKEN: Final = Histogram(
    "gen_ai.server.time_per_output_token",
    "From the first token of a completed task to its end, by each further token of its longest choice.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
GEN_AI_REQUEST: Final = Histogram(
    "gen_ai.server.request.duration",
    "From a task's submission to its end.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
#: The same of tasks that failed.
GEN_AI_FAILED: Final = replace(GEN_AI_REQUEST, name=f"{GEN_AI_REQUEST.name}.failed")
GEN_AI: Final = (GEN_AI_FIRST_TOKEN, GEN_AI_PER_TOKEN, GEN_AI_REQUEST, GEN_AI_FAILED)
STEP: Final = Histogram("step_seconds", "Time of an engine's step.", by_tier=False)
STEP_SEQUENCES: Final = Histogram(
    "step_sequences", "Sequences that an engine's step computed together.", SIZES, 1, by_tier=False
)
STEP_TOKENS: Final = Histogram("step_tokens", "Tokens that an engine's step computed.", SIZES, 1, by_tier=False)
HISTOGRAMS: Final = (
    *(QUEUE_WAIT, FIRST_TOKEN, CLAIM_TO_FIRST, INTER_TOKEN, PER_TOKEN, TASK),
    *(STEP, STEP_SEQUENCES, STEP_TOKENS),
)
#: The counter of tasks, by tier and outcome.
TASKS: Final = "tasks"
#: The counter of workers' time (microseconds), by state: `busy` is the time of steps, in which tasks have a share each;
#: `idle` and `starting` (a cold start, until it takes tasks) are nobody's.
WORKER_TIME: Final = "model_worker_us"
WORKER_STATES: Final = ("busy", "idle", "starting")
#: The counter of what workers' devices drew (microjoules), by the same states, where they have a meter.
ENERGY: Final = "model_energy_uj"
#: The counter of time that tasks lost (microseconds), by cause: put off in an engine for others; from the last sign of
#: a worker that died, or gave the task back, until another one had it; a task's part of steps for tokens that had been
#: computed before either.
LOST_TIME: Final = "model_lost_us"
#: Cause -> the statistic of a worker's engine (s).
LOST_IN_ENGINE: Final = {"preemption": "put_off_s", "recomputation": "recompute_s"}
LOST_CAUSES: Final = (*LOST_IN_ENGINE, "failover", "handover")
#: The counters of workers' starts, by what they began as, and of the time (microseconds) of these starts, by phase
#: (`workers.runtime.cold_start`): a standby had the first two before.
STARTS: Final = "model_starts"
START_KINDS: Final = ("standby", "process")
START_TIME: Final = "model_start_us"
START_PHASES: Final = ("process", "imports", "weights", "compile", "warm_up", "connect")
#: The counter of workers' processor time (microseconds), of all threads of their processes.
PROCESSOR_TIME: Final = "model_processor_us"
#: (name, help, statistic of a worker's engine): counters that workers add to.
ENGINE_COUNTERS: Final = (
    ("model_prompt_tokens", "Prompt tokens that all workers have taken in.", "prompt_tokens"),
    ("model_cached_tokens", "Prompt tokens that all workers found in their prefix caches.", "cached_tokens"),
    ("model_generated_tokens", "Tokens that all workers have generated.", "generated_tokens"),
    ("model_preemptions", "Sequences that all workers have put off for others.", "preemptions"),
    ("model_drafted_tokens", "Tokens that all workers guessed ahead (speculative decoding).", "drafted"),
    ("model_draft_accepted_tokens", "Of these, those that were right.", "draft_accepted"),
)


#: The counter of what event sources took, by source and outcome.
SOURCE_ITEMS: Final = "source_items"
#: What becomes of a source's message, file or time: it made what it should; it was refused; it went by unused.
SOURCE_OUTCOMES: Final = ("done", "refused", "missed")


class Tally:
    """Increments of one model. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        #: (histogram, label) -> observations of each bucket, and the sum of all.
        self._cells: dict[tuple[Histogram, str], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts or self._cells)

    def observe(self, histogram: Histogram, value: float, label: str = ALL, count: int = 1) -> None:
        """Enter `count` observations of one value (seconds, or a size)."""
        cell = self._cells.get((histogram, label))
        if cell is None:
            cell = self._cells[histogram, label] = [0] * (len(histogram.bounds) + 2)
        cell[bisect_left(histogram.bounds, value)] += count
        cell[-1] += count * round(value * histogram.scale)

    def add(self, counter: str, count: int, *labels: str) -> None:
        """Count something. `labels`: a tier and an outcome, for tasks."""
        if count:
            self._counts[" ".join((counter, *(labels or (ALL,)), "n"))] += count

    def fields(self) -> dict[str, int]:
        """Field of the model's hash -> increment."""
        fields = dict(self._counts)
        for (histogram, label), cell in self._cells.items():
            names = (*histogram.buckets, "sum")
            fields |= {f"{histogram.name} {label} {name}": n for name, n in zip(names, cell, strict=True) if n}
        return fields


def measure(source: str, mark: str, tallies: Mapping[str, Tally], *, before: str = "") -> Call:
    """MEASURE: add increments, by their models, unless the source's mark says that they were added. Answers 1, or 0 if
    they were. `before`: the mark that the source must have; empty: any."""
    return _increments(source, mark, {keys.metrics(model): tally.fields() for model, tally in tallies.items()}, before)


def measure_items(process: str, mark: str, counts: Mapping[tuple[str, str], int]) -> Call:
    """MEASURE of what event sources took. `counts`: (source, outcome) -> increment; 0 makes its field."""
    fields = {f"{SOURCE_ITEMS} {source} {outcome} n": count for (source, outcome), count in counts.items()}
    return _increments(f"sources:{process}", mark, {keys.METRICS_SOURCES: fields})


def _increments(source: str, mark: str, hashes: Mapping[str, Mapping[str, int]], before: str = "") -> Call:
    """MEASURE. `hashes`: key -> field -> increment."""
    args: list[str | int] = [before, mark, KEPT_S, MAX_FIELDS]
    for fields in hashes.values():
        args += [len(fields), *(part for item in fields.items() for part in item)]
    return Call(script(PACKAGE, "measure"), (keys.metrics_mark(source), *hashes), args)


async def count_ended(store: Redis) -> int:
    """Count tasks that have ended since the last call of whomever. Returns how many rows of the ledger there were.

    Raises redis.exceptions.RedisError or OSError.
    """
    total = 0
    while True:
        mark = text(await store.get(keys.metrics_mark(LEDGER)) or b"0-0")
        rows: Any = await aexecute(store, "XRANGE", keys.LEDGER, f"({mark}", "+", "COUNT", PAGE)
        if not rows:
            return total
        models = {text(name) for name in await aexecute(store, "HKEYS", keys.MODELS)}
        tallies: dict[str, Tally] = {}
        for entry, fields in rows:
            row = {text(name): text(value) for name, value in zip(fields[::2], fields[1::2], strict=True)}
            if (model := row.get("model", "")) in models and row.get("tenant") != shadows.TENANT:
                _count(tallies.setdefault(model, Tally()), row, int(text(entry).partition("-")[0]))
        if await arun(store, measure(LEDGER, text(rows[-1][0]), tallies, before=mark)):
            total += len(rows)
        if len(rows) < PAGE:
            return total


def _count(tally: Tally, row: Mapping[str, str], ended: int) -> None:
    """Enter a row of the ledger. `ended`: ms. A row of an earlier release has no times but its end's."""
    tier, status = row.get("tier", ""), row.get("status", "")
    if tier not in keys.TIERS or status not in STATUSES:
        return
    tally.add(TASKS, 1, tier, status)
    created, started, first = (_whole(row.get(name)) for name in ("created", "started", "first"))
    if _whole(row.get("discarded")):
        first = 0  # best_of or a beam search: all of it was published at its end
    if created:
        tally.observe(TASK, _since(created, ended), tier)
        tally.observe(GEN_AI_FAILED if status == "failed" else GEN_AI_REQUEST, _since(created, ended), tier)
        if started:
            tally.observe(QUEUE_WAIT, _since(created, started), tier)
        if first:
            tally.observe(FIRST_TOKEN, _since(created, first), tier)
            if status == "completed":
                tally.observe(GEN_AI_FIRST_TOKEN, _since(created, first), tier)
    if first:
        if started:
            tally.observe(CLAIM_TO_FIRST, _since(started, first), tier)
        further = _whole(row.get("longest")) - 1
        if status == "completed" and further > 0:
            for histogram in (PER_TOKEN, GEN_AI_PER_TOKEN):
                tally.observe(histogram, _since(first, ended) / further, tier)


def _since(begin: int, end: int) -> float:
    """Seconds between two times (ms); 0 where a clock was set back."""
    return max(0, end - begin) / 1000


def _whole(raw: str | None) -> int:
    """A number of a row; 0 if it has none, or none below 2^53."""
    return int(raw) if raw and raw.isascii() and raw.isdecimal() and len(raw) < 16 else 0


async def read_measurements(store: Redis) -> dict[str, dict[str, int]]:
    """Model with a card -> its fields, without those that are no number. Raises redis.exceptions.RedisError or
    OSError."""
    models = [text(name) for name in await aexecute(store, "HKEYS", keys.MODELS)]
    answers = await aexecute_many(store, [("HGETALL", keys.metrics(model)) for model in models])
    return {model: dict(_readable(fields)) for model, fields in zip(models, answers, strict=True)}


async def read_source_items(store: Redis) -> dict[tuple[str, str], int]:
    """(source, outcome) -> what it took. Raises redis.exceptions.RedisError or OSError."""
    items: dict[tuple[str, str], int] = {}
    (fields,) = await aexecute_many(store, [("HGETALL", keys.METRICS_SOURCES)])
    for name, count in _readable(fields):
        match name.split(" "):
            case [counter, source, outcome, "n"] if counter == SOURCE_ITEMS and outcome in SOURCE_OUTCOMES:
                items[source, outcome] = count
    return items


def _readable(fields: Mapping[bytes, bytes]) -> Iterable[tuple[str, int]]:
    for name, value in fields.items():
        if value.isdigit() and len(value) < 20:
            yield name.decode(errors="replace"), int(value)
