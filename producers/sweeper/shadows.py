"""Copies a part of models' tasks to another version, and compares them (`producers.store.shadows`); of the leader.

samples ─▶ does a worker serve the version, and does nobody wait for it? ─▶ ADMIT, message, QUEUED of the copy
open copies ─▶ both have ended: PAIR, DELETE; else, where its task is gone, live work waits or it is late: DELETE
a rollout compares likelihoods ─▶ ADMIT of two scores of the task's output ─▶ both have ended: PAIR, DELETE
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.directory import encoding_of
from producers.client.operations import task_of_record
from producers.client.steps import Read, once
from producers.connection.script import text
from producers.contract import keys
from producers.contract.levels import split
from producers.contract.record import FINAL, Record
from producers.contract.task import Task
from producers.errors import BrokenRecord, PenstockError, TaskNotFound
from producers.rollouts.refusals import refuses
from producers.store import shadows
from producers.store.fleet.canaries import LIKELIHOOD, Canary
from producers.store.fleet.routing import Routing

#: Copies that may be open at a time, in all.
MAX_OPEN: Final = 32
#: Time (s) after which a copy is dropped that no worker has begun: before its list rises by a tier.
UNSTARTED_S: Final = 20.0
#: Time (s) that a copy may take, and its task after it.
TIME_S: Final = 600
#: Time (s) for which a copy's record is kept, should no sweeper delete it.
TTL_S: Final = 3600
#: Time (s) for reading the result of a task that has ended.
RESULT_S: Final = 30.0
#: Open copies that are looked at in a sweep.
PAGE: Final = 200
#: Outputs that are scored at a time, and tokens of prompt and output of one at most.
MAX_SCORED, SCORED_TOKENS = 2, 4096
#: Largest task (bytes of its JSON) that is copied.
MAX_BYTES: Final = 1 << 18


class Shadows:
    """Makes copies and compares them, up to `max_open` at a time. A copy that no worker has begun within `unstarted_s`
    seconds is dropped."""

    def __init__(self, client: AsyncClient, max_open: int = MAX_OPEN, unstarted_s: float = UNSTARTED_S) -> None:
        self._client, self._max_open, self._unstarted_s = client, max_open, unstarted_s
        #: Versions' queues in which live tasks waited at the last look.
        self._waited: frozenset[str] = frozenset()
        self._scored = 0

    async def sweep(self) -> dict[str, int]:
        """Compare what has ended, and copy what is sampled. Returns the numbers of both. Raises
        redis.exceptions.RedisError or OSError."""
        samples, copies = await self._read(("LLEN", keys.SHADOW_SAMPLES), ("ZRANGE", keys.SHADOW_COPIES, 0, PAGE - 1))
        if not samples and not copies:
            self._waited = frozenset()
            return {}
        busy = await self._busy()
        compared = 0
        self._scored = sum(text(copy).startswith(shadows.SCORES[0]) for copy in copies)
        for copy in map(text, copies):
            compared += await self._tend(copy, busy)
        copied = 0
        for _ in range(min(samples, self._max_open - len(copies))):
            (task_id,) = await self._read(("LPOP", keys.SHADOW_SAMPLES))
            if task_id is None:
                break
            copied += await self._copy(text(task_id), busy)
        return {"shadows_copied": copied, "shadows_compared": compared}

    async def _copy(self, task_id: str, busy: frozenset[str]) -> bool:
        """Submit a copy of a task. False if it was dropped."""
        (fields,) = await self._read(("HGETALL", keys.task(task_id)))
        record = Record.parse(task_id, fields)
        version = record.fields.get("shadow")
        if version is None:
            return False
        try:
            reason = await self._obstacle(record, version, busy)
            if not reason:
                await self._client.admit(_copied(record, version), shadows.copy_id(task_id), _fields(record))
        except (PenstockError, BrokenRecord) as error:
            reason = getattr(error, "code", None) or "refused"
        if reason:
            await self._drop(record.model, reason)
        return not reason

    async def _obstacle(self, record: Record, version: str, busy: frozenset[str]) -> str:
        """Why a task is not copied now; empty if nothing speaks against it."""
        (state,) = await self._read(("HGET", keys.routing(record.model), "now"))
        routing = Routing.of(record.model, state)
        shadow = None if routing is None else routing.copied_to()
        if shadow is None or shadow.to != version:
            return "ended"
        if len(record.fields["task"]) > MAX_BYTES:
            return "large"
        queue = keys.version_queue(record.model, version)
        if queue in busy or await self._stage(queue):
            return "overload"
        return "" if await self._is_served(queue) else "unserved"

    async def _tend(self, copy: str, busy: frozenset[str]) -> bool:
        """Take a copy as far as it goes. Returns whether it was compared."""
        names = ("status", "shadow_of", "created", "started", "model", "queue", "paired")
        (values, (seconds, _)) = await self._read(("HMGET", keys.task(copy), *names), ("TIME",))
        status, task_id, created, started, model, queue, paired = (None if v is None else text(v) for v in values)
        if status is None or task_id is None:
            await self._read(("ZREM", keys.SHADOW_COPIES, copy))
            return False
        (task_status,) = await self._read(("HGET", keys.task(task_id), "status"))
        ended, task_ended = status in FINAL, text(task_status or b"") in FINAL
        age_s = int(seconds) - int(created or 0) / 1000
        reason = ""
        if paired is None and ended and copy.startswith(shadows.SCORES):
            compared = await self._compare_scores(str(model), task_id, copy)
            if compared is None:
                return False
            reason = compared
        elif paired is None and ended and task_ended:
            reason = await self._compare(str(model), task_id, copy, busy)
        elif task_status is None:
            reason = "task_gone"
        elif not ended and queue is not None and split(queue)[0] in busy:
            reason = "overload"
        elif (started is None and not ended and age_s > self._unstarted_s) or (ended and age_s > 2 * TIME_S):
            reason = "late"
        elif paired is None:
            return False
        if reason:
            await self._drop(str(model), reason)
        with suppress(TaskNotFound):
            await self._client.get(copy).delete()
        return not reason and not copy.startswith(shadows.SCORES[1])

    async def _compare(self, model: str, task_id: str, copy: str, busy: frozenset[str]) -> str:
        """Write the row of a copy, and have the task's output scored. Returns why it cannot be compared, or ""."""
        handles = self._client.get(task_id), self._client.get(copy)
        try:
            task, other = [await handle.status() for handle in handles]
            if task.status != "completed":
                return "task_not_completed"
            result, copied = [await handle.result(RESULT_S, raise_for_status=False) for handle in handles]
        except (PenstockError, TimeoutError):
            return "unreadable"
        refused = refuses(result.choices[0].text), refuses(copied.choices[0].text)
        row = shadows.Pair.of((task, other), (result, copied), refused)
        await self._client.run(once(shadows.pair(model, copy, row)))
        with suppress(PenstockError, BrokenRecord):  # scores are best effort
            await self._score(task, row.shadow, result.choices[0].token_ids, busy)
        return ""

    async def _score(self, record: Record, shadow: str, output: tuple[int, ...], busy: frozenset[str]) -> None:
        """Have both versions say how likely the first choice of a task is, where a rollout compares that."""
        (state,) = await self._read(("HGET", keys.CANARIES, record.model))
        canary = Canary.of(state)
        if canary is None or not canary.under_way or canary.version != shadow or self._scored >= MAX_SCORED:
            return
        if LIKELIHOOD not in canary.plan.metrics:
            return
        prompt, versions = record.task.get("prompt"), (record.fields.get("version", ""), shadow)
        queues = [keys.version_queue(record.model, version) for version in versions]
        if not output or not isinstance(prompt, list) or len(prompt) + len(output) > SCORED_TOKENS or busy & {*queues}:
            return
        self._scored += 1
        for prefix, version in zip(shadows.SCORES, versions, strict=True):
            task = Task(model=record.model, version=version, prompt=(*prompt, *output), **_SCORE)
            fields = {**shadows.COPY, "shadow_of": record.id, "encoding": encoding_of(record.fields)}
            await self._client.admit(task, prefix + record.id, {**fields, "scored": len(output)})

    async def _compare_scores(self, model: str, task_id: str, score: str) -> str | None:
        """Write the row of two scores, one of which has ended. Returns why it cannot be, "" once it is; None: later."""
        first, second = (prefix + task_id for prefix in shadows.SCORES)
        (status,) = await self._read(("HGET", keys.task(second if score == first else first), "status"))
        if score == second:
            return "" if status is None else None  # the first one is compared with it
        if status is None:
            return "score"
        if text(status) not in FINAL:
            return None
        handles = self._client.get(first), self._client.get(second)
        try:
            record, other = [await handle.status() for handle in handles]
            result, copied = [await handle.result(RESULT_S, raise_for_status=False) for handle in handles]
            row = shadows.Score.of((record, other), (result, copied))
        except (PenstockError, TimeoutError, ValueError):
            return "score"
        await self._client.run(once(shadows.pair(model, first, row)))
        return ""

    async def _drop(self, model: str, reason: str) -> None:
        drops = keys.shadow_drops(model)
        await self._read(("HINCRBY", drops, reason, 1), ("EXPIRE", drops, shadows.KEPT_S))

    async def _busy(self) -> frozenset[str]:
        """Versions' queues in which live tasks waited at the last look, and wait now."""
        (counts,) = await self._read(("HGETALL", keys.WAITING))
        fields = (text(name).partition(" ")[2] for name in counts)
        waits = frozenset(split(queue)[0] for queue in fields if queue)
        waited, self._waited = self._waited, waits
        return waits & waited

    async def _stage(self, queue: str) -> int:
        """The stage of overload of a version's queue, 0 if there is none."""
        (stage,) = await self._read(("HGET", keys.drain(queue), "stage"))
        return int(stage or 0)

    async def _is_served(self, queue: str) -> bool:
        (pools,) = await self._read(("HKEYS", keys.POOLS))
        version_pools = [pool for pool in map(text, pools) if pool.startswith(f"{queue}.")]
        workers = (
            await self._read(*(("SMEMBERS", keys.workers(pool)) for pool in version_pools)) if version_pools else []
        )
        leases = [("EXISTS", keys.lease(text(worker))) for worker in {name for names in workers for name in names}]
        return any(await self._read(*leases)) if leases else False

    async def _read(self, *commands: tuple[Any, ...]) -> list[Any]:
        return list(await self._client.run(once(Read(commands))))


#: Of a task that scores.
_SCORE: Final[dict[str, Any]] = {
    "max_tokens": 0,
    "prompt_logprobs": 0,
    "tier": "batch",
    "tenant": shadows.TENANT,
    "timeout": TIME_S,
    "ttl": TTL_S,
}


def _copied(record: Record, version: str) -> Task:
    """The copy of a record's task, for this version."""
    overrides = {"tier": "batch", "tenant": shadows.TENANT, "timeout": TIME_S, "ttl": TTL_S, "metadata": {}}
    return task_of_record(record, {**overrides, "order_key": None, "version": version})


def _fields(record: Record) -> dict[str, str | int]:
    """Fields of the copy's record beside those of its task."""
    fields: dict[str, str | int] = {**shadows.COPY, "shadow_of": record.id, "encoding": encoding_of(record.fields)}
    return fields | {name: record.fields[name] for name in ("max_output",) if name in record.fields}
