"""How an ending goes on that the store refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from workers.flow.finisher import BACK, DEAD, Finisher, _Ending
from workers.state.delivery import Delivery, Incarnation

TASK: dict[str, str | int] = {"task": "{}", "model": "tiny", "version": "v", "n": 1, "tokens": 9}


def test_celery_hears_of_a_task_that_cannot_be_given_back(
    valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told nothing before, as the task was to go on elsewhere."""
    delivery = Delivery("c", "t", Incarnation("w"))
    valkey.set(keys.lease(delivery.incarnation.id), "{}")
    run(valkey, protocol.admit("t", "nonce", 1 << 50, TASK))
    run(valkey, protocol.queued("t"))
    run(valkey, protocol.claim("t", "c", delivery.incarnation.id, keys.Pool("tiny", "v", "f")))
    valkey.hset(keys.task("t"), "given_back", "[1e999]")
    told: list[str] = []
    monkeypatch.setattr(Finisher, "_tell_celery", lambda self, end: told.append(end.status))
    done: dict[str, str] = {}
    deliveries: Any = SimpleNamespace(done=lambda delivery, reason: done.update({delivery.task_id: reason}))
    served: Any = SimpleNamespace(settings=SimpleNamespace(store=valkey_url, max_retries=0))
    unused: Any = None
    finisher = Finisher(served, unused, deliveries, unused, unused)
    finisher._settle([_Ending(delivery, BACK, traced=True, why="drain")])
    assert told == [DEAD]
    assert "its record cannot be used" in done["t"]
    assert valkey.hget(keys.task("t"), "status") == b"failed"
