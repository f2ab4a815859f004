"""Submits one task and reads it to its end, through faults: unanswered requests are repeated.

For some tasks it also asks as a stranger, with another tenant's key: GET, cancel, list -> journal: `spied`, `listed`.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from engine.declared import declared
from engine.params import SamplingParams
from producers.contract.stream import Chunk, Event, Prompt, Token
from producers.errors import PenstockError, SubmitFailed, TaskExists, TaskNotFound
from workers.trials.chaos.checker.case import Journal, ObservedTask
from workers.trials.chaos.load import Manner
from workers.trials.chaos.senders import AWAY, Declined, Senders

#: Pause before a request is repeated (s).
AGAIN_S: Final = 0.25
POLL_S: Final = 0.4
#: Fields that a task and OpenAI's completions share.
_SHARED: Final = ("model", "prompt", *declared(SamplingParams))
_TIERS: Final = {"batch": "flex"}
#: Share of the accepted tasks that strangers ask about.
STRANGERS_SHARE: Final = 0.25
_REQUESTS: Final = (("GET", ""), ("POST", "/cancel"))


@dataclass(slots=True)
class Caller:
    """Submits and reads tasks, and writes the journal. `quiet`: the tasks belong to the run without faults."""

    senders: Senders
    journal: Journal
    quiet: bool = False

    async def whole(self, manner: Manner, task: dict[str, Any]) -> None:
        """Submit a task and read it in its manner."""
        if manner.timeout is not None:
            task = {**task, "timeout": manner.timeout}
        observed = ObservedTask(manner.number, manner.variant, manner.via, task, self.quiet, self._key(manner))
        key_field = {"key": observed.key} if observed.key else {}
        self._write("ask", observed, v=observed.variant, via=observed.via, task=task, **key_field)
        if manner.via == "waiting":
            await self._wait(observed, manner)
        elif await self._submit(observed, manner):
            await self.follow(observed, manner)

    def _key(self, manner: Manner) -> str | None:
        """The id of the key to submit with; the last one in quiet. None for what does not pass the gateway."""
        keys = [] if manner.via in ("redis", "celery") else list(self.senders.holders)
        if self.quiet or not keys:
            return keys[-1] if keys else None
        return random.Random(f"{manner.number} key").choice(keys[:-1] or keys)  # noqa: S311

    async def follow(self, observed: ObservedTask, manner: Manner) -> None:
        """Read an accepted task to its end."""
        cancelling = None
        if manner.cancel_after is not None and all(answer is None for answer in observed.cancels):
            cancelling = asyncio.create_task(self._cancel(observed, manner.cancel_after))
        await spy(self.senders, self.journal, observed)
        if manner.via == "poll":
            await self._poll(observed)
        elif manner.via in ("http", "redis"):
            await self._read(observed, manner)
        if cancelling is not None:
            await cancelling

    def _write(self, event: str, observed: ObservedTask, **fields: Any) -> None:
        head = {"k": observed.number} | ({"quiet": True} if observed.quiet else {})
        self.journal.write(event, **head, **fields)

    # ---- submitting -------------------------------------------------------------------------------------------

    async def _submit(self, observed: ObservedTask, manner: Manner) -> bool:
        """Submit until answered. Returns whether there is a task to read; Celery's tasks have no reader."""
        if manner.via == "celery":
            await self._send_plain(observed, manner)
            return False
        task = {**observed.task, "tier": manner.tier}
        while True:
            attempt = str(uuid.uuid4())
            try:
                if manner.via == "redis":
                    observed.id = await self._through_library(task)
                else:
                    observed.id = await self._through_gateway(observed, {**task, "metadata": {"attempt": attempt}})
            except Declined as declined:
                self._write("refused", observed, status=declined.status, error=declined.error, attempt=attempt)
                if not declined.for_now:
                    await asyncio.sleep(AGAIN_S)  # else a key with no budget left would be tried all the time
                    return False
            except (SubmitFailed, *AWAY):
                self._write("maybe", observed, id=None)
            else:
                self._write("accepted", observed, id=observed.id)
                return True
            await asyncio.sleep(AGAIN_S)

    async def _through_gateway(self, observed: ObservedTask, task: dict[str, Any]) -> str:
        answer = await self.senders.request("POST", "/v1/tasks", task, key=observed.key)
        return str(answer["id"])

    async def _through_library(self, task: dict[str, Any]) -> str:
        """Submit with an id of our own, so that a repeated submit makes one task. Returns the id."""
        task_id = str(uuid.uuid4())
        for _ in range(8):
            with suppress(SubmitFailed, *AWAY):
                try:
                    return (await self.senders.library.submit(**task, task_id=task_id)).id
                except TaskExists:
                    return task_id
            await asyncio.sleep(AGAIN_S)
        raise SubmitFailed("the servers stay away")

    async def _send_plain(self, observed: ObservedTask, manner: Manner) -> None:
        """Send once: without an answer, nobody can tell whether the message arrived."""
        task_id = str(uuid.uuid4())
        self._write("maybe", observed, id=task_id)
        try:
            await self.senders.send_plain(task_id, observed.task, manner.tier)
        except Exception:  # noqa: BLE001 - kombu has many names for a server that is away
            return
        self._write("accepted", observed, id=task_id)
        if manner.cancel_after is not None:
            observed.id = task_id
            await self._cancel(observed, manner.cancel_after)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def _read(self, observed: ObservedTask, manner: Manner) -> None:
        leaves = manner.leaves_after
        while True:
            start = observed.entries[-1][1] + 1 if observed.entries else 0
            self.journal.write("came", id=observed.id, **{"from": start})
            why = "broke"
            try:
                stream = (
                    self._by_library(observed, start) if manner.via == "redis" else self._by_gateway(observed, start)
                )
                async with aclosing(stream) as batches:
                    async for entries in batches:
                        if leaves is not None:
                            entries, leaves = entries[:leaves], leaves - len(entries)
                        self._got(observed, entries)
                        if entries and _is_end(entries[-1][1]):
                            return
                        if leaves is not None and leaves <= 0:
                            leaves, why = None, "left"
                            break
            except TaskNotFound:
                self.journal.write("left", id=observed.id, why="not found")
                return
            except (Declined, PenstockError, *AWAY) as error:
                self.journal.write("left", id=observed.id, why=repr(error)[:100])
                if isinstance(error, Declined) and error.status == 404:
                    return
            else:
                self.journal.write("left", id=observed.id, why=why)
            await asyncio.sleep(AGAIN_S)

    def _got(self, observed: ObservedTask, entries: list[tuple[int, Any]]) -> None:
        if entries:
            self.journal.write("got", id=observed.id, entries=entries)
            observed.entries += [(0.0, position, entry) for position, entry in entries]

    async def _by_library(self, observed: ObservedTask, start: int) -> AsyncGenerator[list[tuple[int, Any]]]:
        async with aclosing(self.senders.library.get(str(observed.id)).batches(start)) as batches:
            async for events in batches:
                yield [(event.position, _entry(event)) for event in events]

    async def _by_gateway(self, observed: ObservedTask, start: int) -> AsyncGenerator[list[tuple[int, Any]]]:
        path = f"/v1/tasks/{observed.id}/events?from={start}"
        async with aclosing(self.senders.events("GET", path, key=observed.key)) as events:
            async for some in events:
                parsed = [
                    (event.kind, json.loads(event.data)) for event in some if event.kind in ("token", "prompt", "end")
                ]
                yield [(data["position"], _gateway_entry(kind, data)) for kind, data in parsed]

    async def _poll(self, observed: ObservedTask) -> None:
        while True:
            try:
                body = await self.senders.request("GET", f"/v1/tasks/{observed.id}", key=observed.key)
                if body["status"] not in ("queued", "in_progress"):
                    self.journal.write("final", id=observed.id, body=body)
                    return
            except Declined as declined:
                if declined.status == 404:
                    return
            except AWAY:
                pass
            await asyncio.sleep(POLL_S)

    async def _cancel(self, observed: ObservedTask, after: float) -> None:
        """Cancel after `after` seconds, repeated until answered."""
        await asyncio.sleep(after)
        while True:
            # Written before the request: this process may be killed between the cancel and its answer.
            self.journal.write("cancel", id=observed.id, accepted=None, status=None)
            try:
                if observed.via == "redis" or (
                    observed.via == "celery" and self.senders.holders
                ):  # no key is a plain task's
                    accepted, status = await self.senders.library.get(str(observed.id)).cancel(), None
                else:
                    answer = await self.senders.request("POST", f"/v1/tasks/{observed.id}/cancel", key=observed.key)
                    accepted, status = answer["accepted"], answer["status"]
            except TaskNotFound:
                return
            except Declined as declined:
                if declined.status == 404:
                    return
            except (PenstockError, *AWAY):
                pass
            else:
                self.journal.write("cancel", id=observed.id, accepted=accepted, status=status)
                return
            await asyncio.sleep(AGAIN_S)

    async def _wait(self, observed: ObservedTask, manner: Manner) -> None:
        """Call OpenAI's completions, whose callers do not resume a broken answer."""
        body: dict[str, Any] = {name: observed.task[name] for name in _SHARED if name in observed.task}
        body |= {"stream": True, "service_tier": _TIERS.get(manner.tier, manner.tier)}
        texts, whole = [""] * observed.task["n"], False
        leaves = manner.cancel_after
        try:
            async with (
                asyncio.timeout(leaves),
                aclosing(self.senders.events("POST", "/v1/completions", body, key=observed.key)) as events,
            ):
                async for some in events:
                    for event in some:
                        whole |= event.data == "[DONE]"
                        if event.data != "[DONE]":
                            self._chunk(observed, json.loads(event.data), texts)
        except Declined as declined:
            self._write("refused", observed, status=declined.status, error=declined.error)
            return
        except AWAY:
            pass
        if observed.id is not None:
            if not whole:
                self.journal.write("cancel", id=observed.id, accepted=None, status=None)  # by leaving
            self._write("text", observed, texts=texts, whole=whole)

    def _chunk(self, observed: ObservedTask, chunk: dict[str, Any], texts: list[str]) -> None:
        if observed.id is None and "id" in chunk:
            observed.id = str(chunk["id"]).partition("-")[2]
            self._write("maybe", observed, id=observed.id)
        for choice in chunk.get("choices", ()):
            texts[choice["index"]] += choice["text"]


def _entry(event: Event) -> Any:
    """The event as a stream entry, reduced to what readers are shown."""
    if isinstance(event, Token):
        return [event.choice, event.index, event.token_id, event.text, event.finish_reason]
    if isinstance(event, Prompt):
        return {"prompt": event.first, "token_ids": list(event.token_ids)}
    if isinstance(event, Chunk):
        return {"chunk": event.offset}
    return {"end": event.status, "reasons": list(event.reasons), "usage": event.usage, "error": event.error}


def _gateway_entry(event: str, data: dict[str, Any]) -> Any:
    if event == "token":
        return [data["choice"], data["index"], data["token_id"], data["text"], data.get("finish_reason")]
    if event == "prompt":
        return {"prompt": data["first"], "token_ids": [token["token_id"] for token in data["tokens"]]}
    if event == "chunk":
        return {"chunk": data["first"]}
    return {"end": data["status"], "reasons": data["finish_reasons"], "usage": data["usage"], "error": data["error"]}


def _is_end(entry: Any) -> bool:
    return isinstance(entry, dict) and "end" in entry


async def spy(senders: Senders, journal: Journal, observed: ObservedTask) -> None:
    """Ask about this task as a stranger would, for some of the tasks. Without keys there are no strangers."""
    rng = random.Random(f"{observed.number} spy")  # noqa: S311 - it draws a load, it guards nothing
    strangers = [holder for holder in senders.holders.values() if holder.tenant != senders.tenant(observed.key)]
    if not strangers or rng.random() > STRANGERS_SHARE:
        return
    by = rng.choice(strangers).id
    for method, end in _REQUESTS:
        try:
            await senders.request(method, f"/v1/tasks/{observed.id}{end}", key=by)
            status = 200
        except Declined as declined:
            status = declined.status
        except AWAY:
            continue
        journal.write("spied", id=observed.id, by=by, status=status)
    try:
        listing = await senders.request("GET", "/v1/tasks?limit=100", key=by)
    except (Declined, *AWAY):
        return
    journal.write("listed", by=by, ids=[task["id"] for task in listing["data"]])
