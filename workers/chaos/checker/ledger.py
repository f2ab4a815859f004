"""Reads the ledger with plain commands: a row for each task that ended, and the sums that old rows become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

LEDGER: Final = "penstock:ledger"
STATUSES: Final = ("completed", "failed", "cancelled", "incomplete")
#: What a sum counts, in its order.
COUNTS: Final = (*STATUSES, "prompt", "cached", "output", "discarded", "again", "attempts", "deaths", "ms")
Row = Mapping[str, str]


@dataclass(slots=True)
class Ledger:
    """`rows`: those that were seen, by entry id. `totals`: counts of all tasks, as rows and in sums."""

    rows: dict[str, Row] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, store: Redis) -> Ledger:
        """The ledger as it stands at one moment. `store`: a client that decodes replies."""
        while True:
            buckets: list[str] = sorted(store.zrange("penstock:usage", 0, -1))  # type: ignore[arg-type]
            pipe = store.pipeline(transaction=True)
            pipe.xrange(LEDGER)
            pipe.zrange("penstock:usage", 0, -1)
            for bucket in buckets:
                pipe.hvals(f"penstock:usage:{bucket}")
            rows, now, *sums = pipe.execute()
            if sorted(now) == buckets:
                break
        found = cls(dict(rows), total(row for _, row in rows))
        for said in (said for bucket in sums for said in bucket):
            found.totals.update(dict(zip(COUNTS, map(int, said.split()), strict=True)))
        return found


def total(rows: Any) -> Counter[str]:
    """The counts of these rows."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row["status"]] += 1
        found.update({name: int(row[name]) for name in COUNTS if name not in STATUSES})
    return found
