"""Adds the ledger's old rows to sums of hours, hours to days, and removes old days. The leader does this.

docs/how/deaths.md says what stands when it dies in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from producers.client.aio import AsyncClient
from producers.connection.script import arun
from producers.store.usage.ledger import MOST, fold, prune, roll

#: Age (s) at which a row becomes part of a sum of its hour, and such a sum part of its day's. Who asks for usage reads
#: the rows of all tenants that are younger.
FOLD_AFTER_S: Final = 60.0
ROLL_AFTER_S: Final = 48 * 3600.0
#: Time (s) for which a day is kept.
KEPT_S: Final = 400 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Ages:
    """Times (s) after which rows, hours and days are taken."""

    fold: float = FOLD_AFTER_S
    roll: float = ROLL_AFTER_S
    kept: float = KEPT_S


USUAL: Final = Ages()


async def sweep(client: AsyncClient, ages: Ages) -> int:
    """Take whatever is old enough; how many rows were folded. Raises redis.exceptions.RedisError or OSError."""
    folded = 0
    while count := await arun(client.store, fold(int(ages.fold * 1000))):
        folded += count
        if count < MOST:
            break
    while await arun(client.store, roll(int(ages.roll))):
        pass
    await prune(client.store, ages.kept)
    return folded
