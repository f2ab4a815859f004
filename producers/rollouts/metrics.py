"""What a rollout compares: metrics of a task's row in the ledger, and comparisons of candidate with baseline.

A candidate's task is compared with up to MATCHES tasks of the baseline that ended last before it and are like it: of
its tier, and of its size class (prompt tokens that no cache had, by powers of four). Each task of the baseline is used
once; where there are few for each of the candidate's, fewer are taken. Of tasks with one key, which all go to one
version, the first alone is compared: keys are drawn at random, their tasks are not. So load and callers may change as
they like: both are compared at the same time, and no two comparisons share a task.

| kind | difference of a comparison | the candidate is worse where its expectation is above |
| --- | --- | --- |
| share | 1 if the candidate's task is bad, less the bad share of the baseline's tasks | the margin, a share |
| rank | part of the baseline's tasks that the candidate's is worse than by more than the tolerance, less the part \
that it is not | the margin, usually 0: it is worse by more than the tolerance in more than half of all pairs |
| score | part of the baseline's scores that are higher, less the part that is lower | the margin |
| pair | of a task and its copy (shadow traffic), see `Matcher.enter_pairs` | the margin |
| tail | as share; bad is what takes longer than the tolerance over the p95 of the baseline's last tasks | the margin |

What holds a worker up, such as a neighbour on its machine, holds all its tasks of that time up. So the comparisons of
times within the plan's `block_s` count as one, with their mean difference: many tasks of a bad moment are no more
evidence against a version than one.

Ranks need no mean, which heavy tails would spoil; the share needs none either. A metric that does not apply to one of
the tasks (no first token) is passed over for it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeVar

from producers.connection.script import parsed
from producers.rollouts.evidence import GRID, Bounds, bounds, comparisons, log_wealth
from producers.store.fleet.canaries import ALIAS, LIKELIHOOD, Canary
from producers.store.fleet.routing import DEFAULT
from producers.store.shadows import Pair, Score
from producers.store.usage.ledger import STATUSES

#: Most tasks of the baseline that one comparison takes; powers of two, so that differences are multiples of 1/GRID.
MATCHES: Final = 8
T = TypeVar("T")
#: Unused tasks of the baseline, and candidate's tasks that wait for some, that a stratum keeps.
BUFFERED: Final = 64
#: Strata at most: tiers by size classes.
STRATA: Final = 64
#: Tasks of the baseline whose p95 the tail metric takes, and how many it needs.
TAIL_KEPT, TAIL_NEEDED = 256, 40
#: Keys that a rollout remembers; of more, the first may be compared again.
DRAWN: Final = 2000
#: Base of the buckets of a metric's figures: quantiles of reports are right within 5%.
BUCKET: Final = 1.1
#: Evidence of 10 to 1 that a candidate is worse holds a step; a rollback needs much more.
SUSPICION: Final = 10.0

#: The metric of shadow traffic, of rollouts whose candidate has some.
SHADOW: Final = "shadow"
DIVERGED: Final = "diverged"
#: Metrics of copies of tasks, of rollouts whose candidate gets some.
OF_COPIES: Final = (SHADOW, LIKELIHOOD, DIVERGED)

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing to compare. `value`: of a row; None where it does not apply. `lower_is_worse`: of ranks."""

    name: str
    text: str
    kind: Literal["share", "rank", "tail", "score", "pair"]
    value: Callable[[Row], float | None]
    margin: float = 0.0
    tolerance: float = 0.0
    lower_is_worse: bool = False
    of_time: bool = False
    """Whether it is a time, which a cold start spoils."""
    weight: float = 1.0
    """Its part of the error budget, beside the other metrics': more for what tells a broken candidate, which has to be
    found within few tasks."""
    usual: bool = True
    """Whether it is compared unless somebody leaves it out; else only where somebody names it."""


def _number(row: Row, name: str) -> float | None:
    raw = row.get(name, "")
    return float(raw) if raw.isascii() and raw.isdecimal() and len(raw) < 16 else None


def _between(row: Row, begin: str, end: str) -> float | None:
    first, last = _number(row, begin), _number(row, end)
    return None if first is None or last is None else max(0.0, last - first) / 1000


def _failed(row: Row) -> float | None:
    return float(row["status"] == "failed" or (_number(row, "deaths") or 0) > 0)


def _abandoned(row: Row) -> float | None:
    return float(row["status"] in ("cancelled", "incomplete"))


def _completed(row: Row) -> bool:
    return row["status"] == "completed"


def _empty(row: Row) -> float | None:
    return float((_number(row, "output") or 0) <= 1) if _completed(row) and row.get("reasons") else None


def _cut_off(row: Row) -> float | None:
    reasons = row.get("reasons", "")
    return float('"length"' in reasons) if _completed(row) and reasons else None


def _refused(row: Row) -> float | None:
    return float(row["refused"]) if _completed(row) and row.get("refused") else None


def _invalid(row: Row) -> float | None:
    return _cut_off(row) if row.get("form") else None


def _longest(row: Row) -> float | None:
    return _number(row, "longest") if _completed(row) else None


def _first_token(row: Row) -> float | None:
    return _between(row, "created", "first")


def _per_token(row: Row) -> float | None:
    tokens, time = _longest(row) or 0, _between(row, "first", "ended")
    return None if time is None or tokens < 2 or _number(row, "discarded") else time / (tokens - 1)


def _end_to_end(row: Row) -> float | None:
    return _between(row, "created", "ended") if _completed(row) else None


def _score(row: Row) -> float | None:
    return float(row["score"]) if "score" in row else None


def _of_pairs(row: Row) -> float | None:
    return None  # `Matcher.enter_pairs` has them


def is_bad(pair: Pair, which: int) -> bool:
    """Whether a task (0) or its copy (1) failed, answered at most one token, refused, or was cut off."""
    broken = pair.statuses[which] == "failed" or pair.tokens[which] <= 1 or "length" in pair.reasons[which]
    return broken or pair.refused[which]


#: Weight of metrics that a broken candidate is found by.
BROKEN: Final = 4.0
#: All metrics, in the order of reports. `penstock rollout start --metric` sets their margins and tolerances.
METRICS: Final = (
    Metric("failed", "tasks that failed, or whose worker died", "share", _failed, margin=0.01, weight=BROKEN),
    Metric("abandoned", "tasks that were cancelled, or late", "share", _abandoned, margin=0.02),
    Metric("empty", "answers of at most one token", "share", _empty, margin=0.01, weight=BROKEN),
    Metric(
        *("cut_off", "answers cut off at their limit (finish reason `length`)", "share", _cut_off),
        margin=0.02,
        weight=BROKEN,
    ),
    Metric("refused", "answers that begin as a refusal", "share", _refused, margin=0.01, weight=BROKEN),
    Metric(
        *("invalid", "answers that do not come to the end of their form (JSON schema, regex, ...)", "share", _invalid),
        margin=0.02,
        weight=BROKEN,
    ),
    Metric("first_token", "time to first token (s)", "rank", _first_token, tolerance=0.05, of_time=True),
    Metric("per_token", "time per output token (s)", "rank", _per_token, tolerance=0.05, of_time=True),
    Metric("end_to_end", "time from submission to end (s)", "rank", _end_to_end, tolerance=0.05, of_time=True),
    Metric(
        *("end_to_end_p95", "time to end beyond the baseline's p95", "tail", _end_to_end),
        margin=0.01,
        tolerance=0.05,
        of_time=True,
    ),
    Metric("longer", "answers that are longer (tokens)", "rank", _longest, tolerance=0.5),
    Metric("shorter", "answers that are shorter (tokens)", "rank", _longest, tolerance=0.5, lower_is_worse=True),
    Metric(
        *(SHADOW, "copies (shadow traffic) that failed, were empty, refused or cut off", "share", _of_pairs),
        margin=0.02,
    ),
    Metric(
        *(
            LIKELIHOOD,
            "how much less likely the baseline's outputs are (probability of a token, geometric mean)",
            "pair",
        ),
        _of_pairs,
        margin=0.5,
    ),
    Metric(
        *(DIVERGED, "copies' tokens from the first difference on", "pair", _of_pairs),
        margin=0.5,
        usual=False,
    ),
    Metric("feedback", "scores that callers gave (`/v1/feedback`)", "score", _score, margin=0.01),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}


class MetricSettings(NamedTuple):
    """A metric as a rollout compares it."""

    metric: Metric
    margin: float
    tolerance: float


def settings(canary: Canary) -> list[MetricSettings]:
    """The metrics of a rollout. One that its release had and this one lacks is left out."""
    return [
        MetricSettings(BY_NAME[name], values["margin"], values["tolerance"])
        for name, values in canary.plan.metrics.items()
        if name in BY_NAME
    ]


def defaults() -> dict[str, dict[str, float]]:
    """The metrics that are compared unless somebody says otherwise, with their usual margins and tolerances."""
    return {metric.name: usual(metric.name) for metric in METRICS if metric.usual}


def usual(name: str) -> dict[str, float]:
    """A metric's usual margin and tolerance."""
    return {"margin": BY_NAME[name].margin, "tolerance": BY_NAME[name].tolerance}


@dataclass(slots=True)
class Arm:
    """Observations of one version: for reports alone. `figures`: metric -> bucket (0 and 1 of a share, hundredths of a
    score) -> tasks."""

    tasks: int = 0
    figures: dict[str, Counter[int]] = field(default_factory=dict)

    def enter(self, metric: Metric, value: float) -> None:
        """Count a task's value."""
        if metric.kind in ("share", "score", "pair"):
            bucket = round(value if metric.kind == "share" else 100 * value)
        else:
            bucket = math.floor(math.log(max(value, 1e-6), BUCKET))
        self.figures.setdefault(metric.name, Counter())[bucket] += 1

    def quantile(self, name: str, part: float) -> float | None:
        """A quantile, right within 5%; None without a value."""
        buckets = self.figures.get(name, Counter())
        rank, total = 0, sum(buckets.values())
        for bucket in sorted(buckets):
            rank += buckets[bucket]
            if rank >= part * total:
                return math.exp((bucket + 0.5) * math.log(BUCKET))
        return None

    def mean(self, name: str) -> float | None:
        """The share of bad tasks, or 100 times the mean score; None without a task."""
        buckets = self.figures.get(name, Counter())
        total = sum(buckets.values())
        return sum(bucket * count for bucket, count in buckets.items()) / total if total else None


@dataclass(slots=True)
class Evidence:
    """The comparisons of a rollout. `cursor`: the last row of the ledger in it; `steps`: metric -> difference (in
    1/GRID) -> comparisons, of each step that began."""

    rollout: str
    cursor: str
    steps: list[dict[str, Counter[int]]] = field(default_factory=list)
    candidate: Arm = field(default_factory=Arm)
    baseline: Arm = field(default_factory=Arm)
    noted: int = 0
    """Comparisons when the last row of the log was written."""
    scores: str = "0"
    """The last row of the feedback in it."""
    pairs: str = "0"
    """The last row of the shadow traffic in it."""
    drawn: dict[str, None] = field(default_factory=dict)
    """The last keys of which a task was compared, as of `routing.draw_of`; those of scores after an `s`."""
    tenants: dict[str, int] = field(default_factory=dict)
    """How many tasks of a tenant were compared, where that is bounded: of the last steps, arms and tenants."""

    @classmethod
    def of(cls, raw: str, canary: Canary) -> Evidence:
        """The stored evidence of this rollout; none yet where there is none, or it cannot be read."""
        fields, begin = parsed(raw), f"{max(0, canary.traffic - 1)}-0"
        fresh = cls(canary.id, begin, scores=begin, pairs=begin)
        if fields.get("rollout") != canary.id:
            return fresh
        try:
            candidate, baseline = (
                Arm(fields[arm]["tasks"], _counters(fields[arm]["figures"])) for arm in ("candidate", "baseline")
            )
            steps = [_counters(step) for step in fields["steps"]]
            cursors = {name: fields[name] for name in ("cursor", "scores", "pairs")}
            drawn = dict.fromkeys(fields.get("drawn", ()))
            counts = {"steps": steps, "candidate": candidate, "baseline": baseline, "noted": fields["noted"]}
            return cls(canary.id, drawn=drawn, tenants=dict(fields.get("tenants", {})), **counts, **cursors)
        except (KeyError, TypeError, ValueError, AttributeError):
            return fresh

    def to_json(self) -> str:
        """The stored form."""
        arms = {
            name: {"tasks": arm.tasks, "figures": arm.figures}
            for name, arm in (("candidate", self.candidate), ("baseline", self.baseline))
        }
        head = {name: getattr(self, name) for name in ("rollout", "cursor", "scores", "pairs", "noted")}
        return json.dumps({**head, "steps": self.steps, **arms, "drawn": [*self.drawn], "tenants": self.tenants})

    def is_first(self, key: str) -> bool:
        """Whether nothing of a key was compared before."""
        first = key not in self.drawn
        _remember(self.drawn, key, None)
        return first

    def counts_tenant(self, key: str, limit: int) -> bool:
        """Count one more task of a tenant, unless `limit` were; 0: no bound. `key`: the tenant, with step and arm."""
        allowed = self.allows_tenant(key, limit)
        if limit and allowed:
            _remember(self.tenants, key, self.tenants.get(key, 0) + 1)
        return allowed

    def allows_tenant(self, key: str, limit: int) -> bool:
        """Whether `counts_tenant` would count one."""
        return not limit or self.tenants.get(key, 0) < limit

    def of_metric(self, name: str) -> list[Counter[int]]:
        """Its differences, by step."""
        return [step.get(name, Counter()) for step in self.steps]

    def compared(self, step: int, *, copies: bool) -> int:
        """Comparisons of a step: those of the metric with most of them. `copies`: whether those of shadow traffic
        count."""
        if not 0 <= step < len(self.steps):
            return 0
        metrics = self.steps[step].items()
        return max((sum(counts.values()) for name, counts in metrics if copies or name not in OF_COPIES), default=0)

    def samples(self, canary: Canary) -> int:
        """Comparisons of the rollout's step that count towards its `min_samples`.

        Where callers get answers of the candidate, these are to be compared. At 0% copies are, by each of their metrics
        alike: copies that completed say nothing of how likely outputs are, of which fewer are scored."""
        if canary.percent or not 0 <= canary.step < len(self.steps):
            return self.compared(canary.step, copies=False)
        names = [name for name in canary.plan.metrics if name in OF_COPIES]
        return min((sum(self.steps[canary.step].get(name, Counter()).values()) for name in names), default=0)


def _remember(kept: dict[str, T], key: str, value: T) -> None:
    """Keep the last DRAWN keys."""
    kept[key] = value
    if len(kept) > DRAWN:
        del kept[next(iter(kept))]


def _counters(raw: Mapping[str, Mapping[str, int]]) -> dict[str, Counter[int]]:
    return {name: Counter({int(key): count for key, count in counts.items()}) for name, counts in raw.items()}


class _Task(NamedTuple):
    values: dict[str, float]
    tenant: str


@dataclass(slots=True)
class _Block:
    """Comparisons of a time that count as one. `begun`: unix ms; `total`: of the differences, in 1/GRID."""

    step: int
    begun: float
    total: int = 0
    count: int = 0


class Matcher:
    """Compares the rows of one rollout, as they come. What waits for a match, and the block of time that has begun, are
    in memory alone: a process that takes over begins without, which loses comparisons and biases none."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._settings = settings(canary)
        self._baseline: dict[tuple[str, int], deque[_Task]] = {}
        self._waiting: dict[tuple[str, int], deque[_Task]] = {}
        self._tail: dict[str, deque[float]] = {entry.metric.name: deque(maxlen=TAIL_KEPT) for entry in self._settings}
        self._blocks: dict[str, _Block] = {}

    def enter(self, rows: Iterable[Row], evidence: Evidence, step: int) -> None:
        """Enter rows of the ledger, with `ended` (ms) and `reasons`, into the evidence of a step."""
        while len(evidence.steps) <= step:
            evidence.steps.append({})
        for row in rows:
            candidate = self.is_candidate(row)
            if candidate is not None:
                self._enter(row, step, candidate=candidate, evidence=evidence)

    def enter_pairs(self, pairs: Iterable[Pair | Score], evidence: Evidence, step: int) -> None:
        """Enter tasks and their copies: each pair is a comparison."""
        while len(evidence.steps) <= step:
            evidence.steps.append({})
        for pair in pairs:
            ours = (pair.version, pair.shadow) == (self._canary.before, self._canary.version)
            if ours and isinstance(pair, Score):
                # The ratio of the probabilities, as a difference: (1 - r) / (1 + r).
                difference = math.tanh((pair.scores[0] - pair.scores[1]) / 2)
                self._enter_pair(LIKELIHOOD, difference, [math.exp(score) for score in pair.scores], evidence, step)
            elif ours and isinstance(pair, Pair) and {*pair.statuses} <= {"completed", "failed"}:
                bad = [is_bad(pair, which) for which in (0, 1)]
                self._enter_pair(SHADOW, bad[1] - bad[0], bad, evidence, step)
                if pair.same is not None:
                    self._enter_pair(DIVERGED, 1 - pair.same, (0.0, 1 - pair.same), evidence, step)

    def _enter_pair(self, name: str, difference: float, values: Sequence[float], evidence: Evidence, step: int) -> None:
        """`values`: of baseline and candidate. A difference between two steps of the grid counts as the lower one."""
        if name in self._tail:
            evidence.steps[step].setdefault(name, Counter())[math.floor(difference * GRID)] += 1
            for arm, value in zip((evidence.baseline, evidence.candidate), values, strict=True):
                arm.enter(BY_NAME[name], value)

    def is_candidate(self, row: Row) -> bool | None:
        """Whether a row is of the candidate (True) or the baseline (False); None: of neither. What callers address to a
        version or an alias themselves, or a rule sends there, is of neither; nor is what only follows another one."""
        begun = _number(row, "created") or _number(row, "started") or 0.0
        if row.get("model") != self._canary.model or not self._canary.traffic or begun < self._canary.traffic:
            return None
        if not row.get("drawn"):
            return None
        if row.get("status") not in STATUSES and "score" not in row:
            return None
        arm = row.get("alias", ""), row.get("version", "")
        return {(ALIAS, self._canary.version): True, (DEFAULT, self._canary.before): False}.get(arm)

    def _enter(self, row: Row, step: int, *, candidate: bool, evidence: Evidence) -> None:
        percent = self._canary.plan.steps[step]
        if candidate and not percent:
            return  # it began at another step
        matches = min(MATCHES, max(1, int((100 - percent) / percent))) if percent else 0
        arm = evidence.candidate if candidate else evidence.baseline
        kind = "s" if "score" in row else ""
        task = _Task(self._values(row), f"{kind} {row.get('tenant', '')}")
        arm.tasks += "score" not in row
        for entry in self._settings:
            if entry.metric.name in task.values and entry.metric.kind != "tail":
                arm.enter(entry.metric, task.values[entry.metric.name])
        if row["drawn"] != "1" and not evidence.is_first(kind + row["drawn"]):
            return
        per_tenant = self._canary.plan.per_tenant
        if candidate and not evidence.counts_tenant(f"{step}c{task.tenant}", per_tenant):
            return
        if not candidate and not evidence.allows_tenant(f"{step}b{task.tenant}", per_tenant * MATCHES):
            return
        stratum = self._stratum(row)
        free = self._baseline.setdefault(stratum, deque())
        waiting = self._waiting.setdefault(stratum, deque(maxlen=BUFFERED))
        now = _number(row, "ended") or 0.0
        if candidate and (others := self._taken(free, matches, evidence, step)):
            self._compare(task, others, evidence, step, now)
        elif candidate:
            waiting.append(task)
        elif waiting:
            self._compare(waiting.popleft(), self._taken([task], 1, evidence, step), evidence, step, now)
        else:
            free.append(task)
            if len(free) > BUFFERED:
                self._retire(free.popleft())

    def _taken(self, free: MutableSequence[_Task], limit: int, evidence: Evidence, step: int) -> list[_Task]:
        """Take the last of the baseline's tasks for a comparison, as many as a power of two. Where tenants' parts are
        bounded, they count when they are taken: most tasks of the baseline are in no comparison."""
        size, matches = _power_of_two(min(limit, len(free))), list[_Task]()
        while free and len(matches) < size:
            task = free.pop()
            if evidence.counts_tenant(f"{step}b{task.tenant}", self._canary.plan.per_tenant * MATCHES):
                matches.append(task)
        return matches

    def _stratum(self, row: Row) -> tuple[str, int]:
        if "score" in row:
            return "score", 0
        tokens = (_number(row, "prompt") or 0.0) - (_number(row, "cached") or 0.0)
        stratum = row.get("tier", ""), math.ceil(math.log(max(tokens, 64.0) / 64, 4))
        return stratum if stratum in self._baseline or len(self._baseline) < STRATA else ("", 0)

    def _values(self, row: Row) -> dict[str, float]:
        if "score" in row:
            return {"feedback": float(row["score"])} if "feedback" in self._tail else {}
        cold = (_number(row, "created") or 0.0) < self._canary.traffic + self._canary.plan.warm_up_s * 1000
        values = {
            entry.metric.name: entry.metric.value(row)
            for entry in self._settings
            if not (cold and entry.metric.of_time)
        }
        return {name: value for name, value in values.items() if value is not None}

    def _compare(self, task: _Task, matches: Sequence[_Task], evidence: Evidence, step: int, now: float) -> None:
        for entry in self._settings:
            name = entry.metric.name
            others = [match.values[name] for match in matches if name in match.values]
            others = others[: _power_of_two(len(others))]
            if name in task.values and others and (d := self._difference(entry, task.values[name], others)) is not None:
                self._enter_difference(entry.metric, d, evidence, step, now)
        for match in matches:
            self._retire(match)

    def _enter_difference(self, metric: Metric, difference: int, evidence: Evidence, step: int, now: float) -> None:
        """Enter a comparison, or the block of time that this one is behind: its mean, rounded down."""
        length = self._canary.plan.block_s * 1000 if metric.of_time else 0.0
        block = self._blocks.get(metric.name, _Block(step, now))
        if block.count and (block.step != step or now >= block.begun + length):
            mean = block.total // block.count
            evidence.steps[block.step].setdefault(metric.name, Counter())[mean] += 1
            block = _Block(step, now)
        if not length:
            evidence.steps[step].setdefault(metric.name, Counter())[difference] += 1
            return
        block.total, block.count = block.total + difference, block.count + 1
        self._blocks[metric.name] = block

    def _difference(self, entry: MetricSettings, value: float, others: Sequence[float]) -> int | None:
        """In 1/GRID."""
        if entry.metric.kind == "share":
            differences = [value - other for other in others]
        elif entry.metric.kind == "rank":
            sign = -1 if entry.metric.lower_is_worse else 1
            factor = (1 + entry.tolerance) ** sign
            differences = [
                math.copysign(float(value != other * factor), sign * (value - other * factor)) for other in others
            ]
        elif entry.metric.kind == "score":
            differences = [float(value < other) - float(value > other) for other in others]
        elif (limit := self._limit(entry)) is not None:
            differences = [float(value > limit) - float(other > limit) for other in others]
        else:
            return None
        return round(sum(differences) * GRID / len(others))

    def _limit(self, entry: MetricSettings) -> float | None:
        """The tail's beginning, by tasks of the baseline that are in no comparison any more."""
        values = sorted(self._tail[entry.metric.name])
        return values[int(0.95 * len(values))] * (1 + entry.tolerance) if len(values) >= TAIL_NEEDED else None

    def _retire(self, task: _Task) -> None:
        for name, value in task.values.items():
            self._tail[name].append(value)


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1) if count else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One metric of a rollout. `odds`: the wealth, to 1, against its being no worse; `limit`: those that roll back."""

    settings: MetricSettings
    steps: list[Counter[int]]
    of_steps: int
    odds: float
    limit: float

    @property
    def count(self) -> int:
        """Comparisons."""
        return comparisons(self.steps)

    @property
    def bounds(self) -> Bounds:
        """Those of the mean difference, at the metric's part of the error."""
        return bounds(self.steps, self.of_steps, 1 / self.limit)

    @property
    def worse(self) -> bool:
        return self.odds >= self.limit

    @property
    def suspect(self) -> bool:
        return self.odds >= min(SUSPICION, self.limit)

    def text(self) -> str:
        """The verdict, for a person."""
        metric, margin = self.settings.metric, self.settings.margin
        lower, average, _ = self.bounds
        unit = "points" if metric.kind in ("share", "tail", "pair") else "points of rank"
        tolerance = f" by more than {self.settings.tolerance:.0%}" if self.settings.tolerance else ""
        return (
            f"{metric.name}: {metric.text}{tolerance}: {100 * average:+.1f} {unit} against the baseline, at least "
            f"{100 * lower:+.1f}, with {100 * margin:g} allowed; {self.count} comparisons, odds "
            f"{min(self.odds, 1e9):,.0f} to 1 (rolled back at {self.limit:,.0f})"
        )

    def figures(self) -> dict[str, float]:
        """The numbers, for rows and reports."""
        lower, average, upper = (round(value, 5) for value in self.bounds)
        return {
            "n": self.count,
            "lower": lower,
            "mean": average,
            "upper": upper,
            "odds": round(min(self.odds, 1e12), 3),
        }


def findings(canary: Canary, evidence: Evidence) -> list[Finding]:
    """All metrics, each tested at its part of alpha, by its weight."""
    entries, of_steps = settings(canary), len(canary.plan.steps)
    weights = sum(entry.metric.weight for entry in entries)
    result = []
    for entry in entries:
        alpha = canary.plan.alpha * entry.metric.weight / weights
        steps = evidence.of_metric(entry.metric.name)
        odds = math.exp(min(700.0, log_wealth(steps, of_steps, entry.margin)))
        result.append(Finding(entry, steps, of_steps, odds, 1 / alpha))
    return result
