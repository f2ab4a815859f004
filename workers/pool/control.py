"""Celery's remote control, where its own commands do not know how a Penstock worker works."""

from __future__ import annotations

import json
from typing import Any, Final

from celery.worker.control import control_command, inspect_command, nok

from workers.pool.batch import batch_of

#: Countdown tasks that one answer shows.
SHOWN: Final = 100


def scheduled(state: Any, **_: Any) -> list[dict[str, Any]]:
    """Countdown and ETA tasks, which wait in the broker for all workers of the pool; the soonest 100."""
    payloads = [json.loads(message) for message in batch_of(state.app).scheduled(SHOWN)]
    return [_shown(payload, state.hostname) for payload in payloads if payload["headers"].get("eta")]


def breaker(state: Any, **_: Any) -> dict[str, Any]:
    """State and reason of the worker's breaker, the figures that it goes by, and how it stands among its peers."""
    return batch_of(state.app).breaker()


def fixed(state: Any, n: int = 1, **_: Any) -> dict[str, str]:
    """Refused: the pool is as large as the engine's batch."""
    capacity = batch_of(state.app).capacity
    said: dict[str, str] = nok(
        f"the pool is the engine's batch of {capacity} sequences, which memory was set aside for; "
        "start the worker with another --max-num-seqs"
    )
    return said


def _shown(payload: dict[str, Any], hostname: str) -> dict[str, Any]:
    """One message in the form that Celery shows, with the sender's short form of its arguments."""
    headers, properties = payload["headers"], payload["properties"]
    return {
        "eta": headers["eta"],
        "priority": properties.get("priority"),
        "request": {
            "id": headers["id"],
            "name": headers["task"],
            "args": headers.get("argsrepr"),
            "kwargs": headers.get("kwargsrepr"),
            "type": headers["task"],
            "hostname": hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": properties.get("delivery_info"),
            "worker_pid": None,
        },
    }


inspect_command(alias="dump_schedule")(scheduled)
inspect_command()(breaker)
for name in ("pool_grow", "pool_shrink"):
    control_command(name=name, args=[("n", int)], signature="[N=1]")(fixed)
