"""The ledger: a row for each final task, and the sums that become of old rows.

    a final end (`scripts/_ledger.lua`) ─▶ row ─ FOLD ─▶ sums of its hour ─ ROLL ─▶ sums of its day ─ PRUNE ─▶ gone

The script that makes a record final appends its row to the stream `penstock:ledger`, so no end is without a row, and no
row without an end; the row outlives the record. An entry's id begins with the time of the end (ms). Its fields:

| field | what it holds |
| --- | --- |
| `id`, `status` | the task, and how it ended |
| `key`, `tenant`, `model`, `version`, `tier` | as in the record; empty where it lacks them |
| `prompt`, `cached`, `output` | tokens as the task's usage has them; `cached` are part of `prompt` |
| `discarded` | tokens of `output` that are not in the stream: candidates of `best_of`, and beams |
| `again` | tokens of prompt and output that later workers took up from earlier ones, which `prompt` and `output` \
count once |
| `attempts`, `deaths` | starts; workers that died holding it |
| `ms` | from its first start to its end; 0 for what never started |
| `engine` | the engine's time for it (microseconds), of all starts, as far as workers have noted it (`Run`) |
| `energy` | what the device drew in that time (microjoules), where workers have a meter |
| `created`, `started`, `first` | when it was submitted (empty for a plain Celery task), first claimed, and had its \
first token (ms); empty where it did not |
| `longest` | tokens of its longest choice |
| `alias`, `generation` | what led to its version, as in the record; rows of earlier releases lack them |
| `drawn` | as in the record; of a task in chunks, in the row of the first one; else empty |

Each minute OVERHEAD adds rows that are no task's: what workers of a model were idle, and what they took to start
(microseconds, in `engine`; microjoules, in `energy`), with that state as the `tier` and everything else empty. A reader
of an earlier release counts them as engine time without a tenant.

FOLD adds rows to the sums of their hours, ROLL hours to days (UTC). Each adds and removes in one script, so that a task
is counted once, as a row or in a sum, whoever dies when. `penstock:usage:sums:hour:<unix s>:<tenant>` and
`...:day:<unix s>:<tenant>` are hashes: `[key, tenant, model, version, tier]` (JSON) -> its COUNTS, with spaces between.
`penstock:usage:sums` has the hours and days by their beginning, `penstock:usage:tenants:<hour or day>` the tenants of
each; `penstock:usage:folded` is the id of the last row that FOLD took. Earlier releases had one hash for all tenants,
`penstock:usage:<hour or day>`, all of them in `penstock:usage`: ROLL splits those.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from producers.connection.script import Call, aexecute, arun, script, text
from producers.contract import keys
from producers.store.protocol import PACKAGE

#: The counts of a sum, in its order: tasks by how they ended; then the fields of rows.
STATUSES: Final = ("completed", "failed", "cancelled", "incomplete")
COUNTS: Final = (
    *STATUSES,
    "prompt",
    "cached",
    "output",
    "discarded",
    "again",
    "attempts",
    "deaths",
    "ms",
    "engine",
    "energy",
)
#: What a row without a task counts, in place of its tier: workers' time that no task has a share in.
OVERHEAD: Final = ("idle", "starting")
#: Rows, or sums, that one script takes: a few ms of the server's time.
BATCH_SIZE: Final = 500
#: Time (s) for which OVERHEAD's marks are kept: as long as the counters.
MARKS_KEPT_S: Final = 30 * 24 * 3600
#: Rows that a reader gets at a time.
PAGE: Final = 1000
_HOUR_MS: Final = 3_600_000


class Group(NamedTuple):
    """The fields by which tasks are counted together."""

    key: str
    tenant: str
    model: str
    version: str
    tier: str


class GroupUsage(NamedTuple):
    """A group's usage in the hour or day that begins at `start` (unix s). `counts`: in the order of COUNTS."""

    start: int
    group: Group
    counts: tuple[int, ...]


def fold(age_ms: int, limit: int = BATCH_SIZE) -> Call:
    """FOLD: add up to `limit` rows older than `age_ms` to the sums of their hours. Answers how many."""
    return Call(script(PACKAGE, "ledger_fold"), (keys.LEDGER, keys.USAGE_FOLDED), (age_ms, limit, *COUNTS))


def roll(age_s: int, limit: int = BATCH_SIZE) -> Call:
    """ROLL: add about `limit` sums of the oldest hour that began longer ago than `age_s` to its day's, or split as many
    of an earlier release by tenants. Answers how many; 0 once there is nothing of either."""
    return Call(script(PACKAGE, "ledger_roll"), (keys.USAGE, keys.USAGE_UNSPLIT), (age_s, limit))


async def add_overhead(store: Redis) -> int:
    """OVERHEAD: enter workers' time without tasks since the last call of whomever. Answers how many rows.

    Raises redis.exceptions.RedisError or OSError.
    """
    models = [text(name) for name in await aexecute(store, "HKEYS", keys.MODELS)]
    names = (keys.metrics_mark("overhead"), keys.LEDGER, *map(keys.metrics, models))
    return int(await arun(store, Call(script(PACKAGE, "overhead"), names, (MARKS_KEPT_S, *models))))


async def prune(store: Redis, age_s: float) -> int:
    """PRUNE: remove days that began longer ago than `age_s` (s). Answers how many.

    Raises redis.exceptions.RedisError or OSError.
    """
    old = await store.zrangebyscore(keys.USAGE, "-inf", time.time() - age_s)
    days = [day for day in map(text, old) if day.startswith("day:")]
    for day in days:
        whose = [text(tenant) for tenant in await store.smembers(keys.usage_tenants(day))]
        async with store.pipeline(transaction=True) as pipe:
            pipe.unlink(keys.usage_tenants(day), *(keys.usage(day, tenant) for tenant in whose))
            pipe.zrem(keys.USAGE, day)
            await pipe.execute()
    return len(days)


async def usage_between(store: Redis, since: int, until: int, tenant: str | None = None) -> list[GroupUsage]:
    """The usage from `since` until before `until` (unix s): rows by their hours, and the hours and days that begin
    in that time; of one tenant, or of all. Each task that ended before the call is counted once.

    It reads the rows of all tenants, and of the sums one tenant's alone. Raises redis.exceptions.RedisError or OSError.
    """
    while True:
        folded, sums = await _sums(store, since, until, tenant)
        rows = await _rows(store, folded, max(0, since) * 1000, until * 1000, tenant)
        if await store.get(keys.USAGE_FOLDED) == folded:  # else FOLD took some of the rows meanwhile
            return [row for row in sums if tenant in (None, row.group.tenant)] + rows


async def _rows(
    store: Redis, folded: bytes | None, since_ms: int, until_ms: int, tenant: str | None
) -> list[GroupUsage]:
    """The rows of a time that are not in the sums, added up by hour and group."""
    tenant_bytes = None if tenant is None else tenant.encode()
    sums: dict[tuple[int, Group], list[int]] = {}
    first = f"({text(folded)}" if folded and _ms(folded) >= since_ms else str(since_ms)
    while True:
        page: Any = await aexecute(store, "XRANGE", keys.LEDGER, first, str(until_ms - 1), "COUNT", PAGE)
        for entry, fields in page:
            raw = dict(zip(fields[::2], fields[1::2], strict=True))
            if tenant_bytes is not None and raw[b"tenant"] != tenant_bytes:
                continue  # before its other fields are read: most rows are others'
            row = {text(name): text(value) for name, value in raw.items()}
            group = Group(*(row[name] for name in Group._fields))
            sum_ = sums.setdefault((_ms(entry) // _HOUR_MS * 3600, group), [0] * len(COUNTS))
            for k, name in enumerate(COUNTS):
                sum_[k] += row["status"] == name if name in STATUSES else int(row.get(name, 0))
        if len(page) < PAGE:
            return [GroupUsage(start, group, tuple(counts)) for (start, group), counts in sums.items()]
        first = f"({text(page[-1][0])}"


async def _sums(store: Redis, since: int, until: int, tenant: str | None) -> tuple[bytes | None, list[GroupUsage]]:
    """The id of the last row in the sums, and the sums of a time, as they stood at one moment: of one tenant, or of
    all; those that an earlier release wrote are of all."""
    span = since, f"({until}"

    def queue_reads(pipe: Any, buckets: list[Any]) -> None:
        """Queue reads of the hours and days of the time, and of the tenants that have sums in them."""
        pipe.zrangebyscore(keys.USAGE, *span)
        pipe.zrangebyscore(keys.USAGE_UNSPLIT, *span)
        for bucket in buckets if tenant is None else ():
            pipe.smembers(keys.usage_tenants(text(bucket)))

    while True:
        split: list[Any] = await store.zrangebyscore(keys.USAGE, *span)
        async with store.pipeline(transaction=False) as pipe:
            queue_reads(pipe, split)
            names = await pipe.execute()
        hashes = [(bucket, keys.usage_unsplit(text(bucket))) for bucket in names[1]]
        for bucket, whose in zip(split, [[tenant]] * len(split) if tenant is not None else names[2:], strict=True):
            hashes += [(bucket, keys.usage(text(bucket), text(owner))) for owner in whose]
        async with store.pipeline(transaction=True) as pipe:
            pipe.get(keys.USAGE_FOLDED)
            queue_reads(pipe, split)
            for _, name in hashes:
                pipe.hgetall(name)
            folded, *answers = await pipe.execute()
        if answers[: len(names)] == names and names[0] == split:
            return folded, [
                GroupUsage(int(text(bucket).split(":")[1]), Group(*json.loads(group)), _counts(counts))
                for (bucket, _), sums in zip(hashes, answers[len(names) :], strict=True)
                for group, counts in sums.items()
            ]


def _counts(raw: bytes) -> tuple[int, ...]:
    """A sum's counts. Those that an earlier release did not have are 0."""
    counts = tuple(map(int, raw.split()))
    return counts + (0,) * (len(COUNTS) - len(counts))


def _ms(entry: bytes) -> int:
    return int(entry.split(b"-")[0])
