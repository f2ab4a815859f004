"""Time from a request over HTTP to its first token, while no worker is up: with the standby and without.

    python -m tests.bench.cold_start [--rounds 5] [--model MODEL] [--json FILE]

Two systems run (`penstock up --min 0 --max 1`), one with a standby. Each round asks one, then the other, and between
them times a bare `python -c "import torch"`, so that all see the same machine. Phases are the workers' own
(`workers.runtime.cold_start`); `rest` is the decision to start a worker, its spawn, the claim and the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

from tests.workers.cli.running_up import Up
from workers.library import name_of
from workers.trials.bench.connection import Connections

PATIENCE_S: Final = 180.0
#: Memory (bytes) of a standby that has imported torch; and the processor time that it takes while it still imports.
IMPORTED_BYTES: Final = 150 << 20
PHASE: Final = re.compile(r"(\w+) (\d+\.\d+)")


class Timed:
    """One system, and the first tokens that it gave."""

    def __init__(self, data: Path, model: str, *, standby: bool) -> None:
        self.standby, self.name = standby, name_of(model)
        scaling = ("--min", "0", "--max", "1", "--cool-down", "1")
        self.up = Up(data, "--model", model, *scaling, "--log-level", "info", *self._options())
        self.url = self.up.wait_ready().url
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.most_bytes = 0

    def _options(self) -> tuple[str, ...]:
        return ("--standby",) if self.standby else ("--no-standby",)

    def round(self) -> None:
        """Wait until no worker is up and the standby is ready, then time one request."""
        self._until_idle()
        told = len(re.findall("Ready in", self.up.out))
        seconds = first_token(self.url, self.name)
        time.sleep(0.5)  # its output is on its way
        lines = re.findall(r"Ready in ([^\n]+)", self.up.out)
        assert len(lines) == told + 1, f"no worker was started for this request:\n{self.up.out[-3000:]}"
        self.seconds.append(seconds)
        phases = {name: float(value) for name, value in PHASE.findall(lines[-1].partition(":")[2])}
        self.phases.append(phases | {"rest": seconds - sum(phases.values())})

    def _until_idle(self) -> None:
        deadline, used = time.monotonic() + PATIENCE_S, -1.0
        while time.monotonic() < deadline:
            children = self.up.children()
            if "worker" not in children:
                if not self.standby:
                    return
                if "standby" in children:
                    before, used = used, cpu_seconds(children["standby"])
                    taken = resident(children["standby"])
                    if used == before and taken > IMPORTED_BYTES:
                        self.most_bytes = max(self.most_bytes, taken)
                        return
            time.sleep(0.5)
        raise TimeoutError(f"not idle within {PATIENCE_S:g} s:\n{self.up.out[-3000:]}")


def first_token(url: str, model: str = "tiny") -> float:
    """Seconds from a request until its first token."""
    body = {"model": model, "prompt": "def f(x):", "max_tokens": 4, "stream": True, "ignore_eos": True}
    return asyncio.run(_first_event(Connections(url), body))


async def _first_event(connections: Connections, body: dict[str, Any]) -> float:
    async with asyncio.timeout(PATIENCE_S), connections.request("GET", "/livez") as answer:
        await answer.whole()  # the connection is open, as a caller's is
    asked = time.monotonic()
    async with asyncio.timeout(PATIENCE_S), connections.request("POST", "/v1/completions", body) as answer:
        async for events in answer.events():
            if any(json.loads(event.data)["choices"] for event in events):
                return time.monotonic() - asked
    raise AssertionError(f"the stream had no token: {answer.status}")


def bare_import() -> float:
    """Seconds of `python -c "import torch"`, from its start to its end."""
    asked = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - asked


def cpu_seconds(pid: int) -> float:
    """The processor time of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """The memory of a process (bytes)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rounds: int, model: str = "tiny") -> dict[str, Any]:
    """The figures of so many rounds, after one that counts for nothing: it fills the page cache."""
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        systems = []
        for standby in (True, False):
            system = Timed(Path(folder) / str(standby), model, standby=standby)
            stack.callback(system.up.stop, SIGTERM)
            systems.append(system)
        for k in range(rounds + 1):
            for system in systems:
                system.round()
                bare.append(bare_import())
            if k == 0:
                bare.clear()
                for system in systems:
                    system.seconds.clear()
                    system.phases.clear()
        warm, cold = systems
        return {
            "rounds": rounds,
            "bare_import_s": bare,
            "standby_s": warm.seconds,
            "without_s": cold.seconds,
            "standby_phases_s": medians(warm.phases),
            "without_phases_s": medians(cold.phases),
            "standby_mb": warm.most_bytes / 1e6,
            "load": os.getloadavg()[0],
        }


def medians(each: list[dict[str, float]]) -> dict[str, float]:
    """The median of each phase."""
    names = list(dict.fromkeys(name for one in each for name in one))
    return {name: round(statistics.median(one.get(name, 0.0) for one in each), 3) for name in names}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    bare = statistics.median(found["bare_import_s"])
    lines = [
        "| request over HTTP to first token, no worker up | median s | least | most |",
        "| --- | --- | --- | --- |",
    ]
    for name, key in (("with the standby", "standby_s"), ("without", "without_s"), ("bare import", "bare_import_s")):
        times = found[key]
        lines.append(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")
    above = statistics.median(found["without_s"]) - bare
    lines.append(
        f"\nwithout the standby: bare `import torch` {above:+.2f} s; the standby takes {found['standby_mb']:.0f} MB"
    )
    for name in ("standby", "without"):
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found[f"{name}_phases_s"].items())
        lines.append(f"phases, {name}: {phases}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = measure(asked.rounds, asked.model)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
