"""Does anything leak? A gateway, two workers and a sweeper under a mixed load, for as long as is asked.

    python -m tests.fuzz.soak --minutes 20 --write soak

Good requests, left and cancelled ones, fuzzed HTTP and fuzzed messages come in rounds (`soak_load`). After each round
everything is left to end; then what each process holds is sampled (`watch`): memory, open files, threads, KV blocks
in use, and the server's memory and keys. What goes on growing after the warm-up is a leak (`growth`), a KV block in
use by nobody is one at once. Keys that live for a day live for a minute here, so that their number can come to rest;
dead letters are taken off the list, as an operator does. Prints a table (Markdown) and a report (JSON; also to
NAME.md and NAME.json); exits with 1 for a leak, or for anything that is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from tests.fuzz.growth import Growth, judge
from tests.fuzz.on_http import BOOT_S, ENGINE, MODEL, SMALL_CACHES, House
from tests.fuzz.soak_load import SoakLoad
from tests.fuzz.watch import held, server
from tests.processes import ROOT, Worker, running_valkey
from workers.trials.chaos.checker.rest import at_rest, held_by

MIB = 1 << 20
#: Growth over the judged time that is no leak, by quantity; of memory: what allocators and caches still take.
ALLOWED = {
    "gateway memory": 8 * MIB,
    "worker memory": 12 * MIB,
    "sweeper memory": 4 * MIB,
    "server memory": 2 * MIB,
    "files": 2,
    "threads": 2,
    "lasting keys": 4,
    "keys": 40,
    "index entries": 4,
    "KV blocks": 0,
}
#: No round waits longer (s) for its end.
PATIENCE_S = 180.0
#: For a request to come in: who sends it may have to wait for a processor between connecting and sending.
RECEIVE_S = 10.0
#: How long a key may live between two rounds (s).
LIFE_S = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds`: so many at least. `drawn`: fuzzed examples of each kind. `plugins`: of each worker, functions that it
    calls before it starts."""

    seconds: float
    rounds: int = 20
    round_s: float = 12.0
    each: int = 15
    drawn: int = 2000
    seed: int = 1
    lease: float = 10.0
    plugins: tuple[str, ...] = ("", "")


@dataclass(slots=True)
class Soaked:
    """`samples`: (seconds, value) by quantity, as `process thing`."""

    plan: Plan
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def judged(self) -> dict[str, Growth]:
        return {name: judge(series, allowed_for(name)) for name, series in self.samples.items()}

    @property
    def leaking(self) -> list[str]:
        return [name for name, growth in self.judged().items() if growth.leaks]

    def report(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan),
            "seconds": round(self.seconds, 1),
            "counts": self.counts,
            "leaking": self.leaking,
            "faults": self.faults,
            "growth": {name: asdict(growth) for name, growth in self.judged().items()},
            "samples": self.samples,
        }

    def table(self) -> str:
        lines = [
            "| quantity, when idle | after the warm-up | at the end | an hour (Sen's slope) | of that certain | leak |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for name, growth in self.judged().items():
            unit = MIB if "memory" in name else 1
            suffix = " MiB" if "memory" in name else ""
            numbers = (growth.start, growth.end, growth.an_hour, growth.at_least * 3600)
            shown = " | ".join(f"{number / unit:,.1f}{suffix}" for number in numbers)
            lines.append(f"| {name} | {shown} | {'**yes**' if growth.leaks else 'no'} |")
        return "\n".join(lines)


def allowed_for(name: str) -> float:
    """By the end of its name: `worker 1 files` is a number of files."""
    plain = " ".join(word for word in name.split() if not word.isdecimal())
    return next(limit for thing, limit in ALLOWED.items() if plain.endswith(thing))


class Soak:
    """The processes, and what is seen of them."""

    def __init__(self, plan: Plan, url: str) -> None:
        self._plan = plan
        self._redis = Redis.from_url(url)
        self._text = Redis.from_url(url, decode_responses=True)
        self._said: list[dict[str, Any]] = []
        self.house = House(url, plan.lease, plan.plugins[0], RECEIVE_S)
        argv = [sys.executable, "-m", "workers.cli", "sweeper", "--broker", url, "--log-level", "warning"]
        self._sweeper = subprocess.Popen(argv, cwd=ROOT)
        self._more = [
            Worker(
                url,
                model=MODEL,
                engine_factory="workers.runtime.worker:load_engine",
                engine=ENGINE,
                lease=plan.lease,
                LOG_LEVEL="ERROR",
                WORKER_PLUGINS=plugin,
                **SMALL_CACHES,
            )
            for plugin in plan.plugins[1:]
        ]
        self.soaked = Soaked(plan)

    def run(self, url: str) -> None:
        plan, soaked = self._plan, self.soaked
        self.house.wait_ready()
        for worker in self._more:
            worker.wait_ready(BOOT_S)
        load = SoakLoad(url, self.house.port, MODEL, self.house.known(), self.house.tasks(), plan.seed, plan.drawn)
        began = time.monotonic()
        rounds = 0
        while time.monotonic() - began < plan.seconds or rounds < plan.rounds:
            asyncio.run(load.round(plan.round_s, plan.each))
            self._until_idle(load)
            self._sample(time.monotonic() - began)
            self._tidy(load)
            rounds += 1
            dead = [process.pid for process in self._processes().values() if process.poll() is not None]
            if dead or len(soaked.faults) > 50:
                soaked.faults.append(f"processes died: {dead}")
                break
            print(f"{time.monotonic() - began:.0f} s, {len(load.faults)} faults", file=sys.stderr, flush=True)
        soaked.seconds = time.monotonic() - began
        soaked.counts = {"rounds": rounds, "fuzzed requests": load.found.sent, **load.counts}
        soaked.faults += load.faults
        load.close()

    def _processes(self) -> dict[str, subprocess.Popen[bytes]]:
        workers = [self.house.worker, *self._more]
        found: dict[str, Any] = {"gateway": self.house.gateway, "sweeper": self._sweeper}
        return found | {f"worker {number}": worker.process for number, worker in enumerate(workers, 1)}

    def _until_idle(self, load: SoakLoad) -> None:
        deadline = time.monotonic() + PATIENCE_S
        why = "messages"
        while time.monotonic() < deadline:
            if load.ends.quiet():
                self._said = at_rest(self._text)
                busy = list(filter(held_by, self._said))
                if self._said and not busy and not self._redis.exists("penstock:readers"):
                    return
                why = f"workers that say {busy}, or readers"
            time.sleep(0.05)
        self.soaked.faults.append(f"no rest within {PATIENCE_S} s for {why}: {load.ends.left()!r:.3000}")

    def _sample(self, at: float) -> None:
        def add(name: str, value: float) -> None:
            self.soaked.samples.setdefault(name, []).append((round(at, 2), value))

        for name, process in self._processes().items():
            now = held(process.pid)
            add(f"{name} memory", now.memory)
            add(f"{name} files", now.files)
            add(f"{name} threads", now.threads)
        add("KV blocks", sum(one["kv_blocks_used"] for one in self._said))
        state = server(self._redis)
        add("server memory", state.memory)
        add("keys", state.keys)
        add("lasting keys", state.lasting)
        add("index entries", state.entries)

    def _tidy(self, load: SoakLoad) -> None:
        """A day becomes a minute; dead letters, and what waits for years, are taken away."""
        load.ends.of([])
        names: Sequence[bytes] = list(self._redis.scan_iter(count=1000))
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.ttl(name)
        for name, left in zip(names, pipe.execute(), strict=True):
            if left > LIFE_S:
                pipe.expire(name, LIFE_S)
        pipe.execute()

    def close(self) -> None:
        self.soaked.faults += self.house.close()
        self._sweeper.terminate()
        for worker in self._more:
            worker.process.terminate()
        for process in (self._sweeper, *(worker.process for worker in self._more)):
            try:
                if code := process.wait(60):
                    self.soaked.faults.append(f"a process exited with {code}")
            except subprocess.TimeoutExpired:
                process.kill()
                self.soaked.faults.append("a process did not stop")
        for worker in self._more:
            worker.log.unlink()
        self._redis.close()
        self._text.close()


def soak(plan: Plan) -> Soaked:
    with running_valkey() as valkey:
        url = f"redis://127.0.0.1:{valkey.port}/0"
        made = Soak(plan, url)
        try:
            made.run(url)
        finally:
            made.close()
    return made.soaked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="a name: NAME.md and NAME.json are written")
    args = parser.parse_args()
    soaked = soak(Plan(args.minutes * 60, seed=args.seed))
    report, table = json.dumps(soaked.report(), indent=1), soaked.table()
    if args.write is not None:
        args.write.with_suffix(".json").write_text(report)
        args.write.with_suffix(".md").write_text(table + "\n")
    print(table, file=sys.stderr)
    print(report)
    sys.exit(1 if soaked.leaking or soaked.faults else 0)


if __name__ == "__main__":
    main()
