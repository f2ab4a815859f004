"""`penstock up --min 0`: no worker, as many as tasks need, none again; and nothing is lost on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL
from typing import Any

import openai
import pytest

from tests.waiting import PATIENCE_S, until
from tests.workers.cli.running_up import Up, task
from workers.cli.client import Gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Streams at a time: far more than one worker runs, and more than it does in the 2 s that a task may wait.
STREAMS = 24
#: Tokens of short and of long tasks.
SHORT, LONG = 40, 900


def stream(gateway: Gateway, seed: int, tokens: int) -> list[dict[str, Any]]:
    """A task's events, read as they come, over one connection."""
    task_id = gateway.submit(task(max_tokens=tokens, seed=seed))["id"]
    return list(gateway.events(task_id, patience=0.0))


def test_workers_come_with_the_tasks_and_go_without_them(up: Callable[..., Up]) -> None:
    # The drain is short: workers that end under load hand tasks back, and their streams go on elsewhere.
    system = up("--min", "0", "--max", "2", "--cool-down", "1", "--drain-timeout", "0.1", "--max-num-seqs", "1")
    gateway = system.wait_ready()
    until(lambda: "stops it." in system.out)
    assert "workers 0 now; up to 2" in system.out
    assert "Ready in" not in system.out
    until(lambda: set(system.children()) == {"valkey", "gateway", "sweeper", "webhooks", "standby"})

    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny", prompt="def f(x):", max_tokens=8, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    until(lambda: "worker" not in system.children())

    up_at_most: list[int] = []
    done = threading.Event()
    watch = threading.Thread(target=lambda: _watch(system, up_at_most, done), daemon=True)
    watch.start()
    late = time.monotonic() + PATIENCE_S

    def streams(seed: int) -> list[list[dict[str, Any]]]:
        """One task after another until two workers were up, however fast they are."""
        found = [stream(gateway, seed, SHORT if seed % 4 else LONG)]
        while max(up_at_most, default=0) < 2 and time.monotonic() < late:
            found.append(stream(gateway, seed, SHORT if seed % 4 else LONG))
        return found

    with ThreadPoolExecutor(STREAMS) as pool:
        every = list(pool.map(streams, range(STREAMS)))
    done.set()
    watch.join()
    for seed, found in enumerate(every):
        for *tokens, end in found:
            assert end["event"] == "end"
            assert [one["position"] for one in tokens] == list(range(SHORT if seed % 4 else LONG))
    assert max(up_at_most) == 2

    gateway.submit(task(max_tokens=LONG))
    until(lambda: "worker" in system.children())
    assert system.stop(SIGKILL) == -SIGKILL
    assert system.nothing_left()


def _watch(system: Up, counts: list[int], done: threading.Event) -> None:
    while not done.wait(0.1):
        counts.append(len(system.workers()))
