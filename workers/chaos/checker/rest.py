"""Workers at rest: what each says of itself when there is nothing to do.

A lease says what was true when its renewal began: up to a quarter of a lease ago. So nothing is judged by a lease
that stands when the load ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from redis import Redis

#: Figures of a lease that are 0 while its worker has nothing to do.
WORK: Final = ("tasks", "running", "waiting", "kv_blocks_used")
#: A worker that still holds something after so many looks, a pause (s) apart, will not let it go.
LOOKS: Final = 900
PAUSE_S: Final = 0.1
#: The lease that is found, and one that may have been on its way then, say what was before.
_STALE: Final = 2


def held_by(about: dict[str, Any]) -> dict[str, int]:
    """What a worker says that it holds; empty where it is at rest."""
    return {name: about[name] for name in WORK if about.get(name)}


def workers_of(broker: Redis) -> list[dict[str, Any]]:
    """What the workers with a lease say of themselves; `until` is when it ends (ms), another at each renewal."""
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
    """Wait until each worker says that it holds nothing, in a renewal that began after this call. Returns what each
    said last, also of those that hold something after so many looks. `broker`: a client that decodes replies."""
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
