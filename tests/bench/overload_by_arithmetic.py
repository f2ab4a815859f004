"""What overload does to the first token, by arithmetic: `python -m tests.bench.overload_by_arithmetic`.

The engine's own scheduler in virtual time, under the load of `overload`: a step takes `--step-ms`, and `--token-ms` for
each token that it computes. No gateway, server, process or second clock takes part, so that what comes out is what
scheduling does, the same on every machine and at every try; and so step budgets can be compared before a machine is
chosen. Aims as of `overload`: the priority tier's TTFT, 95th percentile, at three times the capacity is at most 1.5
times that of tasks alone, and the goodput at least 0.9 of the best.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv import KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from producers.store import waiting
from tests.engine.stepping import made

#: Name, share of the requests, and the deadline in times of what a task takes at the capacity, as in `overload`.
TIERS = (("priority", 0.15, 5.0), ("default", 0.45, 15.0), ("flex", 0.2, 37.5), ("batch", 0.2, 75.0))
#: Pressure at which each stage of overload is entered and left; per tier, the stage that refuses it.
ENTERED, LEFT, REFUSED = (0.8, 0.9, 0.95), (0.6, 0.7, 0.8), [waiting.REFUSED[name] for name, *_ in TIERS]
TENANTS = {"big": 0.7, "small": 0.2, "": 0.1}


@dataclass(frozen=True, slots=True)
class World:
    """What is computed by: `step_s` seconds for each step and `token_s` for each of its tokens."""

    step_s: float
    token_s: float
    rows: int
    batched_tokens: int
    prompt: int
    """Tokens on average, from half of that to half more; so is `output`."""
    output: int
    max_non_priority_step_tokens: int | None = None
    exclusive: bool = False
    max_queued: int = 100
    stages: bool = True
    """Whether overload is left at less than it is entered at, as gateways do it."""

    def took(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


@dataclass(slots=True)
class One:
    request: Request
    due: float
    deadline: float
    first: float | None = None
    ended: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class Run:
    """One load from its beginning to `until`, when arrivals end."""

    world: World
    seed: str
    task_s: float = math.inf
    """What a task takes at the capacity: the unit of deadlines."""
    now: float = 0.0
    all: dict[str, One] = field(default_factory=dict)
    refused: int = 0
    steps: int = 0
    stage: int = 0
    _rng: random.Random = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _live: dict[str, One] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self._rng = random.Random(self.seed)
        self._scheduler = made(
            spaces=[KvSpace(2 * world.rows * -(-2 * (world.prompt + world.output) // 16))],
            block_size=16,
            max_num_seqs=world.rows,
            max_num_batched_tokens=world.batched_tokens,
            max_model_len=2 * (world.prompt + world.output),
            ageing_s=min(1e9, 37.5 * self.task_s),
            max_non_priority_step_tokens=world.max_non_priority_step_tokens,
            exclusive=world.exclusive,
            seed=1,
        )

    def add(self, tier: int, due: float) -> None:
        """A task that was to come at `due`; it is refused where too many wait."""
        rng, world = self._rng, self.world
        (tenant,) = rng.choices(list(TENANTS), list(TENANTS.values()))
        prompt = rng.choices(range(1 << 20), k=rng.randint(world.prompt // 2, world.prompt * 3 // 2))
        params = SamplingParams(max_tokens=rng.randint(world.output // 2, world.output * 3 // 2), ignore_eos=True)
        name = f"{len(self.all)}"
        one = One(
            Request(name, prompt, params, tier=tier, tenant=tenant, arrival=due),
            due,
            due + TIERS[tier][2] * self.task_s,
        )
        self.all[name] = one
        if self._is_full(tier):
            self.refused += 1
            return
        self._live[name] = one
        self._scheduler.add(one.request)

    def _is_full(self, tier: int) -> bool:
        """Whether a gateway refuses a task of this tier now: by its stage, or by the bound."""
        queued, world = [other.request.tier for other in self._live.values() if other.first is None], self.world
        share = len(queued) / world.max_queued
        while world.stages and self.stage < len(ENTERED) and share >= ENTERED[self.stage]:
            self.stage += 1
        while self.stage and share < LEFT[self.stage - 1]:
            self.stage -= 1
        before = len(queued) if tier else queued.count(0)
        return self.stage >= REFUSED[tier] or before >= world.max_queued * waiting.PARTS[TIERS[tier][0]]

    def tier(self) -> int:
        return self._rng.choices(range(len(TIERS)), [share for _, share, _ in TIERS])[0]

    def step(self) -> bool:
        """False where there is nothing to compute."""
        for name, one in list(self._live.items()):
            if one.deadline < self.now:
                self._scheduler.abort(name)
                del self._live[name]
        plan = self._scheduler.schedule(self.now)
        if plan is None:
            return False
        self.steps += 1
        self.now += self.world.took(plan.num_tokens)
        for event in self._scheduler.update(plan, [Sampled(1) for row in plan.rows if row.samples], self.now):
            one = self._live[event.request_id]
            one.tokens += len(event.token_ids)
            one.first = self.now if one.first is None else one.first
            if event.done:
                one.ended = self.now
                del self._live[event.request_id]
        return True

    @property
    def under_way(self) -> int:
        return len(self._live)

    def open_loop(self, rate: float, seconds: float) -> None:
        due = self._rng.expovariate(rate)
        while self.now < seconds:
            while due <= self.now:
                self.add(self.tier(), due)
                due += self._rng.expovariate(rate)
            if not self.step():
                self.now = due

    def ttfts(self) -> list[float]:
        """Of the priority tier, seconds."""
        return [one.first - one.due for one in self.all.values() if one.request.tier == 0 and one.first is not None]

    def good(self) -> int:
        """Tokens of the tasks that ended in time."""
        return sum(one.tokens for one in self.all.values() if one.ended is not None)


def capacity(world: World, seconds: float) -> float:
    """Output tokens a second with twice as many tasks under way as there are rows."""
    run = Run(world, "capacity")
    while run.now < seconds:
        while run.under_way < 2 * world.rows:
            run.add(run.tier(), run.now)
        run.step()
    return run.good() / run.now


def alone(world: World, count: int) -> list[float]:
    """TTFT of priority tasks, each in its turn."""
    run = Run(world, "alone")
    for _ in range(count):
        run.add(0, run.now)
        while run.step():
            pass
    return run.ttfts()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else 0.0


def measure(
    world: World, loads: list[float], tasks: int, say: Callable[[dict[str, object]], None]
) -> tuple[float, float]:
    """`tasks` arrive at each load. The priority tier's TTFT at the last load by that alone; the goodput by the best."""
    most = capacity(world, 60 * world.output * world.took(world.rows))
    task_s = world.rows * world.output / most
    quiet = p95(alone(world, 200))
    say(
        {
            "capacity_tokens_per_s": round(most, 1),
            "task_s": round(task_s, 2),
            "alone_ttft_ms_p95": round(1e3 * quiet, 1),
        }
    )
    found: list[tuple[float, float]] = []
    for share in loads:
        rate = share * most / world.output
        run = Run(world, f"load {share}", task_s)
        run.open_loop(rate, tasks / rate)
        ttfts = run.ttfts()
        found.append((p95(ttfts), run.good() / run.now))
        say(
            {
                "load": share,
                "priority_tasks": len(ttfts),
                "ttft_ms_p50": round(1e3 * statistics.median(ttfts), 1),
                "ttft_ms_p95": round(1e3 * p95(ttfts), 1),
                "good_tokens_per_s": round(found[-1][1], 1),
                "step_ms": round(1e3 * run.now / run.steps, 1),
                "refused": run.refused,
            }
        )
    ratio, share = found[-1][0] / quiet, found[-1][1] / max(good for _, good in found)
    say({"priority_ttft": round(ratio, 2), "goodput": round(share, 3)})
    return ratio, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=10.0, help="that a step takes, however little it computes")
    parser.add_argument("--token-ms", type=float, default=3.0, help="that each token adds")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batched-tokens", type=int, default=64)
    parser.add_argument("--max-non-priority-step-tokens", type=int, help="max_non_priority_step_tokens of the engine")
    parser.add_argument("--together", action="store_true", help="as on a GPU: no step is the priority tier's alone")
    parser.add_argument("--without-stages", action="store_true", help="bounds alone, without stages of overload")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, on average")
    parser.add_argument("--output", type=int, default=256, help="tokens, on average")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0, 3.0])
    parser.add_argument("--tasks", type=int, default=2000, help="that come at each load")
    args = parser.parse_args()
    world = World(
        args.step_ms / 1e3,
        args.token_ms / 1e3,
        args.rows,
        args.batched_tokens,
        args.prompt,
        args.output,
        args.max_non_priority_step_tokens,
        exclusive=not args.together,
        stages=not args.without_stages,
    )
    measure(world, args.loads, args.tasks, lambda said: print(json.dumps(said), flush=True))


if __name__ == "__main__":
    main()
