"""Ends tasks that no worker's release can do, though workers of their version are up.

    a queue beside a version's (`producers.contract.levels`): for --unserved-after some of the version's workers have
    taken tasks, and none whose release can do what waits there
        -> RECALL what dead workers had sorted -> UNSERVED each task that waits -> its message is removed

Where no worker of the version is up, tasks wait: an autoscaler may have sent all home. UNSERVED looks at the workers
itself, so a worker that starts at that moment keeps its tasks; and at the task's age, since it may be new. Killed after
it, the next sweep finds the message of a final task, and removes it; ORPHAN settles the task.

A plain Celery message has the links and the result of its task. It goes back to the version's queue once its task has
ended, or has no record: a worker that is up settles that, or fails what it cannot read. What else waits stays there.

A message of a kind that no worker which is up knows (`penstock.*`) has no record. It ends once it was seen to wait for
--unserved-after: its result is stored, then it becomes a dead letter, in one script (BURY). Killed between the two, the
next sweep finds a result, and does the rest. It never goes back to a worker that has put it aside. It is of no version:
workers of any version of its model do for it. At most KINDS of them wait beside a version; further ones end at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from producers.broker.values import ListedWorker
from producers.client.aio import AsyncClient
from producers.connection.script import Call, aexecute_many, arun, parsed, script, text
from producers.contract import keys, levels
from producers.contract.keys import version_queue_of
from producers.contract.message import is_plain, kind_of, task_headers
from producers.contract.profile import sane
from producers.contract.record import FINAL, error_json
from producers.store.protocol import PACKAGE
from producers.sweeper.celery_results import CeleryResults

log = logging.getLogger(__name__)

#: Time (s) after which a task is ended that no worker's release can do.
UNSERVED_AFTER_S: Final = 600.0
#: Messages read at a time.
PAGE: Final = 500
#: Messages of unknown kinds that may wait in one queue: what is remembered of them, and looked through in a sweep.
KINDS: Final = 10_000


def unserved(task_id: str, error: str, version: str, after_s: float, workers: Sequence[str]) -> Call:
    """UNSERVED: end a task that no living worker's release can do. Answers `ended`, its status, or `gone`.

    `version`: its version's queue; `after_s`: how old it has to be; `workers`: the incarnations that the broker lists
    with the version's pools."""
    about: list[str | int] = [task_id, error, version, int(after_s * 1000), *workers]
    return Call(script(PACKAGE, "unserved"), (keys.task(task_id), keys.stream(task_id)), about)


class UnservedTasks:
    """The leader's memory of since when each queue has had workers of earlier releases alone."""

    def __init__(self, client: AsyncClient, results: CeleryResults, after_s: float = UNSERVED_AFTER_S) -> None:
        self._store, self._broker, self._results = client.store, client.broker, results
        self._after_s = after_s
        self._since: dict[str, float] = {}
        #: Queue -> id of a message of an unknown kind -> since when it was seen to wait.
        self._kinds: dict[str, dict[str, float]] = {}

    async def sweep(self) -> int:
        """End tasks. Returns their number. Raises redis.exceptions.RedisError or OSError."""
        pools: dict[str, list[str]] = {}
        models: dict[str, str] = {}
        for pool, about in (await self._store.hgetall(keys.POOLS)).items():
            version = version_queue_of(text(about))
            pools.setdefault(version, []).append(text(pool))
            models[text(pool)] = models[version] = parsed(about)["model"]
        listed = await self._broker.workers()
        up = {model: await self._leases(_names(listed, models, model)) for model in set(models.values())}
        since, kinds, self._since, ended = self._since, self._kinds, {}, 0
        self._kinds = {}
        for version, its in pools.items():
            workers = [worker.incarnation for worker in listed if worker.queue in its]
            leases = await self._leases(workers)
            highest = max((sane(lease.get("level")) or 0 for lease in leases), default=-1)
            for level in (*levels.levels(), *levels.above()):
                queue = levels.queue_of(version, level)
                if highest >= level:
                    continue
                self._kinds[queue] = kinds.get(queue, {})
                if not up[models[version]]:
                    continue
                ended += await self._end_kinds(queue, its, up[models[version]])
                if not leases:
                    continue
                self._since[queue] = since.get(queue, time.monotonic())
                if time.monotonic() - self._since[queue] >= self._after_s:
                    ended += await self._end(queue, version, its, workers, _error(level, leases))
        return ended

    async def _end_kinds(self, queue: str, pools: Sequence[str], leases: Sequence[Mapping[str, Any]]) -> int:
        """End messages of unknown kinds that have waited for long."""
        since, self._kinds[queue] = self._kinds[queue], {}
        if not self._broker.capabilities.prunes or not sum((await self._broker.waiting(queue)).tiers.values()):
            return 0
        while await self._broker.recall(queue, pools, PAGE) == PAGE:
            pass
        now, kept = time.monotonic(), self._kinds[queue]

        async def over(page: Iterable[bytes]) -> dict[bytes, str]:
            found: dict[bytes, str] = {}
            named: dict[str, set[str]] = {}
            for raw in page:
                if (known := kind_of(raw)) is None:
                    continue
                task_id, kind = known
                first = since.get(task_id, now)
                if len(kept) < KINDS and now - first < self._after_s:
                    kept[task_id] = first
                else:
                    found[raw] = task_id
                    named.setdefault(kind, set()).add(task_id)
            for kind, ids in named.items():
                await self._results.fail(ids, _unknown(kind, leases))
            return found

        reason = f"release_missing: no worker that is up ({_up(leases)}) knows its kind"
        ended, _ = await self._broker.prune(queue, over, PAGE, reason)
        if ended:
            log.warning("%d messages in %s are ended: no worker that is up knows their kind", ended, queue)
        return ended

    async def _leases(self, workers: Sequence[str]) -> list[dict[str, Any]]:
        leases = await aexecute_many(self._store, [("GET", keys.lease(name)) for name in workers])
        return [parsed(lease) for lease in leases if lease is not None]

    async def _end(self, queue: str, version: str, pools: Sequence[str], workers: Sequence[str], error: str) -> int:
        while await self._broker.recall(queue, pools, PAGE) == PAGE:
            pass
        ended, plain = 0, set[str]()

        async def settles(page: Iterable[bytes]) -> dict[bytes, str]:
            found = {raw: task_headers(raw) or {} for raw in page}
            return {raw: headers["id"] for raw, headers in found.items() if headers.get("id") in plain}

        async def over(page: Iterable[bytes]) -> dict[bytes, str]:
            nonlocal ended
            found = {}
            for raw in page:
                headers = task_headers(raw)
                if headers is None:
                    continue
                task_id, is_celerys = str(headers["id"]), is_plain(headers)
                call = unserved(task_id, error, version, self._after_s, workers)
                status = text(await arun(self._store, call))
                ended += status == "ended"
                if status in {"ended", "gone", *FINAL}:
                    if is_celerys:
                        plain.add(task_id)
                    else:
                        found[raw] = task_id
            return found

        await self._broker.prune(queue, over, PAGE)
        if plain:
            await self._broker.prune(queue, settles, PAGE, to=version)
        if ended:
            log.warning("%d tasks of %s are ended: no worker that is up is of a release that can do them", ended, queue)
        return ended


def _names(listed: Sequence[ListedWorker], models: Mapping[str, str], model: str) -> list[str]:
    """The incarnations that serve the model. `models`: by their pools."""
    return [worker.incarnation for worker in listed if models.get(worker.queue) == model]


def _up(leases: Sequence[Mapping[str, Any]]) -> str:
    """The releases of the workers that are up."""
    return ", ".join(sorted({str(lease.get("release") or "before 0.2.0") for lease in leases}))


def _unknown(kind: str, leases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The error of a message of a kind that nobody knows."""
    said = f"No worker that is up knows {kind!r}: it is misspelt, or of a later release than theirs ({_up(leases)})."
    return {"code": "release_missing", "message": said, "param": None}


def _error(level: int, leases: Sequence[Mapping[str, Any]]) -> str:
    needed = levels.release_of(level) or "later"
    said = f"The task needs a worker of release {needed}; those that serve its model are of release {_up(leases)}."
    return error_json("release_missing", said)
