"""Time from kill -9 of the only worker of `penstock up` to the next token of a stream: with the standby and without.

    python -m tests.bench.takeover [--rounds 5] [--model MODEL] [--json FILE]

Each round streams a long output, kills the worker in the middle, and takes the time until the next token comes. Both
systems run at the same time, and take turns. Beside it: the time from zero to the first token has `cold_start`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.bench.cold_start import IMPORTED_BYTES, PATIENCE_S, PHASE, cpu_seconds, medians, resident
from tests.workers.cli.running_up import Up
from workers.library import name_of
from workers.processes.supervisor import WELL_S
from workers.trials.bench.connection import Connections

#: Tokens of a stream before its worker is killed.
BEFORE: Final = 20


class Timed:
    """One system with one worker, and the gaps that its streams had."""

    def __init__(self, data: Path, model: str, *, standby: bool) -> None:
        self.standby, self.name = standby, name_of(model)
        option = "--standby" if standby else "--no-standby"
        self.up = Up(data, "--model", model, option, "--log-level", "info")
        self.url = self.up.wait_ready().url
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.most_bytes = 0
        self.well_at = time.monotonic() + WELL_S + 1

    def round(self) -> None:
        """Wait until the worker is up and the standby is ready, then kill the worker in the middle of a stream."""
        self._until_ready()
        told = len(re.findall("Ready in", self.up.out))
        self.seconds.append(asyncio.run(self._gap()))
        self.well_at = time.monotonic() + WELL_S + 1
        time.sleep(0.5)  # its output is on its way
        lines = re.findall(r"Ready in ([^\n]+)", self.up.out)
        assert len(lines) > told, self.up.out[-3000:]
        self.phases.append({name: float(value) for name, value in PHASE.findall(lines[-1].partition(":")[2])})

    async def _gap(self) -> float:
        connections = Connections(self.url)
        body = {"model": self.name, "prompt": "def f(x):", "max_tokens": 400, "stream": True, "ignore_eos": True}
        seen, killed = 0, 0.0
        async with (
            asyncio.timeout(PATIENCE_S),
            connections.request("POST", "/v1/completions", body) as answer,
        ):
            async for events in answer.events():
                tokens = sum(1 for event in events if event.data != "[DONE]" and json.loads(event.data)["choices"])
                if killed and tokens and time.monotonic() - killed > 0.05:  # else it was on its way
                    return time.monotonic() - killed
                seen += tokens
                if seen >= BEFORE and not killed:
                    (worker,) = self.up.workers()
                    os.kill(worker, signal.SIGKILL)
                    killed = time.monotonic()
        raise AssertionError("the stream ended")

    def _until_ready(self) -> None:
        time.sleep(max(0.0, self.well_at - time.monotonic()))  # one that dies sooner is thought to die again
        deadline, used = time.monotonic() + PATIENCE_S, -1.0
        while time.monotonic() < deadline:
            children = self.up.children()
            if not self.standby:
                if "worker" in children:
                    return
            elif "standby" in children and "worker" in children:
                before, used = used, cpu_seconds(children["standby"])
                taken = resident(children["standby"])
                if used == before and taken > IMPORTED_BYTES:
                    self.most_bytes = max(self.most_bytes, taken)
                    return
            time.sleep(0.5)
        raise TimeoutError(f"not ready within {PATIENCE_S:g} s:\n{self.up.out[-3000:]}")


def measure(rounds: int, model: str) -> dict[str, Any]:
    """The figures of so many rounds."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        systems = []
        for standby in (True, False):
            system = Timed(Path(folder) / str(standby), model, standby=standby)
            stack.callback(system.up.stop, signal.SIGTERM)
            systems.append(system)
        for _ in range(rounds):
            for system in systems:
                system.round()
        warm, cold = systems
        return {
            "rounds": rounds,
            "standby_s": warm.seconds,
            "without_s": cold.seconds,
            "standby_phases_s": medians(warm.phases),
            "without_phases_s": medians(cold.phases),
            "standby_mb": warm.most_bytes / 1e6,
            "load": os.getloadavg()[0],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.rounds, args.model)
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    for name in ("standby_s", "without_s"):
        seconds = figures[name]
        print(
            f"{name:10} median {statistics.median(seconds):.2f}, least {min(seconds):.2f}, most {max(seconds):.2f}  "
            f"{figures[name.replace('_s', '_phases_s')]}"
        )
    print(f"standby {figures['standby_mb']:.0f} MB, load {figures['load']:.1f}")


if __name__ == "__main__":
    main()
