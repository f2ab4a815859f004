"""The scaling policy: a pure function, which the autoscaler calls with what it sees, the simulator with its trace.

    a = ceil((hurried tasks queued + hurried tasks in flight) / room); 1 if only patient tasks count
    room = headroom * knee, or the tasks that a worker does within priority's target wait, if those are more
    b = ceil(tokens queued up to a tier / (tokens_per_s * that tier's wait)), the largest over tiers
    c = ready + 1 if counted tasks wait, the workers are full, and (TTFT above objective, or KV or duty cycle high)
    d = workers of earlier releases + those that tasks need which these cannot do, if fewer are ready
    raw = clamp(max(a, b, c, d), min, max)

Out: at once from zero; else to at most `growth` times the number, a step at a time. In: by one, once the largest raw
number of the last cool-down is lower, and a cool-down after the last change; two after a change of direction, so that a
flapping load turns the number no more than once a cool-down. To `min`: once nothing is queued or in flight for a
cool-down, or twice the measured cold start if that is longer. Missing numbers: the number stays as it is.

Priority and default are hurried. Flex and batch are patient: their tasks count only once the oldest has waited for a
share of its target wait, or their work is worth a start. Until then they start no worker. They run in the room that
hurried tasks leave, and keep one worker that runs from ending.

d counts workers of earlier releases as they were when the tasks began to wait: if what is started is of no later one,
it starts no more. Messages of kinds that only a release after the autoscaler's own may know ask for one worker at most,
and keep it from ending: they end where a worker is up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

from producers.contract import keys
from workers.autoscaler.policy.memory import Memory
from workers.autoscaler.policy.rules import HURRIED, Rules
from workers.autoscaler.policy.signals import Signals

__all__ = ["Decision", "Memory", "decide", "rest_of"]

#: Share of the knee that running sequences must reach before latency adds a worker (c).
FULL: Final = 0.8
#: More workers than anybody has. Huge queues ask for this number.
MOST: Final = 10**9


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
        return Decision(wanted, f"holds {wanted}: {_unread(seen)}", {}), replace(memory, wanted=wanted)
    memory = _remember(rules, seen, memory)
    raw, cause = _raw(rules, seen, memory)
    memory = replace(memory, raw=_window(memory.raw, seen.at, raw["raw"], rules.cool_down))
    wanted, why = _step(rules, seen, memory, raw["raw"], cause)
    return Decision(wanted, why, raw), _changed(memory, wanted, seen.at)


def _unread(seen: Signals | None) -> str:
    """Why no number can be made."""
    if seen is None:
        return "nothing could be read"
    if "card" in seen.missing:
        return "the model is not published, and no worker serves it (`penstock models publish`)"
    return f"no number for {', '.join(seen.missing)}"


# ---- memory -----------------------------------------------------------------------------------------------------


def _remember(rules: Rules, seen: Signals, memory: Memory) -> Memory:
    memory = _awake(rules, seen.at, memory)
    empty = not seen.queued and not seen.in_flight and not seen.aside
    busy = seen.profile.duty is not None and seen.profile.duty > rules.duty_high
    since = memory.empty_since if memory.empty_since is not None else seen.at
    busy_since = memory.busy_since if memory.busy_since is not None else seen.at
    return replace(
        memory,
        empty_since=since if empty else None,
        busy_since=busy_since if busy else None,
        below=_below(seen, memory),
        seen_at=seen.at,
    )


def _below(seen: Signals, memory: Memory) -> tuple[tuple[int, int], ...]:
    """The workers of earlier releases, by the levels that tasks wait for; see the module's head."""
    had = dict(memory.below)
    return tuple((one.level, min(one.below, had.get(one.level, one.below))) for one in seen.levels)


def _awake(rules: Rules, at: float, memory: Memory) -> Memory:
    """The memory without the time in which nothing was seen: all its times move forward, or back with the clock.

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


def _changed(memory: Memory, wanted: int, at: float) -> Memory:
    if wanted == memory.wanted:
        return memory
    turned = at if wanted > memory.wanted and memory.shrank else memory.turned_at
    return replace(memory, wanted=wanted, changed_at=at, turned_at=turned, shrank=wanted < memory.wanted)


# ---- the number that is needed ------------------------------------------------------------------------------------


def _raw(rules: Rules, seen: Signals, memory: Memory) -> tuple[dict[str, int], str]:
    """The numbers and what they make, and the words for the one that decides."""
    tiers = [name for name in keys.TIERS if name in seen.tiers]
    counted = {name: seen.tiers[name].waiting for name in tiers if _counts(rules, seen, name)}
    a, room = _by_room(rules, seen, counted)
    b, wait = _by_wait(rules, seen, counted)
    c, strain = _by_strain(rules, seen, memory, counted)
    d, release = _by_release(rules, seen, memory, counted)
    need, cause = max((a, room), (b, wait), (c, strain), (d, release), key=lambda one: one[0])
    if need < rules.min:
        cause = f"the least is {rules.min}"
    if need > rules.max:
        cause = f"{rules.max} is the most of {need} needed: {cause}"
    return {"a": a, "b": b, "c": c, "d": d, "raw": min(max(need, rules.min), rules.max)}, cause


def _counts(rules: Rules, seen: Signals, tier: str) -> bool:
    """Whether a tier's tasks count; see the module's head."""
    if tier in HURRIED:
        return True
    waits = seen.tiers[tier].oldest_s
    if waits is not None and waits >= rules.patience * rules.target_wait[tier]:
        return True
    work = _seconds(seen, sum(seen.tiers[name].waiting for name in seen.tiers if name not in HURRIED))
    return work is not None and work >= rules.worth * seen.profile.cold_start.get("total", inf)


def _seconds(seen: Signals, tasks: int) -> float | None:
    """Time (s) in which one worker would do so many tasks; None where that was never measured."""
    profile = seen.profile
    if not profile.tokens_per_s or not profile.tokens_per_task:
        return None
    return tasks * profile.tokens_per_task / profile.tokens_per_s


def _knee(rules: Rules, seen: Signals) -> float:
    return max(1.0, seen.profile.knee or rules.default_knee)


def _by_room(rules: Rules, seen: Signals, counted: dict[str, int]) -> tuple[int, str]:
    """a, and its words: room for all hurried tasks at once."""
    queued = sum(waiting for name, waiting in counted.items() if name in HURRIED)
    running, room = _hurried(rules, seen), _room(rules, seen)
    words = f"{queued} queued and {running:.3g} in flight, {room:.3g} a worker"
    number = _workers((queued + running) / room)
    if not number and any(counted.values()):
        return 1, f"{sum(counted.values())} flex or batch tasks have waited for long, or are worth a start"
    if not number and seen.aside:
        return 1, f"{seen.aside} messages wait for a later release, and end where a worker is up"
    return number, words if number else _idle(rules, seen)


def _idle(rules: Rules, seen: Signals) -> str:
    """Words for a pool in which nothing counts."""
    waiting = {name: tier for name, tier in seen.tiers.items() if tier.waiting}
    left = [rules.patience * rules.target_wait[name] - (tier.oldest_s or 0.0) for name, tier in waiting.items()]
    if left:
        number = sum(tier.waiting for tier in waiting.values())
        return f"{number} queued of flex or batch: worth no start yet, and counted in {min(left):.0f} s"
    return f"{seen.in_flight} in flight of flex or batch" if seen.in_flight else "nothing is queued or in flight"


def _room(rules: Rules, seen: Signals) -> float:
    """Tasks that one worker is planned to hold. Short ones need no place of their own: they take turns soon enough."""
    each = _seconds(seen, 1)
    quick = rules.target_wait["priority"] / each if each else 0.0
    return max(rules.headroom * _knee(rules, seen), quick)


def _hurried(rules: Rules, seen: Signals) -> float:
    """Hurried tasks in flight, as many as they would be if patient ones beside them did not slow them down.

    Sequences beyond the knee share one throughput, so each takes longer, and more of them are in flight.
    """
    hurried, room = max(0, seen.in_flight - seen.patient), _knee(rules, seen) * seen.ready
    if not seen.patient or not room:
        return hurried
    slowed = min(1.0, room / seen.in_flight) / min(1.0, room / hurried) if hurried else 1.0
    return hurried * slowed


def _by_wait(rules: Rules, seen: Signals, counted: dict[str, int]) -> tuple[int, str]:
    """b, and its words. A tier's tasks wait for those of all better tiers, too.

    A wait is never counted as shorter than the cold start: no worker that is started now comes sooner.
    """
    most, words, ahead, start = 0, "", 0, seen.profile.cold_start.get("total", 0.0)
    for tier, waiting in counted.items():
        ahead += waiting
        seconds, wait = _seconds(seen, ahead), max(rules.target_wait[tier], start)
        if waiting and seconds is not None and (number := _workers(seconds / wait)) > most:
            most, words = number, f"{tier} tasks would wait longer than {wait:g} s"
    return most, words


def _by_strain(rules: Rules, seen: Signals, memory: Memory, counted: dict[str, int]) -> tuple[int, str]:
    """c, and its words. It asks for one more than there are, and no more while that one starts."""
    full = FULL * _knee(rules, seen) * seen.ready
    if not any(counted.values()) or not seen.ready or seen.running < full:
        return 0, ""
    more, ttft = min(seen.ready, memory.wanted) + 1, seen.profile.ttft_p95
    if ttft is not None and ttft > rules.ttft_objective:
        return more, f"p95 of the first token is {ttft:.3g} s, above {rules.ttft_objective:g} s"
    if seen.kv_used is not None and seen.kv_used > rules.kv_high:
        return more, f"{seen.kv_used:.0%} of the KV cache is in use"
    if memory.busy_since is not None and seen.at - memory.busy_since >= rules.duty_for:
        return more, f"the workers compute more than {rules.duty_high:.0%} of the time"
    return 0, ""


def _by_release(rules: Rules, seen: Signals, memory: Memory, counted: dict[str, int]) -> tuple[int, str]:
    """d, and its words: workers beside those of earlier releases, for tasks that these leave."""
    most, words, room = 0, "", _room(rules, seen)
    for one in seen.levels:
        waiting = {name: one.waiting.get(name, 0) for name in counted}
        if not any(waiting.values()):
            continue
        hurried = sum(number for name, number in waiting.items() if name in HURRIED)
        need, below = max(1, _workers((hurried + one.in_flight) / room)), dict(memory.below)[one.level]
        if need > one.able and below + need > most:
            most = below + need
            words = f"{sum(waiting.values())} queued for a later release than that of {below} workers"
    return most, words


def _workers(share: float) -> int:
    return ceil(min(share, MOST))


# ---- the step -----------------------------------------------------------------------------------------------------


def _step(rules: Rules, seen: Signals, memory: Memory, raw: int, cause: str) -> tuple[int, str]:
    """The number to have now, from the one that there is."""
    had = min(max(memory.wanted, rules.min), rules.max)
    if raw > had:
        return _out(rules, seen, memory, had, raw, cause)
    if raw < had:
        return _in(rules, seen, memory, had, raw)
    return had, f"{had}: {cause}"


def _out(rules: Rules, seen: Signals, memory: Memory, had: int, raw: int, cause: str) -> tuple[int, str]:
    left = rules.step - _since(seen, memory.changed_at)
    if had and not memory.shrank and left > 0:
        return had, f"holds {had}: {raw} are needed, the next step out is in {left:.0f} s"
    wanted = min(raw, max(had + 1, int(had * rules.growth)))
    return wanted, f"out from {had} to {wanted}: {cause}"


def _in(rules: Rules, seen: Signals, memory: Memory, had: int, raw: int) -> tuple[int, str]:
    turned, empties = _since(seen, memory.turned_at), inf
    if memory.empty_since is not None:
        idle = seen.at - memory.empty_since
        empties = max(rest_of(rules, seen) - idle, 2 * rules.cool_down - turned)
        if empties <= 0:
            return rules.min, f"in from {had} to {rules.min}: nothing was queued or in flight for {idle:.0f} s"
    if had == 1:  # to zero only when nothing is left
        return had, f"holds {had}: {_nearly_idle(seen, empties)}"
    wait = (2 if turned < 2 * rules.cool_down else 1) * rules.cool_down
    left = wait - _since(seen, memory.changed_at)
    most = memory.raw[0][1]
    if left > 0 or most >= had:
        needed = [at + rules.cool_down - seen.at for at, number in memory.raw if number >= had]
        soon = min(max(left, *needed), empties) if needed else min(left, empties)
        return had, f"holds {had}: {raw} would be enough; the number falls in {soon:.0f} s if that lasts"
    return had - 1, f"in from {had} to {had - 1}: {most} were enough for {rules.cool_down:g} s"


def _nearly_idle(seen: Signals, left: float) -> str:
    """Words for the last worker. `left`: time (s) until it ends; infinite while tasks are left."""
    if left < inf:
        return f"nothing is queued or in flight; the last worker ends in {left:.0f} s if that lasts"
    return f"{seen.queued} queued and {seen.in_flight} in flight"


def rest_of(rules: Rules, seen: Signals) -> float:
    """Time (s) for which an empty pool keeps its workers."""
    return max(rules.cool_down, 2 * seen.profile.cold_start.get("total", 0.0))


def _since(seen: Signals, when: float | None) -> float:
    return inf if when is None else seen.at - when
