"""`penstock sweeper`: a real process, and what it tells probes."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack

from redis import Redis

from producers.contract import keys
from tests.receiver import Process


def test_one_that_leads_and_one_that_stands_by_are_ready_and_end_in_order(valkey: Redis, valkey_url: str) -> None:
    with ExitStack() as stack:
        two = {
            name: stack.enter_context(
                Process(
                    *("workers.cli", "sweeper", "--lease", "3", "--health-port", "0", "--name", name),
                    BROKER_URL=valkey_url,
                )
            )
            for name in "ab"
        }
        for process in two.values():
            told = process.until(lambda: re.search(r"/livez and /readyz on port (\d+)", process.log.read_text()))  # noqa: B023 - called at once
            url = f"http://127.0.0.1:{told[1]}"
            process.until(lambda: "lead" in process.log.read_text())  # noqa: B023
            with urllib.request.urlopen(f"{url}/readyz") as answer:
                assert json.load(answer) == {"status": "ready"}
            with urllib.request.urlopen(f"{url}/livez") as answer:
                assert json.load(answer) == {"status": "ok"}
        leader = two["a"].until(lambda: valkey.get(keys.SWEEPER)).decode()
        other = "b" if leader == "a" else "a"
        assert two[leader].stop() == 0
        two[other].until(lambda: valkey.get(keys.SWEEPER) == other.encode())
        assert two[other].stop() == 0
