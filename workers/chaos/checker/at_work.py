"""The streams that a worker is producing, and that a fault is about to stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

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
