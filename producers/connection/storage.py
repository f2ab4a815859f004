"""Reads how full a server is, and whether it can write its files, from one INFO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

#: Share of `maxmemory` from which on no more lines of batches are made (`_memory.lua` has it too), and settled streams
#: are compacted at once.
PRESSED: Final = 0.6
#: A tier's rank -> the share from which on workers start none of its tasks. APPEND takes a tier's tokens beyond that.
STARTED: Final = (1.07, 1.03, 1.01, 0.99)
#: Share of `maxmemory` from which on a server counts as filling, as nearly full, and as full. Refused writes keep a
#: full server just below its bound, so that the last one is below 1.
FILLING: Final = 0.8
NEARLY_FULL: Final = 0.9
FULL: Final = 0.99


@dataclass(frozen=True, slots=True)
class Storage:
    """A server's memory and disk. `used`: bytes that count against `limit`, its `maxmemory` (0: no bound). `fault`: why
    it cannot write its files; empty if it can."""

    used: int
    limit: int = 0
    fault: str = ""

    @property
    def ratio(self) -> float:
        """The used share of the memory that the server may use; 0 without a bound."""
        return self.used / self.limit if self.limit else 0.0

    def problem(self) -> str:
        """The server's problems, for an operator; empty if it has none."""
        problems = [self.fault] if self.fault else []
        if self.ratio >= FILLING:
            state = "full" if self.ratio >= FULL else "nearly full" if self.ratio >= NEARLY_FULL else "filling"
            problems.append(f"{state}: {self.ratio:.0%} of maxmemory ({self.used} of {self.limit} bytes)")
        return "; ".join(problems)


async def read_storage(redis: Redis) -> Storage:
    """A server's storage. Raises redis.exceptions.RedisError or OSError."""
    return parse(await redis.execute_command("INFO", "memory", "persistence"))


def parse(info: dict[str, Any]) -> Storage:
    """The storage that the sections `memory` and `persistence` of an INFO describe."""
    used = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
    faults = []
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        faults.append("the append-only file cannot be written, so that every write is refused")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        faults.append("the last snapshot failed")
    return Storage(used, int(info["maxmemory"]), " and ".join(faults))
