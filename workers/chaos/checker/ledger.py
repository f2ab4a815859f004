"""Reads the ledger with plain commands: a row for each task that ended, and the sums that old rows become."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

LEDGER: Final = "penstock:ledger"
#: The hours and days that have sums; each one's tenants; of each tenant a hash beside the first.
SUMS: Final = "penstock:usage:sums"
TENANTS: Final = "penstock:usage:tenants:"
STATUSES: Final = ("completed", "failed", "cancelled", "incomplete")
#: What a sum counts, in its order.
COUNTS: Final = (*STATUSES, "prompt", "cached", "output", "discarded", "again", "attempts", "deaths", "ms", "engine")
Row = Mapping[str, str]
#: (key, tenant, one of COUNTS) -> how many.
Totals = Counter[tuple[str, str, str]]


@dataclass(slots=True)
class Ledger:
    """`rows`: those that were seen, by entry id. `totals`: counts of all tasks, as rows and in sums."""

    rows: dict[str, Row] = field(default_factory=dict)
    totals: Totals = field(default_factory=Counter)

    @classmethod
    def read(cls, store: Redis) -> Ledger:
        """The ledger as it stands at one moment. `store`: a client that decodes replies."""
        while True:
            buckets: list[str] = sorted(store.zrange(SUMS, 0, -1))  # type: ignore[arg-type]
            tenants = [sorted(map(str, store.smembers(f"{TENANTS}{bucket}"))) for bucket in buckets]
            pipe = store.pipeline(transaction=True)
            pipe.xrange(LEDGER)
            pipe.zrange(SUMS, 0, -1)
            for bucket in buckets:
                pipe.smembers(f"{TENANTS}{bucket}")
            for bucket, whose in zip(buckets, tenants, strict=True):
                for tenant in whose:
                    pipe.hgetall(f"{SUMS}:{bucket}:{tenant}")
            rows, now, *found_sets = pipe.execute()
            sums = found_sets[len(buckets) :]
            if sorted(now) == buckets and [sorted(whose) for whose in found_sets[: len(buckets)]] == tenants:
                break
        found = cls(dict(rows), total(row for _, row in rows))
        for group, said in (one for bucket in sums for one in bucket.items()):
            key, tenant, *_ = json.loads(group)
            counts = zip(COUNTS, map(int, said.split()), strict=True)
            found.totals.update({(key, tenant, name): count for name, count in counts})
        return found


def total(rows: Iterable[Row]) -> Totals:
    """The counts of these rows."""
    found: Totals = Counter()
    for row in rows:
        whose = row["key"], row["tenant"]
        found[*whose, row["status"]] += 1
        found.update({(*whose, name): int(row[name]) for name in COUNTS if name not in STATUSES})
    return found
