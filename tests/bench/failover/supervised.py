"""A process that keeps one program as `penstock up` keeps its workers, without starting it again: `... ARGV`."""

from __future__ import annotations

import asyncio
import os
import sys

from workers.processes.supervisor import Child, Program


async def main() -> None:
    """Print the program's process id and output until it ends, and its leases are ended."""
    urls = {name: os.environ[name] for name in ("BROKER_URL", "STORE_URL")}
    child = Child(Program("worker", sys.argv[1:], urls, notifies=True), lambda name, line: print(line, flush=True))
    await child.start()
    print(f"process {child.pid}", flush=True)
    assert child.keeper is not None
    await child.keeper
    await child.stop(0.0)


if __name__ == "__main__":
    asyncio.run(main())
