"""A gateway process to be measured, and what it used; for the benches of HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from tests.processes import ROOT, Worker, free_port
from workers.cli.client import Gateway

GATEWAY = ("-m", "workers.cli", "gateway")


@contextmanager
def serving(*argv: str, port: int, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A server process on this port, once it is ready; SIGTERM at the end. `under`: the command that runs it."""
    command, client = [*under, sys.executable, *argv, "--port", str(port)], Gateway(f"http://127.0.0.1:{port}")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not client.ready():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(argv)} did not become ready")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def gateway(url: str, *argv: str, under: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """A gateway's port and process id. The store has the card of the model `stub`. `argv`, `under`: as of `serving`."""
    with Worker(url, STUB_SEQS="512") as worker:
        worker.wait_ready()
        port = free_port()
        options = "--broker", url, "--max-queued", "100000000"
        with serving(*(argv or GATEWAY), *options, port=port, under=under) as process:
            worker.stop()
            yield port, process.pid


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, seconds. Its clock's number is made as clock_getcpuclockid(3) does."""
    return time.clock_gettime(~pid << 3 | 2)


def rss_mb(pid: int) -> float:
    """The most memory that a process ever had, in MB (10^6 bytes)."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def connections(redis: Redis, pid: int) -> int:
    """How many connections to the server a process has."""
    held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    port = redis.connection_pool.connection_kwargs["port"]
    here = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if _remote(line) == port}
    return len(here & {name[8:-1] for name in held if name.startswith("socket:[")})


def _remote(line: str) -> int:
    return int(line.split()[2].partition(":")[2], 16)
