"""How often rollouts that judge roll back, and after how many requests: simulated, by the code that judges.

    .venv/bin/python -m tests.bench.rollouts                       # 300 null rollouts, 200 of each kind of candidate
    .venv/bin/python -m tests.bench.rollouts --null 20 --others 5  # in small
    .venv/bin/python -m tests.bench.rollouts --kind "null, on machines that stall" --block 0  # each time counts

Each rollout has the usual plan. Requests come one after another; each draws its version by the step's percentage, its
sizes and its times: lognormal, with heavy tails, and a load that wanders by a factor of 3 and slows both versions.
The baseline fails 0.5% of its tasks, its callers leave 2%, a fifth of its answers is cut off at 256 tokens, 2%
refuse. A quarter of the tasks has a form. On machines that stall each version's workers take STALL times as long for a
moment, every two minutes, whatever their version.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from producers.rollouts.controller import raised
from producers.rollouts.metrics import OF_COPIES, Evidence, Matcher, defaults, findings
from producers.rollouts.operations import checked
from producers.store.fleet.canaries import ALIAS, Canary, Plan

#: Requests in a second; those between two looks at the first step, and later.
RATE: Final = 10.0
LOOKS: Final = (10, 100)
LONGEST: Final = 256
#: How much slower a worker is that is held up; mean time (s) between two such moments.
STALL, BETWEEN_S = 2.0, 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A candidate beside its baseline. `slower`: factor of its times; shares are added to the baseline's."""

    slower: float = 1.0
    fails: float = 0.0
    cut_off: float = 0.0
    empty: float = 0.0
    refuses: float = 0.0
    slow_tail: float = 0.0
    """Share of its tasks that take five times as long."""
    stalls_s: float = 0.0
    """Mean time for which the workers of either version are held up, at different times."""


KINDS: Final = {
    "null": Kind(),
    "null, on machines that stall": Kind(stalls_s=15.0),
    "a fifth faster": Kind(slower=0.8),
    "20% slower": Kind(slower=1.2),
    "5 points more fail": Kind(fails=0.05),
    "5 points are empty": Kind(empty=0.05),
    "5 points more are cut off": Kind(cut_off=0.0625),
    "5 points more refuse": Kind(refuses=0.05),
    "5% take five times as long": Kind(slow_tail=0.05),
    "crashes": Kind(fails=1.0),
    "answers nothing": Kind(empty=1.0),
    "refuses everything": Kind(refuses=1.0),
    "never ends by itself": Kind(cut_off=1.0),
}


class Traffic:
    """Rows of the ledger of a system with both versions. Times are ms."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.draw, self.now = kind, random.Random(seed), 1_000_000.0
        self._load = 0.0
        #: Whether baseline and candidate are held up, and until when (ms).
        self._stalled, self._until = [False, False], [self.now, self.now]

    def rows(self, percent: float, count: int) -> Iterator[dict[str, str]]:
        """The next tasks that end."""
        for _ in range(count):
            self.now += self.draw.expovariate(RATE) * 1000
            self._load = max(-0.6, min(0.6, self._load + self.draw.gauss(0, 0.01)))
            yield self._row(candidate=self.draw.random() * 100 < percent)

    def _row(self, *, candidate: bool) -> dict[str, str]:
        draw, kind = self.draw, self.kind if candidate else Kind()
        factor = kind.slower * math.exp(self._load) * (5 if draw.random() < kind.slow_tail else 1)
        factor *= self._stall(candidate=candidate)
        prompt = int(min(4000, draw.lognormvariate(5, 1)))
        tokens, reason = 1 + int(draw.expovariate(1 / 160)), "stop"
        if tokens >= LONGEST or draw.random() < kind.cut_off:
            tokens, reason = LONGEST, "length"
        if draw.random() < kind.empty:
            tokens, reason = 0, "stop"
        status = (
            "failed" if draw.random() < 0.005 + kind.fails else "cancelled" if draw.random() < 0.02 else "completed"
        )
        first = factor * draw.lognormvariate(4.5, 0.6) * (1 + prompt / 1000)
        ended = first + max(0, tokens - 1) * factor * draw.lognormvariate(3, 0.2)
        created = self.now - ended
        row = {"model": "m", "tier": "default", "status": status, "prompt": prompt, "cached": 0, "output": tokens}
        row |= {"longest": tokens, "deaths": 0, "discarded": 0, "created": int(created), "started": int(created)}
        row |= {"first": int(created + first) if tokens and status != "failed" else "", "ended": int(self.now)}
        row |= {"alias": ALIAS if candidate else "default", "version": "b" if candidate else "a", "drawn": 1}
        row |= {"reasons": f'["{reason}"]' if status == "completed" else ""}
        row |= {"refused": int(draw.random() < 0.02 + kind.refuses), "form": "json_schema" if prompt % 4 == 0 else ""}
        return {name: str(value) for name, value in row.items()}

    def _stall(self, *, candidate: bool) -> float:
        if not self.kind.stalls_s:
            return 1.0
        while self._until[candidate] <= self.now:
            self._stalled[candidate] = not self._stalled[candidate]
            mean_s = self.kind.stalls_s if self._stalled[candidate] else BETWEEN_S
            self._until[candidate] += self.draw.expovariate(1 / mean_s) * 1000
        return STALL if self._stalled[candidate] else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """A rollout's end. `candidate`: requests that the candidate had by then."""

    promoted: bool
    metric: str
    requests: int
    candidate: int
    step: int


def rollout(kind: Kind, seed: int, plan: Plan, most: int = 200_000) -> Result:
    """One rollout, as the controller carries it. After `most` requests it counts as held."""
    traffic = Traffic(kind, seed)
    state = Canary("m", str(seed), "b", "a", checked(plan), 0, "bench", phase="judging")
    state = state.decided("judging", "", 0).acted(int(traffic.now))
    evidence, matcher, requests = Evidence.of("", state), Matcher(state), 0
    while requests < most:
        count = LOOKS[min(state.step, 1)]
        matcher.enter(traffic.rows(state.percent, count), evidence, state.step)
        requests += count
        found = findings(state, evidence)
        if worse := [finding for finding in found if finding.worse]:
            return Result(False, worse[0].settings.metric.name, requests, evidence.candidate.tasks, state.step)
        decision = raised(state, found, evidence.compared(state.step, copies=False), int(traffic.now))
        if decision is not None and decision.phase == "promoted":
            return Result(True, "", requests, evidence.candidate.tasks, state.step)
        if decision is not None:
            state = state.decided(decision.phase, decision.reason, decision.step).acted(int(traffic.now))
    return Result(False, "held", requests, evidence.candidate.tasks, state.step)


def summary(results: list[Result]) -> dict[str, Any]:
    """What became of rollouts of one kind."""
    back = [result for result in results if not result.promoted and result.metric != "held"]
    needed = sorted(result.candidate for result in back)
    named = [result.metric for result in back]
    return {
        "rollouts": len(results),
        "rolled_back": len(back),
        "held": sum(result.metric == "held" for result in results),
        "candidate_requests_median": needed[len(needed) // 2] if needed else None,
        "candidate_requests_most": needed[-1] if needed else None,
        "requests_median": sorted(result.requests for result in back)[len(back) // 2] if back else None,
        "at_first_step": sum(result.step == 0 for result in back),
        "by": {name: named.count(name) for name in sorted(set(named))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--null", type=int, default=300, help="null rollouts")
    parser.add_argument("--others", type=int, default=200, help="rollouts of each other kind")
    parser.add_argument("--first", type=int, default=0, help="leave out as many, which another run has judged")
    parser.add_argument("--kind", choices=KINDS, action="append", help="this kind alone; may be repeated")
    parser.add_argument("--block", type=float, default=Plan().block_s, help="seconds whose times count as one")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    metrics = {metric: values for metric, values in defaults().items() if metric not in OF_COPIES}
    plan = Plan(metrics=metrics, block_s=options.block)
    with ExitStack() as stack:
        each = map if options.processes == 1 else stack.enter_context(ProcessPoolExecutor(options.processes)).map
        for name in options.kind or KINDS:
            count = options.null if name.startswith("null") else options.others
            results = list(each(partial(rollout, KINDS[name], plan=plan), range(options.first, count)))
            print(json.dumps({"candidate": name, **summary(results)}), flush=True)


if __name__ == "__main__":
    main()
