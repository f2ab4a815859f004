"""Ends the leases of a worker process that has ended, so that other workers take its tasks over at once.

Only who has waited for a process (waitpid) knows that it is gone. docs/how/deaths.md has what happens when this process
dies between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

from producers.broker.connect import connect_broker, control_url
from producers.connection.connect import connect_async
from producers.contract import keys


async def end_leases(leases: Sequence[str], env: Mapping[str, str]) -> int:
    """End these incarnations, whose process has ended; `env` has its servers' URLs. Returns the number of deliveries
    that went back to their queues. Raises redis errors, OSError and ValueError; then the leases lapse."""
    broker_url = env["BROKER_URL"]
    store_url = env.get("STORE_URL") or broker_url
    count = 0
    # The store's first: while it stands, CLAIM answers `busy`.
    for url in dict.fromkeys((store_url, control_url(broker_url, store_url))):
        async with connect_async(url) as server:
            await server.delete(*map(keys.lease, leases))
    async with aclosing(connect_broker(broker_url, store_url)) as broker:
        for lease in leases:
            count += max(0, await broker.reap(lease))
    return count
