"""What metrics, logs and traces cost together, in turns.

    python -m tests.bench.observed [--rounds 5] [--tasks 400] [--model tiny] [--json FILE]

Two systems of `penstock up` run beside each other. One logs warnings alone, sends no trace and is not scraped. The
other logs JSON at the level info, sends a tenth of all traces to a collector, and a scraper reads its /metrics every
five seconds of its turn. In each round both do the same tasks, one after the other. What is compared is the processor
time of all processes of a system, the store included, which does not depend on what else the machine does. The
collector's own is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from tests.collector import Collector
from tests.workers.cli.running_up import Up

CLIENTS: Final = 8
SCRAPE_S: Final = 5.0
TICK: Final = os.sysconf("SC_CLK_TCK")
#: The environment of the system that is watched, beside the collector's.
WATCHED: Final = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
    "PENSTOCK_LOG_FORMAT": "json",
}


def processor_s(root: int) -> float:
    """Processor time of a process and of all below it, those that have ended included."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(name))
            times[int(name)] = sum(map(int, fields[11:15])) / TICK
    waiting, total = [root], 0.0
    while waiting:
        pid = waiting.pop()
        total += times.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total


def turn(up: Up, url: str, model: str, tasks: int, scrape: bool) -> float:
    """Milliseconds of processor time a task."""
    ended = threading.Event()

    def scraping() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while True:
                http.get("/metrics").raise_for_status()
                if ended.wait(SCRAPE_S):
                    return

    scraper = threading.Thread(target=scraping)
    before = processor_s(up.process.pid)
    if scrape:
        scraper.start()
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(CLIENTS) as pool:
        body = {"model": model, "prompt": "def f(x):", "max_tokens": 32, "ignore_eos": True}
        for answer in pool.map(lambda _: http.post("/v1/completions", json=body), range(tasks)):
            answer.raise_for_status()
    ended.set()
    if scrape:
        scraper.join()
    time.sleep(4)  # the spans of the last tasks are made
    return 1000 * (processor_s(up.process.pid) - before) / tasks


def measured(rounds: int, tasks: int, model: str) -> list[tuple[float, float]]:
    """Of each round: without and with."""
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())

        def started(*options: str, **environment: str) -> tuple[Up, str]:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            os.environ.update(environment)
            up = Up(data, "--model", model, "--workers", "1", "--no-standby", *options)
            stack.callback(up.stop)
            url = up.wait_ready().url
            for name in environment:
                del os.environ[name]
            return up, url

        plain = started("--log-level", "warning")
        spans = {
            name: value
            for name, value in collector.environment().items()
            if "SCHEDULE" not in name and "INTERVAL" not in name
        }
        watched = started("--log-level", "info", **spans, **WATCHED)
        time.sleep(15)  # whatever begins has begun

        def run(watch: bool) -> float:
            return turn(*(watched if watch else plain), model, tasks, watch)

        for watch in (False, True):  # the first tasks take longer
            run(watch)
        results = []
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            times = {watch: run(watch) for watch in order}
            results.append((times[False], times[True]))
        print(f"{len(collector.spans)} spans came to the collector")
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=400, help="of each turn")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rounds = measured(options.rounds, options.tasks, options.model)
    for without, watched in rounds:
        print(f"{without:.2f} ms a task without, {watched:.2f} ms with: {watched / without - 1:+.1%}")
    share = statistics.median(watched / without for without, watched in rounds) - 1
    print(f"median: {share:+.1%} of the processor time")
    if options.json is not None:
        figures: dict[str, Any] = {"rounds": rounds, "share": share}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
