"""Time from the start of `penstock up` to the first token over HTTP, and what it says of its phases.

    python -m tests.bench.startup [--model tiny] [--model DIR] [--rounds 3] [--cold] [--json FILE]

Each round starts and stops one system for each model, and between them times a bare `python -c "import torch"`, so
that all see the same machine. It prints the least and the median of each figure. `--cold`: before each start, the
kernel is told to forget what it has read of this Python's files and the model's (posix_fadvise). It keeps files that
other processes use, so nothing else may run from the same environment; how much stayed cannot be asked cheaply, but the
bare import shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

from tests.bench.cold_start import PATIENCE_S, PHASE, bare_import, first_token
from tests.waiting import until
from tests.workers.cli.running_up import Up

STARTED: Final = re.compile(r"^  start   (.*)$", re.MULTILINE)
WORKER: Final = re.compile(r"worker: Ready in (.*)$", re.MULTILINE)


def start(model: str) -> dict[str, float]:
    """Seconds until the first token, and those of each phase; `worker` goes before a worker's own."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        up = Up(Path(folder), "--model", model)
        try:
            url = until(partial(ready_at, up), PATIENCE_S)
            ready = time.monotonic() - began
            first_token(url, Path(model).name)
            found = {"first token": time.monotonic() - began, "ready": ready}
            time.sleep(0.5)  # its output is on its way
            for who, pattern in (("", STARTED), ("worker ", WORKER)):
                said = pattern.findall(up.out)[-1].partition(":")[2]
                found |= {who + phase: float(seconds) for phase, seconds in PHASE.findall(said)}
            return found
        finally:
            up.stop(SIGTERM)


def ready_at(up: Up) -> str:
    """Its URL; empty until it is ready."""
    assert up.process.poll() is None, up.out
    said = re.search(r"ready at (http://\S+)", up.out)
    return "" if said is None else said[1]


def forget(folders: Iterable[Path]) -> None:
    """Drop the folders' files from the page cache, where no process uses them."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(models: list[str], rounds: int, cold: bool) -> dict[str, Any]:
    """The figures of each model and of the bare import: a list of rounds each."""
    own = [Path(sys.prefix), Path(__file__).parents[2] / "engine", Path(__file__).parents[2] / "workers" / "models"]
    found: dict[str, Any] = {"load": os.getloadavg()[0], "bare import": [], **{model: [] for model in models}}
    for _ in range(rounds):
        for model in models:
            folders = [*own, Path(model)] if cold else []
            forget(folders)
            found["bare import"].append(bare_import())
            forget(folders)
            found[model].append(start(model))
    return found


def table(found: dict[str, Any]) -> str:
    """The least and the median of each figure as text."""
    lines = [f"bare import of torch: {_shown(found['bare import'])} s; load {found['load']:.1f} before"]
    for model, rounds in found.items():
        if model in ("load", "bare import"):
            continue
        firsts = [each["first token"] for each in rounds]
        above = [middle(firsts) - middle(found["bare import"]) for middle in (min, statistics.median)]
        lines.append(f"{Path(model).name}: above the bare import {above[0]:+.2f}, {above[1]:+.2f} s; s of each: ")
        lines[-1] += "; ".join(f"{name} {_shown([each[name] for each in rounds])}" for name in rounds[0])
    return "\n".join(lines)


def _shown(seconds: list[float]) -> str:
    return f"{min(seconds):.2f}, {statistics.median(seconds):.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = measure(asked.model or ["tiny"], asked.rounds, asked.cold)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
