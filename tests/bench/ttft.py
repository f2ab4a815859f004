"""What queue and HTTP add to the time to first token: `python -m tests.bench.ttft`.

The same prompts, one at a time on an idle system: to the engine directly, and through POST /v1/tasks and its event
stream (gateway process, Valkey, worker process). Both engines run the bundled model with one thread; the two are
measured in turn, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from engine import Engine, EngineConfig, SamplingParams
from engine.request import Event, Request
from tests.processes import ROOT, Worker, free_port, valkey

MODEL = ROOT / "workers" / "models" / "tiny"


def direct(engine: Engine, prompt: str, number: int) -> float:
    """Seconds from the text to its first token."""
    seen = threading.Event()
    first = 0.0

    def on_event(event: Event) -> None:
        nonlocal first
        first = first or time.perf_counter()
        if event.done:
            seen.set()

    assert engine.tokenizer is not None
    start = time.perf_counter()
    ids = engine.tokenizer.encode(prompt)
    engine.submit(Request(f"direct-{number}", ids, SamplingParams(max_tokens=4, temperature=0.0)), on_event)
    seen.wait(30)
    return first - start


def through_http(port: int, prompt: str) -> float:
    """Seconds from the request to the first token event."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0})
    start = time.perf_counter()
    submit = http.client.HTTPConnection("127.0.0.1", port)
    submit.request("POST", "/v1/tasks", body, {"Content-Type": "application/json"})
    task_id = json.load(submit.getresponse())["id"]
    submit.request("GET", f"/v1/tasks/{task_id}/events")
    response = submit.getresponse()
    first = 0.0
    while line := response.readline():
        if line.startswith(b"event: token") and not first:
            first = time.perf_counter()
        if line.startswith(b"event: end"):
            break
    submit.close()
    return first - start


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the gateway did not become ready")


def measure(rounds: int) -> dict[str, float]:
    port = free_port()
    with valkey() as (url, _), Engine.load(Path(MODEL), EngineConfig(threads=1)) as engine:
        command = [sys.executable, "-m", "workers.cli", "gateway", "--broker", url, "--store", url, "--port", str(port)]
        gateway = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        served = {"model": "tiny", "engine_factory": "workers.runtime.serving:load_engine", "engine": {"threads": 1}}
        try:
            with Worker(url, **served) as worker:
                worker.wait_ready()
                wait_for(port)
                pairs = []
                for number in range(rounds + 5):
                    prompt = f"def function_{number}(self, value):\n    "
                    pairs.append((direct(engine, prompt, number), through_http(port, prompt)))
        finally:
            gateway.terminate()
            gateway.wait(20)
    pairs = pairs[5:]  # the first ones warm both up
    engine, through = zip(*pairs, strict=True)
    times = {"engine": engine, "http": through, "added": [http - bare for bare, http in pairs]}
    return {"rounds": rounds} | {
        f"{name}_ms_{part}": 1000 * statistics.quantiles(seconds, n=20, method="inclusive")[place]
        for name, seconds in times.items()
        for part, place in (("p50", 9), ("p95", 18))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    print(json.dumps(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
