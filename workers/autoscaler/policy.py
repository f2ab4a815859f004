"""The scaling policy: a pure function, which the autoscaler calls with what it sees, the simulator with its trace.

    a = ceil((queued + in_flight) / (headroom * knee))
    b = ceil(tokens queued up to a tier / (tokens_per_s * that tier's target wait)), the largest over tiers
    c = ready + 1 if tasks wait, the workers are full, and (p95 TTFT > objective, or KV high, or duty high for long)
    raw = clamp(max(a, b, c), min, max)

Out: at once from zero; else to at most `growth` times the number, a step at a time. In: by one, once the largest raw
number of the last cool-down is lower, and a cool-down after the last change; two after a change of direction, so that a
flapping load turns the number no more than once a cool-down. To `min`: once nothing is queued or in flight for a
cool-down, or twice the measured cold start if that is longer. Missing numbers: the number stays as it is.

Flex and batch tasks count only once the oldest has waited for a share of its target wait, or their work is worth a
start; while they do not count, they keep a worker that runs from ending, and start none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Self

from workers.autoscaler.rules import HURRIED, Rules
from workers.autoscaler.signals import Signals

#: Share of the knee that running sequences must reach before latency adds a worker (c).
FULL = 0.8


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy knows of the past. Kept with each decision, so that another leader goes on from it."""

    wanted: int = 0
    changed_at: float = float("-inf")
    """Last change of the number (unix s)."""
    turned_at: float = float("-inf")
    """Last time that it grew after it had shrunk."""
    shrank: bool = False
    """The last change was downward."""
    raw: tuple[tuple[float, int], ...] = ()
    """(time, raw number), falling numbers: the first is the largest of the last cool-down."""
    empty_since: float | None = None
    """Since when nothing is queued or in flight."""
    busy_since: float | None = None
    """Since when the duty cycle is high."""

    def to_dict(self) -> dict[str, Any]:
        return {name: None if value == float("-inf") else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, said: dict[str, Any]) -> Self:
        """The inverse of `to_dict`. Raises TypeError, KeyError or ValueError for anything else."""
        never = float("-inf")
        raw = tuple((float(at), int(number)) for at, number in said["raw"])
        times = {name: never if said[name] is None else float(said[name]) for name in ("changed_at", "turned_at")}
        return cls(**{**said, **times, "raw": raw})


@dataclass(frozen=True, slots=True)
class Decision:
    """`wanted`: the number of workers. `reason`: why, for people. `raw`: a, b, c and what they make."""

    wanted: int
    reason: str
    raw: dict[str, int]


def decide(rules: Rules, seen: Signals | None, memory: Memory) -> tuple[Decision, Memory]:
    """The number of workers now. `seen`: None where the store or the broker could not be read."""
    if seen is None or "queued" in seen.missing or "in_flight" in seen.missing:
        wanted = min(max(memory.wanted, rules.min), rules.max)
        why = "nothing could be read" if seen is None else f"no number for {', '.join(seen.missing)}"
        return Decision(wanted, f"holds {wanted}: {why}", {}), replace(memory, wanted=wanted)
    memory = _remember(rules, seen, memory)
    raw, cause = _raw(rules, seen, memory)
    memory = replace(memory, raw=_window(memory.raw, seen.at, raw["raw"], rules.cool_down))
    wanted, why = _step(rules, seen, memory, raw["raw"], cause)
    return Decision(wanted, why, raw), _changed(memory, wanted, seen.at)


def _remember(rules: Rules, seen: Signals, memory: Memory) -> Memory:
    empty = not seen.queued and not seen.in_flight
    busy = seen.profile.duty is not None and seen.profile.duty > rules.duty_high
    since = memory.empty_since if memory.empty_since is not None else seen.at
    busy_since = memory.busy_since if memory.busy_since is not None else seen.at
    return replace(memory, empty_since=since if empty else None, busy_since=busy_since if busy else None)


def _raw(rules: Rules, seen: Signals, memory: Memory) -> tuple[dict[str, int], str]:
    """The three numbers and what they make, and the words for the one that decides."""
    counted = {name: tier.waiting for name, tier in seen.tiers.items() if _counts(rules, seen, name)}
    queued = sum(counted.values())
    knee = seen.profile.knee or rules.default_knee
    a = ceil((queued + seen.in_flight) / (rules.headroom * knee))
    b, tier = _by_wait(rules, seen, counted)
    c, strain = _by_strain(rules, seen, memory, knee)
    raw = min(max(a, b, c, rules.min), rules.max)
    words = {
        c: strain,
        b: f"{tier} tasks would wait longer than {rules.target_wait.get(tier, 0):g} s",
        a: f"{queued} queued and {seen.in_flight} in flight, {rules.headroom * knee:.3g} a worker",
    }
    cause = words.get(max(a, b, c), "") if max(a, b, c) >= rules.min else f"the least is {rules.min}"
    return {"a": a, "b": b, "c": c, "raw": raw}, cause


def _counts(rules: Rules, seen: Signals, tier: str) -> bool:
    """Whether a tier's tasks count; see the module's head."""
    if tier in HURRIED:
        return True
    waits = seen.tiers[tier].oldest_s
    if waits is not None and waits >= rules.patience * rules.target_wait[tier]:
        return True
    work = _seconds(seen, sum(seen.tiers[name].waiting for name in seen.tiers if name not in HURRIED))
    return work is not None and work >= rules.worth * seen.profile.cold_start.get("total", float("inf"))


def _seconds(seen: Signals, tasks: int) -> float | None:
    """Time (s) in which one worker would do so many tasks; None where that was never measured."""
    profile = seen.profile
    if not profile.tokens_per_s or not profile.tokens_per_task:
        return None
    return tasks * profile.tokens_per_task / profile.tokens_per_s


def _by_wait(rules: Rules, seen: Signals, counted: dict[str, int]) -> tuple[int, str]:
    """b, and the tier that makes it. A tier's tasks wait for those of all better tiers, too."""
    most, whose, ahead = 0, "", 0
    for tier, waiting in counted.items():
        ahead += waiting
        seconds = _seconds(seen, ahead)
        if waiting and seconds is not None and (number := ceil(seconds / rules.target_wait[tier])) > most:
            most, whose = number, tier
    return most, whose


def _by_strain(rules: Rules, seen: Signals, memory: Memory, knee: float) -> tuple[int, str]:
    """c, and what strains the pool."""
    if not seen.queued or not seen.ready or seen.running < FULL * knee * seen.ready:
        return 0, ""
    ttft = seen.profile.ttft_p95
    if ttft is not None and ttft > rules.ttft_objective:
        return seen.ready + 1, f"p95 of the first token is {ttft:.3g} s, above {rules.ttft_objective:g} s"
    if seen.kv_used is not None and seen.kv_used > rules.kv_high:
        return seen.ready + 1, f"{seen.kv_used:.0%} of the KV cache is in use"
    if memory.busy_since is not None and seen.at - memory.busy_since >= rules.duty_for:
        return seen.ready + 1, f"the workers compute more than {rules.duty_high:.0%} of the time"
    return 0, ""


def _window(raw: tuple[tuple[float, int], ...], at: float, now: int, length: float) -> tuple[tuple[float, int], ...]:
    """The falling maxima of the last `length` seconds, with the present number."""
    kept = [(when, number) for when, number in raw if when > at - length and number > now]
    return (*kept, (at, now))


def _step(rules: Rules, seen: Signals, memory: Memory, raw: int, cause: str) -> tuple[int, str]:
    """The number to have now, from the one that there is."""
    had = min(max(memory.wanted, rules.min), rules.max)
    if raw > had:
        return _out(rules, seen, memory, had, raw, cause)
    if raw < had:
        return _in(rules, seen, memory, had)
    return had, f"{had}: {cause or 'nothing is queued'}"


def _out(rules: Rules, seen: Signals, memory: Memory, had: int, raw: int, cause: str) -> tuple[int, str]:
    left = rules.step - (seen.at - memory.changed_at)
    if had and not memory.shrank and left > 0:
        return had, f"holds {had}: {raw} are needed, the next step out is in {left:.0f} s"
    wanted = min(raw, max(1, int(had * rules.growth)))
    return wanted, f"out from {had} to {wanted}: {cause}"


def _in(rules: Rules, seen: Signals, memory: Memory, had: int) -> tuple[int, str]:
    if memory.empty_since is not None:
        idle, rest = seen.at - memory.empty_since, rest_of(rules, seen)
        if idle >= rest:
            return rules.min, f"in from {had} to {rules.min}: nothing was queued or in flight for {idle:.0f} s"
    turned = seen.at - memory.turned_at < 2 * rules.cool_down
    wait = (2 if turned else 1) * rules.cool_down
    left = wait - (seen.at - memory.changed_at)
    most = memory.raw[0][1]
    if left > 0 or most >= had:
        return had, f"holds {had}: fewer may do, after {max(left, 0):.0f} s and a cool-down of {rules.cool_down:g} s"
    if had == 1:  # to zero only when nothing is left
        return had, f"holds {had}: {seen.queued} queued and {seen.in_flight} in flight"
    return had - 1, f"in from {had} to {had - 1}: {most} were enough for {rules.cool_down:g} s"


def rest_of(rules: Rules, seen: Signals) -> float:
    """Time (s) for which an empty pool keeps its workers."""
    return max(rules.cool_down, 2 * seen.profile.cold_start.get("total", 0.0))


def _changed(memory: Memory, wanted: int, at: float) -> Memory:
    if wanted == memory.wanted:
        return memory
    turned = at if wanted > memory.wanted and memory.shrank else memory.turned_at
    return replace(memory, wanted=wanted, changed_at=at, turned_at=turned, shrank=wanted < memory.wanted)
