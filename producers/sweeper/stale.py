"""Removes unneeded data that has no TTL, so that nothing grows for ever. The leader does this.

Data that its owner may be about to use must be found unneeded twice. docs/how/sweeper.md lists all kinds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Final

from producers.admin.dead_letters import letters, purge
from producers.client.aio import AsyncClient
from producers.connection.script import arun, seconds, text
from producers.contract import keys
from producers.store import task_index
from producers.store.fleet import model_files
from producers.store.protocol import swap

log = logging.getLogger(__name__)

#: Time (s) for which a dead letter is kept.
LETTERS_KEPT_S: Final = 14 * 24 * 3600.0
#: Time (s) since its last firing after which a schedule that nobody runs is forgotten: longer than a year.
SCHEDULE_KEPT_S: Final = 400 * 24 * 3600.0
#: Time (s) for which something must be unneeded before it is removed: far more than any process takes between two
#: calls, also a worker that is about to renew its lapsed lease.
UNNEEDED_S: Final = 60.0


@dataclass(slots=True)
class Removed:
    letters: int = 0
    incarnations: int = 0
    deliveries: int = 0
    files: int = 0
    listed: int = 0
    """Entries of the indexes of tasks whose records are gone."""
    schedules: int = 0


class Stale:
    """The leader's memory of since when something has not been needed."""

    def __init__(
        self, client: AsyncClient, *, letters_kept_s: float = LETTERS_KEPT_S, unneeded_s: float = UNNEEDED_S
    ) -> None:
        self._client = client
        self._store, self._broker = client.store, client.broker
        self._letters_kept_s = letters_kept_s
        self._unneeded_s = unneeded_s
        self._since: dict[str, float] = {}
        self._listed_to = task_index.Place()

    async def sweep(self) -> Removed:
        """Remove stale data once. Raises redis.exceptions.RedisError or OSError; then the waiting times begin anew."""
        since, self._since = self._since, {}
        removed, kept = Removed(), dict[str, float]()
        await self._incarnations(removed, since, kept)
        await self._files(removed, since, kept)
        await self._letters(removed)
        await self._schedules(removed, since, kept)
        self._listed_to, removed.listed = await task_index.trim(self._store, self._listed_to)
        await self._broker.tidy()
        self._since = kept
        return removed

    async def _incarnations(self, removed: Removed, since: dict[str, float], kept: dict[str, float]) -> None:
        for worker in await self._broker.workers():
            name = worker.incarnation
            if worker.remaining_s is None and self._long(keys.lease(name), since, kept):
                count = await self._broker.reap(name)
                removed.incarnations += count >= 0
                removed.deliveries += max(count, 0)
                if count > 0:
                    log.warning("worker %s is gone: its %d deliveries are in the queue again", name, count)

    async def _files(self, removed: Removed, since: dict[str, float], kept: dict[str, float]) -> None:
        named = " ".join(map(text, await self._store.hvals(keys.MODELS)))
        async for sha256 in model_files.names(self._store):
            if sha256 not in named and self._long(keys.blob(sha256), since, kept):
                removed.files += await model_files.remove_unused(self._store, sha256)

    async def _letters(self, removed: Removed) -> None:
        before = await self._broker.now_ms() - int(self._letters_kept_s * 1000)
        old: list[Any] = []
        async for letter in letters(self._client):
            if letter.at_ms >= before:  # the oldest come first; an entry without a time is not ours
                break
            old += [letter] if letter.at_ms else []
        for letter in old:
            removed.letters += await purge(self._client, letter)

    async def _schedules(self, removed: Removed, since: dict[str, float], kept: dict[str, float]) -> None:
        """Remove schedules that nobody runs any more.

        The configurations are not known here, but a schedule that is run fires now and then, or has a leader.
        """
        before = seconds(await self._store.time()) - SCHEDULE_KEPT_S
        for name, fired in (await self._store.hgetall(keys.SCHEDULES)).items():
            leader = keys.source_leader(text(name))
            if int(fired) < before and not await self._store.exists(leader) and self._long(leader, since, kept):
                removed.schedules += await arun(self._store, swap(keys.SCHEDULES, text(name), text(fired), ""))

    def _long(self, name: str, since: dict[str, float], kept: dict[str, float]) -> bool:
        """Note that something is unneeded. Returns whether it has been for `unneeded_s`."""
        now = time.monotonic()
        kept[name] = since.get(name, now)
        return now - kept[name] >= self._unneeded_s
