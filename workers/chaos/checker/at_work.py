"""A worker at work: the streams that wait for it, which a fault is about to make wait longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

#: The task ids of deliveries, by a pattern of the keys that hold them.
_FETCHED = """
local found = {}
for _, name in ipairs(redis.call('KEYS', ARGV[1])) do
  for _, packed in ipairs(redis.call('HVALS', name)) do
    found[#found + 1] = cmsgpack.unpack(packed)[3]
  end
end
return found
"""


def at_work(broker: Redis, store: Redis, process: str, open_tasks: Iterable[str]) -> dict[str, Any]:
    """The streams that wait for a worker to go on, each with its length, and for how long its lease holds (s).

    Of those that it has fetched and not claimed yet, those that have a token: an earlier worker made it, and its
    readers wait for the next one. `open_tasks`: ids of tasks that have not ended. Both clients decode replies.
    """
    try:
        fetched = set(map(str, broker.eval(_FETCHED, 0, f"penstock:inflight:{process}.*")))
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
