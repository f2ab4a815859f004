"""The scaling policy: signals (the present), rules (the settings) and memory (the past) in, a decision and memory out.

It is pure. The autoscaler calls it with what it observes, the simulator with its trace. Memory and signals are kept as
JSON beside each decision, and `restored` from there.

    a = ceil((latency-sensitive tasks queued + those in flight) / room); 1 if only throughput tasks count
    room = headroom * knee, or the tasks that a worker does within priority's target wait, if those are more
    b = ceil(tokens queued up to a tier / (tokens_per_s * that tier's wait)), the largest over tiers
    c = ready + 1 if counted tasks wait, the workers are full, and (TTFT above objective, or KV or duty cycle high)
    d = workers of earlier releases + those that tasks need which these cannot do, if fewer are ready
    raw = clamp(max(a, b, c, d), min, max)

Out: at once from zero; else to at most `growth` times the number, a step at a time. In: by one, once the largest raw
number of the last cool-down is lower, and a cool-down after the last change; two after a change of direction, so that a
flapping load turns the number no more than once a cool-down. To `min`: once nothing is queued or in flight for a
cool-down, or twice the measured cold start if that is longer. Missing numbers: the number stays as it is.

On a device that several models share, a worker makes tokens_per_s only in its turns: b and the room count what it has
had of them lately, and the duty cycle is of the time in which it had work.

Tasks of priority and default are latency-sensitive. Those of flex and batch are for throughput: they count only once
the oldest has waited for a share of its target wait, or their work is worth a start. Where a start is cheap they count
once the oldest has waited for two cold starts. Until then they start no worker.
They run in the room that latency-sensitive tasks leave, and keep one worker that runs from ending.

d counts workers of earlier releases as they were when the tasks began to wait: if what is started is of no later one,
it starts no more. Messages of kinds that only a release after the autoscaler's own may know ask for one worker at most,
and keep it from ending: they end where a worker is up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from engine.errors import ErrorText, FieldName
from producers.contract import keys
from producers.contract.profile import Profile

#: Longest wait (s) that each tier should have.
TARGET_WAIT_S: Final = dict(zip(keys.TIERS, (2.0, 10.0, 300.0, 3600.0), strict=True))
#: Tiers whose tasks count at once. The others wait until they are worth a start.
LATENCY_TIERS: Final = ("priority", "default")
_ABOVE_ZERO: Final = (
    *("cool_down", "headroom", "default_knee", "worth", "ttft_objective", "kv_high", "duty_high", "blind"),
)
#: The cold start (s) of a version that was never started, where that decides.
ASSUMED_START_S: Final = 10.0
#: `cheap_start` of workers on this machine, which is there anyway.
LOCAL_CHEAP_START_S: Final = 3600.0
T = TypeVar("T")
#: The pydantic settings for states that are read back: numbers are numbers and finite, and no field is unknown.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
#: A number of workers.
Count = Annotated[int, Field(ge=0)]
#: Times that move together when the clock jumps.
TIMES: Final = ("changed_at", "turned_at", "empty_since", "busy_since")
#: Share of the knee that running sequences must reach before latency adds a worker (c).
FULL: Final = 0.8
#: More workers than anybody has. Huge queues ask for this number.
MAX_WORKERS: Final = 10**9


@dataclass(frozen=True, slots=True)
class Rules:
    """Times are seconds."""

    min: int = 0
    """Workers that run at any time."""
    max: int = 1
    """Workers that run at most."""
    cool_down: float = 300.0
    """Time for which fewer workers must have been enough before one ends, and between two ends."""
    headroom: float = 0.8
    """Share of a worker's knee concurrency that it is planned to hold."""
    default_knee: float = 8.0
    """Knee concurrency of a version that no worker has measured yet."""
    growth: float = 2.0
    """Largest factor by which the number grows in one step."""
    step: float = 5.0
    """Shortest time between two steps out. Zero to one needs none."""
    target_wait: dict[str, float] = field(default_factory=lambda: dict(TARGET_WAIT_S))
    """Longest wait that each tier should have."""
    patience: float = 0.5
    """Share of its target wait after which a flex or batch task counts, whatever is queued beside it."""
    cheap_start: float = 10.0
    """Cold start below which a start is cheap: then such a task counts after two cold starts, if that is sooner."""
    worth: float = 2.0
    """Work queued in flex and batch, in cold starts of one worker, from which on their tasks count at once."""
    ttft_objective: float = 1.0
    """p95 of the time to the first token above which a busy pool gets one more worker."""
    kv_high: float = 0.85
    """Share of KV blocks in use above which a busy pool gets one more worker."""
    duty_high: float = 0.7
    """Share of time computing above which a busy pool gets one more worker."""
    duty_for: float = 120.0
    """Time for which the pool must have been that busy."""
    blind: float = 15.0
    """Longest time between two looks at a pool that counts for a cool-down. A longer one counts as not seen."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the bad setting."""
        if not 0 <= self.min <= self.max:
            raise ValueError(
                ErrorText.of("{min} is {} and {max} is {}; they must be 0 <= {min} <= {max}", self.min, self.max)
            )
        if self.max < 1:
            raise ValueError(ErrorText.of("{max} is {}; it must be at least 1", self.max))
        if self.growth <= 1:
            raise ValueError(ErrorText.of("{growth} is {}; it must be above 1", f"{self.growth:g}"))
        for name in _ABOVE_ZERO:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(_out_of_range(name, getattr(self, name), "above 0"))
        for name in ("step", "patience", "cheap_start", "duty_for"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(_out_of_range(name, getattr(self, name), "0 or more"))


def _out_of_range(name: str, value: float, range: str) -> ErrorText:
    return ErrorText.of("{} is {}; it must be {}", FieldName(name), f"{value:g}", range)


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def restored(kind: type[T], value: Any) -> T:
    """The inverse of `dataclasses.asdict`. Raises ValueError for anything else; fields that are missing have their
    default."""
    hashable: Any = kind
    try:
        result: T = _reader(hashable).validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"no {kind.__name__}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return result


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Memory:
    """The policy's knowledge of the past. Kept with each decision, so that another leader goes on from it."""

    wanted: Count = 0
    changed_at: float | None = None
    """Last change of the number (unix s)."""
    turned_at: float | None = None
    """Last time that it grew after it had shrunk."""
    shrank: bool = False
    """The last change was downward."""
    raw: tuple[tuple[float, Count], ...] = ()
    """(time, raw number), falling numbers: the first is the largest of the last cool-down."""
    empty_since: float | None = None
    """Since when nothing is queued or in flight."""
    busy_since: float | None = None
    """Since when the duty cycle is high."""
    below: tuple[tuple[int, Count], ...] = ()
    """(level that tasks wait for, workers of earlier releases): as few as there were since the tasks wait."""
    seen_at: float | None = None
    """The last time that the pool was seen."""

    def moved(self, by: float) -> Self:
        """The same with all its times moved."""
        moved = [None if time is None else time + by for time in (getattr(self, name) for name in TIMES)]
        changed, turned, empty, busy = moved
        raw = tuple((when + by, number) for when, number in self.raw)
        return replace(self, changed_at=changed, turned_at=turned, empty_since=empty, busy_since=busy, raw=raw)


@dataclass(frozen=True, slots=True)
class TierQueue:
    """One tier's waiting tasks. `oldest_s`: seconds since the longest waiting task was submitted, if known."""

    waiting: int = 0
    oldest_s: float | None = None


@dataclass(frozen=True, slots=True)
class LevelQueue:
    """The waiting tasks that need a level of their worker's release, or a higher one (`producers.contract.levels`)."""

    level: int
    waiting: dict[str, int]
    """By tier."""
    below: int
    """Ready workers of earlier releases, which take none of them."""
    able: int
    """The other ready workers."""
    in_flight: int
    """Latency-sensitive tasks that those have."""


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Signals:
    """`at`: the store's clock (unix s). `ready`: workers with a live lease that take tasks."""

    at: float
    tiers: dict[str, TierQueue] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, TierQueue()))
    in_flight: int = 0
    patient: int = 0
    """Flex and batch tasks among those in flight (the sum of `patient` in the workers' leases)."""
    ready: int = 0
    running: int = 0
    """Sequences that the ready workers are generating."""
    kv_used: float | None = None
    """Share of the KV blocks of all ready workers that sequences hold (0 to 1)."""
    profile: Profile = field(default_factory=Profile)
    """The kept profile, with the p95 TTFT and duty cycle of the ready workers (the worst and the mean of them). It is
    measured without the waits for turns on a shared device."""
    turn_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of the time in which the ready workers had work that they had their turn; 1 with devices of their
    own."""
    levels: tuple[LevelQueue, ...] = ()
    """Of each level above 0 that tasks wait for, as far as workers of the autoscaler's own release can do them."""
    aside: int = 0
    """Messages of unknown kinds, which wait for a release after the autoscaler's own. They are in no other number."""
    missing: tuple[str, ...] = ()
    """Names of the numbers that could not be read or are no numbers."""

    @property
    def queued(self) -> int:
        return sum(tier.waiting for tier in self.tiers.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """`target`: the number of workers. `reason`: why, for people. `raw`: a, b, c and what they make."""

    target: int
    reason: str
    raw: dict[str, int]


def decide(rules: Rules, signals: Signals | None, memory: Memory) -> tuple[Decision, Memory]:
    """The number of workers now. `signals`: None where the store or the broker could not be read."""
    if signals is None or "queued" in signals.missing or "in_flight" in signals.missing:
        target = min(max(memory.wanted, rules.min), rules.max)
        return Decision(target, f"holds {target}: {_unread(signals)}", {}), replace(memory, wanted=target)
    memory = _remember(rules, signals, memory)
    raw, cause = _raw(rules, signals, memory)
    memory = replace(memory, raw=_window(memory.raw, signals.at, raw["raw"], rules.cool_down))
    target, why = _step(rules, signals, memory, raw["raw"], cause)
    return Decision(target, why, raw), _changed(memory, target, signals.at)


def _unread(signals: Signals | None) -> str:
    """The reason why no number can be computed."""
    if signals is None:
        return "nothing could be read"
    if "card" in signals.missing:
        return "the model is not published, and no worker serves it (`penstock models publish`)"
    return f"no number for {', '.join(signals.missing)}"


# ---- memory -----------------------------------------------------------------------------------------------------


def _remember(rules: Rules, signals: Signals, memory: Memory) -> Memory:
    memory = _awake(rules, signals.at, memory)
    empty = not signals.queued and not signals.in_flight and not signals.aside
    busy = signals.profile.duty is not None and signals.profile.duty / signals.turn_share > rules.duty_high
    since = memory.empty_since if memory.empty_since is not None else signals.at
    busy_since = memory.busy_since if memory.busy_since is not None else signals.at
    return replace(
        memory,
        empty_since=since if empty else None,
        busy_since=busy_since if busy else None,
        below=_below(signals, memory),
        seen_at=signals.at,
    )


def _below(signals: Signals, memory: Memory) -> tuple[tuple[int, int], ...]:
    """The workers of earlier releases, by the levels that tasks wait for; see the module's head."""
    had = dict(memory.below)
    return tuple((queue.level, min(queue.below, had.get(queue.level, queue.below))) for queue in signals.levels)


def _awake(rules: Rules, at: float, memory: Memory) -> Memory:
    """The memory without the time in which nothing was observed: all its times move forward, or back with the clock.

    A pause of the autoscaler, an outage of the store or a jump of its clock so neither ends a cool-down nor makes one
    last for ever.
    """
    if memory.seen_at is None:  # nothing is known of the last cool-down: the workers that there are were needed
        return replace(memory, raw=((at, memory.wanted),))
    if 0 <= at - memory.seen_at <= rules.blind:
        return memory
    return memory.moved(at - memory.seen_at)


def _window(raw: tuple[tuple[float, int], ...], at: float, now: int, length: float) -> tuple[tuple[float, int], ...]:
    """The falling maxima of the last `length` seconds, with the present number."""
    kept = [(when, number) for when, number in raw if when > at - length and number > now]
    return (*kept, (at, now))


def _changed(memory: Memory, target: int, at: float) -> Memory:
    if target == memory.wanted:
        return memory
    turned = at if target > memory.wanted and memory.shrank else memory.turned_at
    return replace(memory, wanted=target, changed_at=at, turned_at=turned, shrank=target < memory.wanted)


# ---- the number that is needed ------------------------------------------------------------------------------------


def _raw(rules: Rules, signals: Signals, memory: Memory) -> tuple[dict[str, int], str]:
    """The numbers and their result, and the reason of the one that decides."""
    tiers = [name for name in keys.TIERS if name in signals.tiers]
    counted = {name: signals.tiers[name].waiting for name in tiers if _counts(rules, signals, name)}
    a, room = _by_room(rules, signals, counted)
    b, wait = _by_wait(rules, signals, counted)
    c, strain = _by_strain(rules, signals, memory, counted)
    d, release = _by_release(rules, signals, memory, counted)
    need, cause = max((a, room), (b, wait), (c, strain), (d, release), key=lambda need_and_cause: need_and_cause[0])
    if need < rules.min:
        cause = f"the least is {rules.min}"
    if need > rules.max:
        cause = f"{rules.max} is the most of {need} needed: {cause}"
    return {"a": a, "b": b, "c": c, "d": d, "raw": min(max(need, rules.min), rules.max)}, cause


def _counts(rules: Rules, signals: Signals, tier: str) -> bool:
    """Whether a tier's tasks count; see the module's head."""
    if tier in LATENCY_TIERS:
        return True
    waits = signals.tiers[tier].oldest_s
    if waits is not None and waits >= _patience(rules, signals, tier):
        return True
    work = _seconds(signals, sum(signals.tiers[name].waiting for name in signals.tiers if name not in LATENCY_TIERS))
    return work is not None and work >= rules.worth * signals.profile.cold_start.get("total", inf)


def _patience(rules: Rules, signals: Signals, tier: str) -> float:
    """Time (s) after which a throughput task counts."""
    wait = rules.patience * rules.target_wait[tier]
    start = signals.profile.cold_start.get("total", ASSUMED_START_S)
    return min(wait, 2 * start) if start < rules.cheap_start else wait


def _seconds(signals: Signals, tasks: int) -> float | None:
    """Time (s) in which one worker would do so many tasks, waits for turns included; None if that was never
    measured."""
    profile = signals.profile
    if not profile.tokens_per_s or not profile.tokens_per_task:
        return None
    return tasks * profile.tokens_per_task / (profile.tokens_per_s * signals.turn_share)


def _knee(rules: Rules, signals: Signals) -> float:
    return max(1.0, signals.profile.knee or rules.default_knee)


def _by_room(rules: Rules, signals: Signals, counted: dict[str, int]) -> tuple[int, str]:
    """a, and its reason: room for all latency-sensitive tasks at once."""
    queued = sum(waiting for name, waiting in counted.items() if name in LATENCY_TIERS)
    running, room = _latency_sensitive(rules, signals), _room(rules, signals)
    reason = f"{queued} queued and {running:.3g} in flight, {room:.3g} a worker"
    number = _workers((queued + running) / room)
    if not number and any(counted.values()):
        return 1, f"{sum(counted.values())} flex or batch tasks have waited for long, or are worth a start"
    if not number and signals.aside:
        return 1, f"{signals.aside} messages wait for a later release, and end where a worker is up"
    return number, reason if number else _idle(rules, signals)


def _idle(rules: Rules, signals: Signals) -> str:
    """The reason for a pool in which nothing counts."""
    waiting = {name: tier for name, tier in signals.tiers.items() if tier.waiting}
    remaining = [_patience(rules, signals, name) - (tier.oldest_s or 0.0) for name, tier in waiting.items()]
    if remaining:
        number = sum(tier.waiting for tier in waiting.values())
        return f"{number} queued of flex or batch: worth no start yet, and counted in {min(remaining):.0f} s"
    return f"{signals.in_flight} in flight of flex or batch" if signals.in_flight else "nothing is queued or in flight"


def _room(rules: Rules, signals: Signals) -> float:
    """Tasks that one worker is planned to hold. Short ones need no slot of their own: they take turns soon enough."""
    each = _seconds(signals, 1)
    quick = rules.target_wait["priority"] / each if each else 0.0
    return max(rules.headroom * _knee(rules, signals), quick)


def _latency_sensitive(rules: Rules, signals: Signals) -> float:
    """Latency-sensitive tasks in flight, as many as there would be if throughput tasks did not slow them down.

    Sequences beyond the knee share one throughput, so each takes longer, and more of them are in flight.
    """
    tasks, room = max(0, signals.in_flight - signals.patient), _knee(rules, signals) * signals.ready
    if not signals.patient or not room:
        return tasks
    slowed = min(1.0, room / signals.in_flight) / min(1.0, room / tasks) if tasks else 1.0
    return tasks * slowed


def _by_wait(rules: Rules, signals: Signals, counted: dict[str, int]) -> tuple[int, str]:
    """b, and its reason. A tier's tasks wait for those of all better tiers, too.

    A wait is never counted as shorter than the cold start: no worker that is started now comes sooner.
    """
    largest, cause, ahead, start = 0, "", 0, signals.profile.cold_start.get("total", 0.0)
    for tier, waiting in counted.items():
        ahead += waiting
        seconds, wait = _seconds(signals, ahead), max(rules.target_wait[tier], start)
        if waiting and seconds is not None and (number := _workers(seconds / wait)) > largest:
            largest, cause = number, f"{tier} tasks would wait longer than {wait:g} s"
    return largest, cause


def _by_strain(rules: Rules, signals: Signals, memory: Memory, counted: dict[str, int]) -> tuple[int, str]:
    """c, and its reason. It asks for one more worker, and no more while that one starts."""
    full = FULL * _knee(rules, signals) * signals.ready
    if not any(counted.values()) or not signals.ready or signals.running < full:
        return 0, ""
    more, ttft = min(signals.ready, memory.wanted) + 1, signals.profile.ttft_p95
    if ttft is not None and ttft > rules.ttft_objective:
        return more, f"p95 of the first token is {ttft:.3g} s, above {rules.ttft_objective:g} s"
    if signals.kv_used is not None and signals.kv_used > rules.kv_high:
        return more, f"{signals.kv_used:.0%} of the KV cache is in use"
    if memory.busy_since is not None and signals.at - memory.busy_since >= rules.duty_for:
        return more, f"the workers have work more than {rules.duty_high:.0%} of the time"
    return 0, ""


def _by_release(rules: Rules, signals: Signals, memory: Memory, counted: dict[str, int]) -> tuple[int, str]:
    """d, and its reason: workers beside those of earlier releases, for tasks that these cannot do."""
    largest, cause, room = 0, "", _room(rules, signals)
    for queue in signals.levels:
        waiting = {name: queue.waiting.get(name, 0) for name in counted}
        if not any(waiting.values()):
            continue
        tasks = sum(number for name, number in waiting.items() if name in LATENCY_TIERS)
        need, below = max(1, _workers((tasks + queue.in_flight) / room)), dict(memory.below)[queue.level]
        if need > queue.able and below + need > largest:
            largest = below + need
            cause = f"{sum(waiting.values())} queued for a later release than that of {below} workers"
    return largest, cause


def _workers(share: float) -> int:
    return ceil(min(share, MAX_WORKERS))


# ---- the step -----------------------------------------------------------------------------------------------------


def _step(rules: Rules, signals: Signals, memory: Memory, raw: int, cause: str) -> tuple[int, str]:
    """The next number, from the present one."""
    had = min(max(memory.wanted, rules.min), rules.max)
    if raw > had:
        return _out(rules, signals, memory, had, raw, cause)
    if raw < had:
        return _in(rules, signals, memory, had, raw)
    return had, f"{had}: {cause}"


def _out(rules: Rules, signals: Signals, memory: Memory, had: int, raw: int, cause: str) -> tuple[int, str]:
    remaining = rules.step - _since(signals, memory.changed_at)
    if had and not memory.shrank and remaining > 0:
        return had, f"holds {had}: {raw} are needed, the next step out is in {remaining:.0f} s"
    target = min(raw, max(had + 1, int(had * rules.growth)))
    return target, f"out from {had} to {target}: {cause}"


def _in(rules: Rules, signals: Signals, memory: Memory, had: int, raw: int) -> tuple[int, str]:
    turned, empties = _since(signals, memory.turned_at), inf
    if memory.empty_since is not None:
        idle = signals.at - memory.empty_since
        empties = max(idle_time(rules, signals) - idle, 2 * rules.cool_down - turned)
        if empties <= 0:
            return rules.min, f"in from {had} to {rules.min}: nothing was queued or in flight for {idle:.0f} s"
    if had == 1:  # to zero only when nothing is left
        return had, f"holds {had}: {_nearly_idle(signals, empties)}"
    wait = (2 if turned < 2 * rules.cool_down else 1) * rules.cool_down
    remaining = wait - _since(signals, memory.changed_at)
    largest = memory.raw[0][1]
    if remaining > 0 or largest >= had:
        needed = [at + rules.cool_down - signals.at for at, number in memory.raw if number >= had]
        soon = min(max(remaining, *needed), empties) if needed else min(remaining, empties)
        return had, f"holds {had}: {raw} would be enough; the number falls in {soon:.0f} s if that lasts"
    return had - 1, f"in from {had} to {had - 1}: {largest} were enough for {rules.cool_down:g} s"


def _nearly_idle(signals: Signals, remaining: float) -> str:
    """The reason for the last worker. `remaining`: time (s) until it ends; infinite while tasks are left."""
    if remaining < inf:
        return f"nothing is queued or in flight; the last worker ends in {remaining:.0f} s if that lasts"
    return f"{signals.queued} queued and {signals.in_flight} in flight"


def idle_time(rules: Rules, signals: Signals) -> float:
    """Time (s) for which an empty pool keeps its workers."""
    return max(rules.cool_down, 2 * signals.profile.cold_start.get("total", 0.0))


def _since(signals: Signals, when: float | None) -> float:
    return inf if when is None else signals.at - when
