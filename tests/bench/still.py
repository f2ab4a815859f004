"""`python -m tests.bench.still gateway …`: Penstock's command, whose clock SIGUSR1 stops, for counts of instructions.

From then on nothing grows stale, what the process does now and then is put off, and no garbage is collected: what it
runs is what its requests make it run, however slow it is.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time

from workers.cli import main

#: Times longer that pauses are.
LONGER = 100


def stop(*_: object) -> None:
    """Stops the clock."""
    now, sleep = time.monotonic(), asyncio.sleep
    time.monotonic = lambda: now
    asyncio.sleep = lambda delay, result=None: sleep(LONGER * delay, result)
    gc.disable()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, stop)
    main()
