"""What processes and servers hold, seen from outside: /proc, the server's counts, what workers say of themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys


@dataclass(frozen=True, slots=True)
class Held:
    """By one process: resident memory in bytes, open files, threads."""

    memory: int
    files: int
    threads: int


def held(pid: int) -> Held:
    """Raises FileNotFoundError where there is no such process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Held(int(status["VmRSS"].split()[0]) * 1024, files, int(status["Threads"]))


def processor_s(pid: int) -> float:
    """Processor time that a process and its descendants have had, in seconds. Raises FileNotFoundError as `held`."""
    stats: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        stats[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    if pid not in stats:
        raise FileNotFoundError(f"no process {pid}")
    found, todo = 0.0, [pid]
    while todo:
        one = todo.pop()
        found += stats[one][1]
        todo += [child for child, (parent, _) in stats.items() if parent == one]
    return found


@dataclass(frozen=True, slots=True)
class Server:
    """Bytes of memory in use; keys in all; keys that never expire; entries of indexes that are forgotten there."""

    memory: int
    keys: int
    lasting: int
    entries: int


#: By time, of what is under way or is soon to be looked at: what lies in them for longer is forgotten.
TIMED = (keys.SUBMITTING, keys.READERS, keys.UNSETTLED, keys.SETTLED, keys.DEADLINES)
#: By name.
NAMED = (broker_keys.UNSERVED, broker_keys.INCARNATIONS, broker_keys.REAPED, broker_keys.RETURNED)
FORGOTTEN_MS = 180_000


def server(redis: Redis) -> Server:
    """As a server with one database says."""
    space: Any = redis.info("keyspace").get("db0", {"keys": 0, "expires": 0})
    memory: Any = redis.info("memory")
    now: Any = redis.time()
    forgotten = sum(int(redis.zcount(name, "-inf", now[0] * 1000 - FORGOTTEN_MS)) for name in TIMED)
    named = sum(int(redis.hlen(name)) for name in NAMED)
    return Server(memory["used_memory"], space["keys"], space["keys"] - space["expires"], forgotten + named)
