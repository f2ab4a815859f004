"""Forecasts when a task starts and ends, from what waits before it, what runs, and the rates that workers measured.

    tokens of need before it ─┐
    workers: slots, rates ────┼▶ when it starts ─┐
    workers that start ───────┘                  ├▶ Forecast: p50 and p90
    its prompt, shares of outputs ─▶ its length ─┘

A task's need is the KV tokens that it may need, by which its tier and its tenant's turn are counted, too. Workers tell
how long a sequence's slot is taken for each token of need (`producers.contract.profile.TaskTimes`). So a worker with S
slots clears S / per_need tokens a second, and the task starts once what is before it is cleared, less what free slots
take at once. The work depends on counts, never on how many tasks wait. Workers are added up once for each reading of
the fleet, queue and tier (`Groups`).

Tasks that come later may go first, too: of better tiers, and of tenants who have been served less. They are taken to
come as they did in the last seconds, for a part of the time (GO_ON) for which tasks have waited already: nobody knows
when a rush ends. The p90 adds the errors that these forecasts had, and the length that nine of ten outputs do not
exceed. Whatever was not measured makes the forecast None: nothing is assumed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from weakref import WeakKeyDictionary

from redis.asyncio import Redis

from producers.admin.observation import Arrivals, Lease, Observation, look
from producers.client.aio import AsyncClient
from producers.client.blocking import Client
from producers.contract import keys
from producers.contract.profile import Profile, TaskTimes, sane
from producers.contract.task import ASSUMED_OUTPUT

#: Standard deviations from the median to the 90th percentile.
TO_P90: Final = 1.2816
#: Tasks whose forecast `TaskTimes.need_error` is about; the share of it that many more tasks do not average out.
TOGETHER, COMMON = 8, 0.5
#: A knee has this share of the best throughput (`workers.measure`).
KNEE_SHARE: Final = 0.85
#: Times measured with fewer sequences than this share of a worker's slots say little of a full one.
LOADED: Final = 0.75
#: Longest wait (s) of tasks of a tier, or of a better one, at which a slot may still be free for the tier.
TAKEN_S: Final = 0.1
#: Tasks go on coming for so many times the time for which some have waited: as likely as not, and in one of ten cases.
GO_ON, GO_ON_P90 = 0.25, 6.0
#: The part of other tenants' tasks, of those that come meanwhile, that have the turn before it: the same.
TURNS, TURNS_P90 = 0.5, 1.0
#: Halvings of the time in which a wait is looked for that tasks who come meanwhile make longer.
HALVINGS: Final = 24
#: Adding up a thousand workers takes 40 ms. From MANY on, what was added up counts for so long (s).
MANY, KEPT_S = 50, 3.0
#: No wait that is longer is told (s).
LONGEST_S: Final = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds from now, of which a half and nine tenths of such tasks end."""

    p50_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """None: unknown. Seconds from now."""

    starts: Eta | None = None
    ends: Eta | None = None


async def read_eta(client: AsyncClient, task_id: str) -> Eta | None:
    """When a task ends; None if it has ended or nobody can tell. Raises TaskNotFound, redis.exceptions.RedisError or
    OSError."""
    record = await client.get(task_id).status()
    observed = await look(client.store, client.broker, record)
    return forecast(observed, known_groups(client.store, observed)).ends


def eta(client: Client, task_id: str) -> Eta | None:
    """The same for the blocking client."""
    portal, reading = client.reading()
    return portal.call(read_eta(reading, task_id))


UNKNOWN: Final = Forecast()


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that clears `rate` tokens of need a second. `room`: tokens of need whose slots are free, in so many
    `free` slots."""

    rate: float
    free: float
    room: float
    slots: float
    times: TaskTimes


@dataclass(frozen=True, slots=True)
class _Group:
    """Workers that clear tokens of need from `at` (s) on, added up."""

    at: float
    rate: float
    free: float
    room: float
    free_of_one: float
    """The free slots of the worker that has most of them."""
    times: TaskTimes
    """Those of the first worker."""
    slot_s: float
    """The longest time between two ends of tasks of a full worker."""
    pace: float
    """The least share, of all workers, by which tasks run faster than they were measured."""

    @classmethod
    def of(cls, at: float, workers: Sequence[_Worker]) -> _Group:
        return cls(
            at,
            sum(worker.rate for worker in workers),
            sum(worker.free for worker in workers),
            sum(worker.room for worker in workers),
            max(worker.free for worker in workers),
            workers[0].times,
            max(worker.times.task / worker.slots for worker in workers),
            min(worker.slots / worker.times.per_need / worker.rate for worker in workers),
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """A version's workers: those that take tasks, then those that start. `late`: the same if these take their whole
    start from now on."""

    likely: tuple[_Group, ...]
    late: tuple[_Group, ...]


#: A queue's name and a tier -> its workers, by one reading of the fleet.
KnownGroups = dict[tuple[str, str], Groups]
#: A store -> when workers were added up (monotonic s), and what they came to.
_kept: WeakKeyDictionary[Redis, tuple[float, KnownGroups]] = WeakKeyDictionary()


def known_groups(store: Redis, observed: Observation) -> KnownGroups:
    """What forecasts of this process have added up of the fleet in the last KEPT_S, where there are MANY workers or
    more: for callers who read the fleet at each question. `store`: that which was read."""
    if len(observed.workers) < MANY:
        return {}
    now = time.monotonic()
    at, groups_by_key = _kept.get(store, (float("-inf"), {}))
    if now - at > KEPT_S:
        _kept[store] = now, (groups_by_key := {})
    return groups_by_key


def forecast(observed: Observation, groups_by_key: KnownGroups | None = None) -> Forecast:
    """When the task starts and ends. `groups_by_key`: what earlier forecasts by the same reading of the fleet have
    added up."""
    try:
        return _forecast(observed, {} if groups_by_key is None else groups_by_key)
    except ArithmeticError:  # a worker's figures are beyond all floats
        return UNKNOWN


def _forecast(observed: Observation, groups_by_key: KnownGroups) -> Forecast:
    record = observed.record
    if record.final or record.chunks or record.fields.get("status") == "submitting":
        return UNKNOWN
    running = record.status == "in_progress" and not observed.orphaned
    key = observed.pool.name, record.tier
    groups = groups_by_key.get(key)
    if groups is None:
        groups = groups_by_key[key] = _groups(observed)
    likely = groups.likely
    if not likely:
        return UNKNOWN
    times = _own_times(observed) if running else likely[0].times
    own_eta = None if times is None else _run_time(observed, times, running=running)
    if running:
        return Forecast(Eta(0.0, 0.0), _displaced(observed, likely, own_eta))
    start = _start(observed, groups)
    if start is None or own_eta is None:
        return Forecast(start)
    slower = max(1.0, min(group.pace for group in likely))
    middle = start.p50_s + own_eta.p50_s * slower
    spread = ((start.p90_s - start.p50_s) ** 2 + (slower * (own_eta.p90_s - own_eta.p50_s)) ** 2) ** 0.5
    return Forecast(start, _eta(middle, middle + spread))


def _eta(p50: float, p90: float) -> Eta | None:
    """None for what cannot be told: no number, or too long."""
    if not p50 <= p90 <= LONGEST_S:
        return None
    return Eta(round(max(0.0, p50), 3), round(max(0.0, p90), 3))


# ---- workers --------------------------------------------------------------------------------------------------------


def _groups(observed: Observation) -> Groups:
    """The workers that may run the task."""
    ready = list(_ready(observed))
    up = (_Group.of(0.0, ready),) if ready else ()
    starting = _starting(observed)
    if starting is None:
        return Groups(up, up)
    return Groups((*up, starting[0]), (*up, starting[1]))


def _ready(observed: Observation) -> Iterator[_Worker]:
    """Those that take tasks."""
    profile = observed.profile
    for lease in observed.ready:
        measured = Profile.of(lease.get("profile"))
        if (worker := _worker(observed, lease, measured if measured.task_times else profile, profile)) is not None:
            yield worker


def _starting(observed: Observation) -> tuple[_Group, _Group] | None:
    """Those that start: as they go on, and if they take their whole start from now on. None without any."""
    profile, state = observed.profile, observed.scaling or {}
    starting = int(sane(state.get("wanted")) or 0) - len(observed.workers)
    cold, times = profile.cold_start.get("total"), profile.task_times
    if starting <= 0 or cold is None or times is None or not times.per_need or state.get("trouble"):
        return None
    memory = state.get("memory")
    ordered = sane(memory.get("changed_at")) if isinstance(memory, dict) else None
    elapsed = 0.0 if ordered is None else max(0.0, observed.now_ms / 1000 - ordered)
    slots = _slots_of_others(observed, profile)
    if not slots:
        return None
    slots *= starting
    together = _Worker(slots / times.per_need, slots, slots * times.remaining / times.per_need, slots, times)
    return _Group.of(max(0.0, cold - elapsed), [together]), _Group.of(cold, [together])


def _slots_of_others(observed: Observation, profile: Profile) -> float:
    """Slots of a worker that starts: those of a worker that is up, or the version's knee."""
    capacities = [capacity for worker in observed.workers if (capacity := sane(worker.get("capacity")))]
    return max(capacities, default=profile.knee or 0.0)


def _worker(observed: Observation, lease: Lease, measured: Profile, profile: Profile) -> _Worker | None:
    times, capacity = measured.task_times, sane(lease.get("capacity"))
    if times is None or not times.per_need or not times.task or not capacity:
        return None
    need = times.task / times.per_need
    tokens = measured.kv_capacity or profile.kv_capacity
    slots = min(capacity, max(1.0, tokens / need)) if tokens else capacity
    rate = slots / times.per_need
    if times.running < LOADED * slots and measured.tokens_per_s and measured.tokens_per_task:
        # What was measured of few at once is no measure of many: a full engine makes no more than at its best.
        rate = min(rate, measured.tokens_per_s / KNEE_SHARE * need / measured.tokens_per_task)
    busy = (sane(lease.get("running")) or 0.0) + (sane(lease.get("waiting")) or 0.0)
    if _rank(observed) < keys.TIERS["flex"][0]:  # it takes the room of those
        tasks = sane(lease.get("tasks"))
        busy *= 1.0 - min(1.0, (sane(lease.get("patient")) or 0.0) / tasks) if tasks else 1.0
    # Leases are some seconds old: tasks that wait tell sooner that nothing is free for their tier.
    free = 0.0 if _waited_s(observed) > TAKEN_S else max(0.0, slots - busy)
    return _Worker(rate, free, free * times.remaining / times.per_need, slots, times)


def _waited_s(observed: Observation) -> float:
    """For how long tasks of the task's tier, or of a better one, have waited for its version."""
    rank, oldest_s = _rank(observed), observed.pool.oldest_s
    return max((waited for tier, waited in oldest_s.items() if keys.TIERS[tier][0] <= rank), default=0.0)


def _rank(observed: Observation) -> int:
    return keys.TIERS.get(observed.record.tier, keys.TIERS["default"])[0]


# ---- its start ------------------------------------------------------------------------------------------------------


def _start(observed: Observation, groups: Groups) -> Eta | None:
    likely, late = groups.likely, groups.late
    delay, count, tokens, later = 0.0, 0, 0.0, Arrivals()
    position, mean = observed.queue_position, likely[0].times.task / likely[0].times.per_need
    if position is not None:
        delay = position.due_s or 0.0
        count = observed.better + observed.later + position.ahead
        tokens = position.ahead * mean if position.tokens is None else float(position.tokens)
        tokens += observed.tokens_before(mean)
        later = observed.arrivals
    elif not observed.fetched and not observed.orphaned:
        return None  # the broker tells no order
    likely_wait = _wait(likely, count, tokens, _Later.of(later, mean, tokens, GO_ON, TURNS))
    middle = max(delay, likely_wait)
    if count == 0 and likely[0].at == 0 and likely[0].free_of_one >= 1:
        return _eta(middle, middle)
    error = likely[0].times.need_error * max(COMMON, (TOGETHER / max(count, 1)) ** 0.5)
    slot = max(group.slot_s for group in likely)
    long_tokens = tokens * (1 + TO_P90 * error)
    longest = _wait(late, count, long_tokens, _Later.of(later, mean, tokens, GO_ON_P90, TURNS_P90))
    return _eta(middle, max(middle, delay, longest) + (TO_P90 * slot if count else 0.0))


@dataclass(frozen=True, slots=True)
class _Later:
    """Tokens of need that go before a task though they come after it. `rate`, `turns_rate`: a second, of better tiers
    and of other tenants; they come for `for_s` seconds. `turns`: the most of other tenants, who get about as much as
    its own tenant in that time."""

    rate: float
    turns_rate: float
    turns: float
    for_s: float

    @classmethod
    def of(cls, arrivals: Arrivals, need: float, before: float, go_on: float, turns: float) -> _Later:
        """`need`: of a task; `before`: tokens of need that go before it now."""
        return cls(arrivals.better * need, turns * arrivals.beside * need, turns * before, go_on * arrivals.for_s)

    def tokens(self, seconds: float) -> float:
        """Those that come within a time."""
        within = min(seconds, self.for_s)
        return self.rate * within + min(self.turns, self.turns_rate * within)


def _wait(groups: Sequence[_Group], count: int, tokens: float, later: _Later) -> float:
    """Seconds until so many tasks have begun, and those that go before while they wait."""
    least = _cleared(groups, count, tokens)
    upper = _cleared(groups, count, tokens + later.tokens(later.for_s)) if least else least
    for _ in range(HALVINGS if upper > least else 0):
        middle = (least + upper) / 2
        if _cleared(groups, count, tokens + later.tokens(middle)) > middle:
            least = middle
        else:
            upper = middle
    return upper


def _cleared(groups: Sequence[_Group], count: int, tokens: float) -> float:
    """Seconds until so many tasks, with so many tokens of need together, have begun."""
    at = rate = free = 0.0
    for group in groups:
        if rate and tokens <= rate * (group.at - at):
            break
        tokens -= rate * (group.at - at) + group.room
        at, rate, free = group.at, rate + group.rate, free + group.free
        if count < free:
            return at
    return at + max(0.0, tokens) / rate


def _displaced(observed: Observation, groups: Sequence[_Group], own_eta: Eta | None) -> Eta | None:
    """The end of a running task: later by the better tiers' tasks that take the room of flex and batch."""
    if own_eta is None or _rank(observed) < keys.TIERS["flex"][0] or not observed.better:
        return own_eta
    times = groups[0].times
    tokens = observed.tokens_before(times.task / times.per_need)
    more = tokens / sum(group.rate for group in groups)
    return _eta(own_eta.p50_s + more, own_eta.p90_s + more * (1 + TO_P90 * times.need_error))


# ---- itself ---------------------------------------------------------------------------------------------------------


def _own_times(observed: Observation) -> TaskTimes | None:
    """What its worker measured, else what the version's did."""
    owner = observed.record.fields.get("owner")
    lease: Lease = next((worker for worker in observed.workers if worker.get("incarnation") == owner), {})
    return Profile.of(lease.get("profile")).task_times or observed.profile.task_times


def _run_time(observed: Observation, times: TaskTimes, *, running: bool) -> Eta | None:
    """How long it takes from its claim, or from now on; None if no such output was measured."""
    record = observed.record
    task: Any = record.task
    generates = isinstance(task, dict) and task.get("kind", "generate") == "generate"
    allowed, limit = _allowed(task, record.fields) if generates else (0.0, 0.0)
    prompt = float(record.count("prompt_tokens") or max(0.0, observed.tokens - allowed * record.width))
    done, first = sum(record.nexts) / max(1, record.n), record.time("first")
    per_token = times.per_output_token
    now = observed.now_ms
    if running and first is not None and done > 1:  # its own pace, the more it has made
        pace = max(0.0, now - first) / 1000
        per_token = (per_token * TOGETHER + pace) / (TOGETHER + done - 1)
    if generates:
        outputs = _outputs(times.shares, done, allowed, limit)
        if outputs is None:
            return None
        middle, p90 = (per_token * max(0.0, tokens - done) for tokens in outputs)
    else:
        middle = p90 = 0.0
    if first is None:
        began = record.time("began") or record.time("started") if running else None
        elapsed = 0.0 if began is None else max(0.0, now - began) / 1000
        prefill = max(0.0, times.per_prompt_token * prompt - elapsed)
        middle, p90 = middle + prefill, p90 + prefill
    return _eta(middle, middle + ((p90 - middle) ** 2 + (TO_P90 * times.error * middle) ** 2) ** 0.5)


def _allowed(task: dict[str, Any], fields: Any) -> tuple[float, float]:
    """Output tokens of a choice that shares are of, and those that it can have at most."""
    limit = sane(task.get("max_tokens"))
    budget = sane(int(fields["max_output"])) if fields.get("max_output", "").isdecimal() else None
    allowed = ASSUMED_OUTPUT if limit is None else limit
    bounds = [bound for bound in (limit, budget) if bound is not None]
    return float(allowed), min(bounds, default=LONGEST_S)


def _outputs(shares: tuple[float, ...], done: float, allowed: float, limit: float) -> tuple[float, float] | None:
    """Lengths that a half and nine tenths of outputs that have come so far do not exceed."""
    if done >= limit:
        return limit, limit
    if not shares or done > shares[-1] * allowed:
        return None
    past = _past(shares, done / allowed) if allowed else 0.0
    middle, p90 = (min(limit, max(done, _quantile(shares, past + q * (1 - past)) * allowed)) for q in (0.5, 0.9))
    return middle, p90


def _past(shares: tuple[float, ...], share: float) -> float:
    """The part of outputs that were shorter."""
    last = len(shares) - 1
    for k, (low, high) in enumerate(pairwise(shares)):
        if share <= low:
            return k / last
        if share < high:
            return (k + (share - low) / (high - low)) / last
    return 1.0


def _quantile(shares: tuple[float, ...], part: float) -> float:
    position = min(1.0, max(0.0, part)) * (len(shares) - 1)
    low = min(int(position), len(shares) - 2)
    return shares[low] + (position - low) * (shares[low + 1] - shares[low])
