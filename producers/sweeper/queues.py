"""Looks after the queues that no worker takes tasks from, or none that can do them.

    OrphanedQueues   all workers of a queue were killed: their messages return to the queue's lists
    RetiredPools     a pool without workers: waiting tasks are logged, useless messages removed, empty pools forgotten
    UnservedTasks    workers are up, but none whose release can do a task: the task ends

Each call is one script, which checks the leases itself. So a worker that starts at that moment keeps what it has
sorted, and a sweeper that is killed between two calls leaves the remainder to the next sweep.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.broker.values import ListedWorker
from producers.client.aio import AsyncClient
from producers.connection.script import Call, aexecute_many, arun, parsed, script, text
from producers.contract import keys, levels
from producers.contract.keys import takers_of, version_queue_of
from producers.contract.levels import emptied, looked_after, queue_of, split
from producers.contract.message import is_plain, kind_of, task_headers
from producers.contract.profile import sane
from producers.contract.record import FINAL, error_json
from producers.store.fleet.routing import Routing
from producers.store.fleet.scaling import is_fresh, states
from producers.store.protocol import PACKAGE
from producers.sweeper.celery_results import CeleryResults

log = logging.getLogger(__name__)

#: Messages returned in one call.
PAGE: Final = 500
#: Time (s) for which a queue must be without a worker. A live worker, whose lease lapsed while its servers were away,
#: needs less to renew it.
ORPHANED_AFTER_S: Final = 5.0
#: Time (s) without a worker after which waiting tasks are logged; most models load in less.
REPORT_AFTER_S: Final = 60.0
#: Time (s) without workers and messages after which a pool is forgotten.
RETIRE_AFTER_S: Final = 3600.0
#: Time (s) after which a task is ended that no worker's release can do.
UNSERVED_AFTER_S: Final = 600.0
#: Messages of unknown kinds that may wait in one queue: what is remembered of them, and looked through in a sweep.
KINDS: Final = 10_000


class OrphanedQueues:
    """Returns the messages of queues whose workers were all killed to the queues' lists. Remembers since when.

        no worker of a queue has its lease, at two looks -> REAP each that is gone
            -> a pool's own queue: ADOPT, to its version's        -> any other: RECALL, a page at a time

    A drained worker does this itself, by RECALL. An autoscaler sees only the lists' lengths, so messages elsewhere
    would wait until a worker is started for another reason. A page returns to the front of its list, the youngest
    messages first.
    """

    def __init__(self, client: AsyncClient, patience_s: float = ORPHANED_AFTER_S) -> None:
        self._store, self._broker = client.store, client.broker
        self._patience_s = patience_s
        self._since: dict[str, float] = {}

    async def sweep(self) -> tuple[int, int]:
        """Return the messages. Returns the numbers taken from dead workers and from the sorted sets.

        Raises redis.exceptions.RedisError or OSError; then the waiting times begin again.
        """
        since, self._since = self._since, {}
        pools = {text(queue): text(entry) for queue, entry in (await self._store.hgetall(keys.POOLS)).items()}
        takers = takers_of(pools)
        workers = await self._broker.workers()
        served = {worker.queue for worker in workers if worker.remaining_s is not None}
        now = time.monotonic()
        unserved_since = {queue: since.get(queue, now) for queue, its in takers.items() if not served & set(its)}
        late = [queue for queue, first in unserved_since.items() if queue in since and now - first >= self._patience_s]
        reaped = recalled = 0
        for worker in workers:
            if worker.queue in late and worker.remaining_s is None:
                reaped += max(0, await self._broker.reap(worker.incarnation))
        for pool, entry in pools.items():
            for queue, target in zip(looked_after(pool), looked_after(version_queue_of(entry)), strict=True):
                if queue in late or (queue != pool and pool not in late):
                    recalled += await self._moved(queue, target)
        for version in {version_queue_of(entry) for entry in pools.values()}:
            for level in emptied():
                recalled += await self._moved(queue_of(version, level), version)
        for queue, its in takers.items():
            # For a queue beside another, the script checks whether a worker lives that takes from it.
            if split(queue)[0] in pools or (queue not in late and not split(queue)[1]):
                continue
            recalled += (back := await self._all(queue, its))
            if back:
                log.warning("All workers of %s are gone: %d tasks that they had sorted are in its lists", queue, back)
        if reaped:
            log.warning("%d deliveries of workers that are gone, and that no other follows, are in the lists", reaped)
        self._since = unserved_since
        return reaped, recalled

    async def _moved(self, pool: str, queue: str) -> int:
        count = max(0, await self._broker.adopt(pool, queue))
        if count:
            log.warning("Pool %s has no worker: moved its %d queued tasks to %s", pool, count, queue)
        return count

    async def _all(self, queue: str, pools: Sequence[str]) -> int:
        moved = 0
        while (count := await self._broker.recall(queue, pools, PAGE)) > 0:
            moved += count
            if count < PAGE:
                break
        return moved


def retire(queue: str, entry: str) -> Call:
    """RETIRE: forget a pool. Answers 1, or 0 if the pool has changed."""
    return Call(script(PACKAGE, "retire"), (keys.POOLS,), (queue, entry))


@dataclass(slots=True)
class Pruned:
    messages: int = 0
    pools: int = 0


class RetiredPools:
    """Handles pools without workers. Remembers since when each has had none.

        logged:   the number of waiting tasks, whenever it changed (and in /metrics, always), once nobody has served
                  them for a while: after a restart, workers load their model first. Not where an autoscaler has decided
                  that they need no worker yet
        removed:  messages whose tasks are settled, deleted or past their time to live: a worker would only drop them
        retired:  a pool with nothing left, in its own queue or in that of its version, if no card names that; after an
                  hour. What workers measured of a version goes when neither pool nor card names it

    A message that is neither is somebody's task, and waits for a worker of that version, however long.
    """

    def __init__(
        self, client: AsyncClient, retire_after_s: float = RETIRE_AFTER_S, patience_s: float = REPORT_AFTER_S
    ) -> None:
        self._store, self._broker = client.store, client.broker
        self._retire_after_s = retire_after_s
        self._patience_s = patience_s
        self._unserved_since: dict[str, float] = {}
        self._reported: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._empty_since: dict[str, float] = {}

    async def sweep(self) -> Pruned:
        """Handle all pools once. Raises redis.exceptions.RedisError or OSError."""
        pruned = Pruned()
        measured = await self._store.hkeys(keys.PROFILES)  # first: a worker announces its pool before it measures
        pools = {text(queue): text(entry) for queue, entry in (await self._store.hgetall(keys.POOLS)).items()}
        serving = {worker.queue for worker in await self._broker.workers()}
        cards = {text(model): text(card) for model, card in (await self._store.hgetall(keys.MODELS)).items()}
        takers, resting = takers_of(pools, cards), await self._resting(cards)
        queues = [queue for queue, its in takers.items() if not serving & set(its)]
        for remembered in (self._unserved_since, self._reported):
            for queue in remembered.keys() - set(queues):
                del remembered[queue]
        self._waiting = {}
        for queue in queues:
            self._waiting[queue] = await self._prune(queue, takers[queue], pruned)
            if queue not in resting:
                self._report(queue, self._waiting[queue])
        current = takers_of({}, cards)
        routed = await self._routed(cards)
        for queue in pools.keys() - serving:
            version = version_queue_of(pools[queue])
            if version in routed:  # new tasks may come
                continue
            its = looked_after(queue) if version in current else looked_after(queue) + looked_after(version)
            await self._retire(its, pools[queue], pruned)
        for queue in self._empty_since.keys() - (pools.keys() - serving):
            del self._empty_since[queue]
        if unnamed := [name for name in measured if keys.model_queue(text(name)) not in takers]:
            await self._store.hdel(keys.PROFILES, *unnamed)
        return pruned

    async def _routed(self, models: Collection[str]) -> set[str]:
        """The queues of the versions that models' routings name."""
        states = await aexecute_many(self._store, [("HGET", keys.routing(model), "now") for model in models])
        routings = (Routing.of(model, state) for model, state in zip(models, states, strict=True))
        return {
            keys.version_queue(routing.model, version)
            for routing in routings
            if routing is not None
            for version in routing.versions()
        }

    async def _resting(self, cards: dict[str, str]) -> set[str]:
        """The queues of pools for which an autoscaler wants no worker now: it starts one when their tasks are due."""
        (seconds, _), decisions = await self._store.time(), await states(self._store)
        names = {
            name
            for name, decision in decisions.items()
            if decision.get("wanted") == 0 and is_fresh(decision.get("at"), seconds)
        }
        versions = {model: f"{model}@{_version(card)}" for model, card in cards.items()}
        names |= {versions[name] for name in names & versions.keys()}
        names |= {model for model, current in versions.items() if current in names}
        return {queue for name in names for queue in looked_after(keys.model_queue(name))}

    def _report(self, queue: str, waiting: int) -> None:
        """Log the number of waiting tasks whenever it has changed."""
        now = time.monotonic()
        late = now - self._unserved_since.setdefault(queue, now) >= self._patience_s
        if late and waiting and waiting != self._reported.get(queue):
            log.warning("%d tasks wait in %s, which no worker serves: start one for it, or cancel them", waiting, queue)
            self._reported[queue] = waiting

    async def _prune(self, queue: str, pools: Sequence[str], pruned: Pruned) -> int:
        """Return held-back and sorted messages to the lists and drop useless ones. Returns the number that is left."""
        while await self._broker.due(queue):
            pass
        while await self._broker.recall(queue, pools, PAGE) == PAGE:
            pass
        removed, remaining = await self._broker.prune(queue, self._over, PAGE)
        pruned.messages += removed
        return remaining

    async def _over(self, page: Iterable[bytes]) -> dict[bytes, str]:
        """Messages, with their tasks, that CLAIM would answer with `done` or `erased`.

        Their tasks are settled or deleted, or were a client's and have no record any more.
        """
        messages = [(raw, headers) for raw in page if (headers := task_headers(raw)) is not None]
        ids = [headers["id"] for _, headers in messages]
        answers = await aexecute_many(
            self._store,
            [
                *(("HMGET", keys.task(task_id), "status", "settled") for task_id in ids),
                *(("EXISTS", keys.erased(task_id)) for task_id in ids),
            ],
        )
        records, erased = answers[: len(ids)], answers[len(ids) :]
        return {
            raw: headers["id"]
            for (raw, headers), (status, settled), gone in zip(messages, records, erased, strict=True)
            if settled is not None or (status is None and (gone or not is_plain(headers)))
        }

    async def _retire(self, queues: Sequence[str], entry: str, pruned: Pruned) -> None:
        """Forget a pool without tasks after a while. `queues`: its own first; the others go, too, unless served."""
        queue = queues[0]
        if any(self._waiting.get(name) for name in queues):
            self._empty_since.pop(queue, None)
            return
        since = self._empty_since.setdefault(queue, time.monotonic())
        # A worker that announces the pool again changes its entry, which holds the time.
        if time.monotonic() - since >= self._retire_after_s and await arun(self._store, retire(queue, entry)):
            log.info("pool %s is forgotten: no worker serves it, and nothing is left of it", queue)
            for name in queues:
                if name in self._waiting:
                    await self._broker.forget(name)
            del self._empty_since[queue]
            pruned.pools += 1


def _version(card: str) -> str:
    """The version that a card names; empty where it makes no sense."""
    return str(parsed(card).get("version", ""))


def unserved(task_id: str, error: str, version: str, after_s: float, workers: Sequence[str]) -> Call:
    """UNSERVED: end a task that no living worker's release can do. Answers `ended`, its status, or `gone`.

    `version`: its version's queue; `after_s`: how old it has to be; `workers`: the incarnations that the broker lists
    with the version's pools."""
    arguments: list[str | int] = [task_id, error, version, int(after_s * 1000), *workers]
    return Call(script(PACKAGE, "unserved"), (keys.task(task_id), keys.stream(task_id)), arguments)


class UnservedTasks:
    """Ends tasks that no worker's release can do, though workers of their version are up.

        a queue beside a version's (`producers.contract.levels`): for --unserved-after some of the version's workers
        have taken tasks, and none whose release can do what waits there
            -> RECALL what dead workers had sorted -> UNSERVED each task that waits -> its message is removed

    Where no worker of the version is up, tasks wait: an autoscaler may have sent all home. UNSERVED looks at the
    workers itself, so a worker that starts at that moment keeps its tasks; and at the task's age, since it may be new.
    If the sweeper is killed after it, the next sweep finds the message of a final task and removes it; ORPHAN settles
    the task.

    A plain Celery message has the links and the result of its task. It goes back to the version's queue once its task
    has ended, or has no record: a worker that is up settles that, or fails what it cannot read. Other messages stay.

    A message of a kind that no worker which is up knows (`penstock.*`) has no record. It ends once it was observed
    waiting for --unserved-after: its result is stored, then it becomes a dead letter, in one script (BURY). If the
    sweeper is killed between the two, the next sweep finds a result and does the second part. The message never goes
    back to a worker that has refused it. It is of no version: workers of any version of its model do for it. At most
    KINDS of them wait beside a version; further ones end at once.
    """

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
        for pool, entry in (await self._store.hgetall(keys.POOLS)).items():
            version = version_queue_of(text(entry))
            pools.setdefault(version, []).append(text(pool))
            models[text(pool)] = models[version] = parsed(entry)["model"]
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
            expired: dict[bytes, str] = {}
            named: dict[str, set[str]] = {}
            for raw in page:
                if (id_and_kind := kind_of(raw)) is None:
                    continue
                task_id, kind = id_and_kind
                first = since.get(task_id, now)
                if len(kept) < KINDS and now - first < self._after_s:
                    kept[task_id] = first
                else:
                    expired[raw] = task_id
                    named.setdefault(kind, set()).add(task_id)
            for kind, ids in named.items():
                await self._results.fail(ids, _unknown(kind, leases))
            return expired

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
            by_message = {raw: task_headers(raw) or {} for raw in page}
            return {raw: headers["id"] for raw, headers in by_message.items() if headers.get("id") in plain}

        async def over(page: Iterable[bytes]) -> dict[bytes, str]:
            nonlocal ended
            removable = {}
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
                        removable[raw] = task_id
            return removable

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
    text = f"No worker that is up knows {kind!r}: it is misspelt, or of a later release than theirs ({_up(leases)})."
    return {"code": "release_missing", "message": text, "param": None}


def _error(level: int, leases: Sequence[Mapping[str, Any]]) -> str:
    needed = levels.release_of(level) or "later"
    text = f"The task needs a worker of release {needed}; those that serve its model are of release {_up(leases)}."
    return error_json("release_missing", text)
