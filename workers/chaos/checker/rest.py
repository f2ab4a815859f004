"""Reads the leases of idle workers.

A lease holds what was true when its renewal began, up to a quarter of a lease ago. So a lease from before the load's
end proves nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from redis import Redis

#: Figures of a lease that are 0 while its worker has nothing to do.
WORK: Final = ("tasks", "running", "waiting", "kv_blocks_used")
#: Number of looks, PAUSE_S apart, after which a worker that still holds something has leaked it.
LOOKS: Final = 900
PAUSE_S: Final = 0.1
#: Leases that are older than this call: the one that is found, and one that was on its way.
_STALE: Final = 2


def held_by(about: dict[str, Any]) -> dict[str, int]:
    """The figures that a worker's lease reports as held; empty for an idle worker."""
    return {name: about[name] for name in WORK if about.get(name)}


def workers_of(broker: Redis) -> list[dict[str, Any]]:
    """The contents of all workers' leases. `until`: the lease's end (ms), which changes at each renewal."""
    found = []
    for name in broker.scan_iter("penstock:lease:*", count=1000):
        with broker.pipeline() as pipe:
            pipe.get(name)
            pipe.pexpiretime(name)
            about, until = pipe.execute()
        if about:
            found.append({**json.loads(about), "incarnation": name.removeprefix("penstock:lease:"), "until": until})
    return found


def at_rest(broker: Redis, *, looks: int = LOOKS, pause: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Wait until each worker reports itself idle in a renewal that began after this call, or `looks` are over.

    Returns each worker's last report. `broker`: a client that decodes replies.
    """
    written: dict[str, set[int]] = {}
    while True:
        workers = workers_of(broker)
        for about in workers:
            written.setdefault(about["incarnation"], set()).add(about["until"])
        fresh = [about for about in workers if len(written[about["incarnation"]]) > _STALE]
        looks -= 1
        if looks <= 0 or (len(fresh) == len(workers) and not any(map(held_by, fresh))):
            return fresh
        pause(PAUSE_S)
