"""A gateway is killed, and its readers come back: to another port, or to the same one once it is started again."""

from __future__ import annotations

import asyncio
import random
import signal
import time

from tests.bench.failover.load import Load
from tests.bench.failover.system import PATIENCE_S, System

#: Time (s) in which readers that can come back have done so.
BACK_S = 3.0


async def kill_gateway(system: System, load: Load) -> list[float]:
    """Kill the gateway that has the readers: for each, the time (s) from its reconnect to its first event."""
    await asyncio.sleep(random.uniform(0.5, 2.0))
    streams = [stream for stream in load.open if stream.came]
    port = load.ports[0]
    began = time.monotonic()
    system.gateways[port].signal(signal.SIGKILL)
    system.gateways[port].popen.wait(PATIENCE_S)
    load.ports.append(load.ports.pop(0))  # new readers begin at the next one
    if len(load.ports) > 1:
        await asyncio.sleep(BACK_S)
    await asyncio.to_thread(system.add_gateway, port)
    await asyncio.sleep(BACK_S)
    return [first - tried for stream in streams for tried, first in stream.returns if tried > began]
