"""Kill a worker between every two adjacent calls to broker or store, and lose each reply.

    python -m tests.chaos.kill_between_calls           # each distinct pair of adjacent calls, each kind in each way
    python -m tests.chaos.kill_between_calls --all     # each call of a run, struck in each way

"drained" are runs in which the worker is told to stop in the midst of its work.

Prints a report as JSON and exits with 1 where any run ended otherwise than it must.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.chaos.calls import Call
from tests.chaos.strike import Lane, Outcome
from tests.chaos.tap import MODES, Aim, Mode


@dataclass(slots=True)
class Tally:
    """What a number of runs found."""

    runs: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    """Kinds of adjacent calls between which, or at the second of which, a run was struck."""
    faults: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        place = "with no strike"
        if outcome.struck:
            mode, call = outcome.struck
            before, kind = pair = outcome.pairs[call.number - 1]
            self.struck[mode] += 1
            self.pairs.add(pair)
            place = f"{mode} call {call.number}, {kind} after {before}"
        for fault in outcome.faults:
            self.faults.append(f"{place}: {fault}")
        if outcome.faults:
            print(f"FAILED {place}: {outcome.faults}", *outcome.logs, sep="\n", file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        return {"runs": self.runs, "struck": dict(self.struck), "pairs": len(self.pairs), "faults": self.faults}


class Pairs:
    """Strikes at each pair of adjacent kinds once, and at each kind in each way: at the first one not struck before."""

    def __init__(self) -> None:
        self._pairs: set[tuple[str, str]] = set()
        self._strikes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def aims(self) -> Iterator[Aim]:
        return itertools.repeat(self._judge)

    def _judge(self, previous: Call | None, call: Call) -> Mode | None:
        pair = (previous.kind if previous else "start", call.kind)
        with self._lock:
            strikes = self._strikes[call.kind]
            if pair in self._pairs and strikes >= len(MODES):
                return None
            self._pairs.add(pair)
            self._strikes[call.kind] += 1
            return MODES[strikes % len(MODES)]


class Numbers:
    """Strikes at call 1, 2, 3, ... in one way, a run each."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def aims(self) -> Iterator[Aim]:
        for number in itertools.count(1):
            yield partial(self._judge, number)

    def _judge(self, number: int, previous: Call | None, call: Call) -> Mode | None:
        return self._mode if call.number == number else None


def strike(aims: Iterator[Aim], *, lanes: int, drained: bool) -> Tally:
    """Run after run, until one goes through without a strike; `lanes` runs beside each other."""
    tally, lock = Tally(), threading.Lock()
    over = threading.Event()

    def work() -> None:
        with Lane() as lane, contextlib.ExitStack() as stack:
            stack.callback(over.set)  # also where a run raises
            while not over.is_set():
                with lock:
                    aim = next(aims)
                outcome = lane.run(aim, drained)
                with lock:
                    tally.add(outcome)
                if outcome.struck is None:
                    return

    with ThreadPoolExecutor(lanes) as pool:
        for future in [pool.submit(work) for _ in range(lanes)]:
            future.result()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every call, before, after and with its reply lost")
    parser.add_argument("--lanes", type=int, default=2, help="runs beside each other (default: 2)")
    args = parser.parse_args()
    ways: dict[str, Pairs | Numbers] = {"pairs": Pairs()}
    if args.all:
        ways = {mode: Numbers(mode) for mode in MODES}
    report: dict[str, Any] = {}
    for (name, way), drained in itertools.product(ways.items(), (False, True)):
        started = time.monotonic()
        tally = strike(way.aims(), lanes=args.lanes, drained=drained)
        title = f"{name}, drained" if drained else name
        report[title] = tally.report() | {"seconds": round(time.monotonic() - started, 1)}
        print(f"{title}: {tally.runs} runs, {len(tally.faults)} faults", file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))
    sys.exit(1 if any(part["faults"] for part in report.values()) else 0)


if __name__ == "__main__":
    main()
