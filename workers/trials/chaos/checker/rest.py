"""Reads the leases of idle workers, and what a worker is at work on.

A lease holds what was true when its renewal began, up to a quarter of a lease ago. So a lease from before the load's
end proves nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError

#: Figures of a lease that are 0 while its worker has nothing to do.
WORK: Final = ("tasks", "running", "waiting", "kv_blocks_used")
#: Number of looks, PAUSE_S apart, after which a worker that still holds something has leaked it.
LOOKS: Final = 900
PAUSE_S: Final = 0.1
#: Leases that are older than this call: the one that is found, and one that was on its way.
_STALE: Final = 2
#: Lua: the task ids of the deliveries in all hashes whose key matches ARGV[1], of a broker on Redis or on SQS.
_FETCHED = """
local found = {}
for _, name in ipairs(redis.call('KEYS', 'penstock:inflight:' .. ARGV[1])) do
  for _, packed in ipairs(redis.call('HVALS', name)) do
    found[#found + 1] = cmsgpack.unpack(packed)[3]
  end
end
for _, name in ipairs(redis.call('KEYS', 'penstock:sqs:inflight:' .. ARGV[1])) do
  for _, entry in ipairs(redis.call('HVALS', name)) do
    found[#found + 1] = cjson.decode(entry).id
  end
end
return found
"""


def held_by(lease: dict[str, Any]) -> dict[str, int]:
    """The figures that a worker's lease reports as held; empty for an idle worker."""
    return {name: lease[name] for name in WORK if lease.get(name)}


def workers_of(broker: Redis) -> list[dict[str, Any]]:
    """The contents of all workers' leases. `until`: the lease's end (ms), which changes at each renewal."""
    leases = []
    for name in broker.scan_iter("penstock:lease:*", count=1000):
        with broker.pipeline() as pipe:
            pipe.get(name)
            pipe.pexpiretime(name)
            lease, until = pipe.execute()
        if lease:
            leases.append({**json.loads(lease), "incarnation": name.removeprefix("penstock:lease:"), "until": until})
    return leases


def at_rest(broker: Redis, *, looks: int = LOOKS, pause: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Wait until each worker reports itself idle in a renewal that began after this call, or `looks` are over.

    Returns each worker's last report. `broker`: a client that decodes replies.
    """
    written: dict[str, set[int]] = {}
    while True:
        workers = workers_of(broker)
        for lease in workers:
            written.setdefault(lease["incarnation"], set()).add(lease["until"])
        fresh = [lease for lease in workers if len(written[lease["incarnation"]]) > _STALE]
        looks -= 1
        if looks <= 0 or (len(fresh) == len(workers) and not any(map(held_by, fresh))):
            return fresh
        pause(PAUSE_S)


def at_work(broker: Redis, store: Redis, process: str, open_tasks: Iterable[str]) -> dict[str, Any]:
    """The streams that a worker produces -> their lengths, and the seconds left of its lease.

    They include tasks that it has fetched but not claimed, if they have tokens: an earlier worker made those, and their
    readers wait for more. `open_tasks`: ids of tasks that have not ended. Both clients decode replies.
    """
    try:
        fetched = set(map(str, broker.eval(_FETCHED, 0, f"{process}.*")))
        pipe, ids = store.pipeline(transaction=False), sorted({*open_tasks, *fetched})
        for task_id in ids:
            pipe.hmget(f"penstock:task:{task_id}", "owner", "end")
            pipe.xlen(f"penstock:stream:{task_id}")
        answers = pipe.execute()
        leases = [store.pttl(name) for name in store.scan_iter(f"penstock:lease:{process}.*", count=1000)]
    except RedisError:
        return {"stopped": {}}
    stopped = {
        task_id: length
        for task_id, (owner, end), length in zip(ids, answers[::2], answers[1::2], strict=True)
        if end is None and (str(owner).startswith(f"{process}.") or (task_id in fetched and length))
    }
    return {"stopped": stopped, "lease_left": max(leases, default=0) / 1000}
