"""Submits one task and reads it to its end, through faults: unanswered requests are repeated."""

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
from producers.contract.stream.events import Event, Prompt, Token
from producers.errors import PenstockError, SubmitFailed, TaskExists, TaskNotFound
from workers.chaos.checker.history import Seen
from workers.chaos.journal import Journal
from workers.chaos.load import Manner
from workers.chaos.senders import AWAY, Declined, Senders
from workers.chaos.spy import spy

#: Pause before a request is repeated (s).
AGAIN_S: Final = 0.25
POLL_S: Final = 0.4
#: Fields that a task and OpenAI's completions share.
_SHARED: Final = ("model", "prompt", *declared(SamplingParams))
_TIERS: Final = {"batch": "flex"}


@dataclass(slots=True)
class Talk:
    """Submits and reads tasks, and writes the journal. `quiet`: the tasks belong to the run without faults."""

    senders: Senders
    journal: Journal
    quiet: bool = False

    async def whole(self, manner: Manner, task: dict[str, Any]) -> None:
        """Submit a task and read it as its manner says."""
        if manner.timeout is not None:
            task = {**task, "timeout": manner.timeout}
        seen = Seen(manner.number, manner.variant, manner.via, task, self.quiet, self._key(manner))
        about = {"key": seen.key} if seen.key else {}
        self._write("ask", seen, v=seen.variant, via=seen.via, task=task, **about)
        if manner.via == "waiting":
            await self._wait(seen, manner)
        elif await self._submit(seen, manner):
            await self.follow(seen, manner)

    def _key(self, manner: Manner) -> str | None:
        """The id of the key to submit with; the last one in quiet. None for what does not pass the gateway."""
        keys = [] if manner.via in ("redis", "celery") else list(self.senders.holders)
        if self.quiet or not keys:
            return keys[-1] if keys else None
        return random.Random(f"{manner.number} key").choice(keys[:-1] or keys)  # noqa: S311

    async def follow(self, seen: Seen, manner: Manner) -> None:
        """Read an accepted task to its end."""
        cancelling = None
        if manner.cancel_after is not None and all(answer is None for answer in seen.cancels):
            cancelling = asyncio.create_task(self._cancel(seen, manner.cancel_after))
        await spy(self.senders, self.journal, seen)
        if manner.via == "poll":
            await self._poll(seen)
        elif manner.via in ("http", "redis"):
            await self._read(seen, manner)
        if cancelling is not None:
            await cancelling

    def _write(self, event: str, seen: Seen, **fields: Any) -> None:
        about = {"k": seen.number} | ({"quiet": True} if seen.quiet else {})
        self.journal.write(event, **about, **fields)

    # ---- submitting -------------------------------------------------------------------------------------------

    async def _submit(self, seen: Seen, manner: Manner) -> bool:
        """Submit until answered. Returns whether there is a task to read; Celery's tasks have no reader."""
        if manner.via == "celery":
            await self._send_plain(seen, manner)
            return False
        task = {**seen.task, "tier": manner.tier}
        while True:
            attempt = str(uuid.uuid4())
            try:
                if manner.via == "redis":
                    seen.id = await self._through_library(task)
                else:
                    seen.id = await self._through_gateway(seen, {**task, "metadata": {"attempt": attempt}})
            except Declined as declined:
                self._write("refused", seen, status=declined.status, error=declined.error, attempt=attempt)
                if not declined.for_now:
                    await asyncio.sleep(AGAIN_S)  # else a key with no budget left would be asked all the time
                    return False
            except (SubmitFailed, *AWAY):
                self._write("maybe", seen, id=None)
            else:
                self._write("accepted", seen, id=seen.id)
                return True
            await asyncio.sleep(AGAIN_S)

    async def _through_gateway(self, seen: Seen, task: dict[str, Any]) -> str:
        told = await self.senders.ask("POST", "/v1/tasks", task, key=seen.key)
        return str(told["id"])

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

    async def _send_plain(self, seen: Seen, manner: Manner) -> None:
        """Send once: without an answer, nobody can tell whether the message arrived."""
        task_id = str(uuid.uuid4())
        self._write("maybe", seen, id=task_id)
        try:
            await self.senders.send_plain(task_id, seen.task, manner.tier)
        except Exception:  # noqa: BLE001 - kombu has many names for a server that is away
            return
        self._write("accepted", seen, id=task_id)
        if manner.cancel_after is not None:
            seen.id = task_id
            await self._cancel(seen, manner.cancel_after)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def _read(self, seen: Seen, manner: Manner) -> None:
        leaves = manner.leaves_after
        while True:
            start = seen.entries[-1][1] + 1 if seen.entries else 0
            self.journal.write("came", id=seen.id, **{"from": start})
            why = "broke"
            try:
                stream = self._by_library(seen, start) if manner.via == "redis" else self._by_gateway(seen, start)
                async with aclosing(stream) as batches:
                    async for entries in batches:
                        if leaves is not None:
                            entries, leaves = entries[:leaves], leaves - len(entries)
                        self._got(seen, entries)
                        if entries and _is_end(entries[-1][1]):
                            return
                        if leaves is not None and leaves <= 0:
                            leaves, why = None, "left"
                            break
            except TaskNotFound:
                self.journal.write("left", id=seen.id, why="not found")
                return
            except (Declined, PenstockError, *AWAY) as error:
                self.journal.write("left", id=seen.id, why=repr(error)[:100])
                if isinstance(error, Declined) and error.status == 404:
                    return
            else:
                self.journal.write("left", id=seen.id, why=why)
            await asyncio.sleep(AGAIN_S)

    def _got(self, seen: Seen, entries: list[tuple[int, Any]]) -> None:
        if entries:
            self.journal.write("got", id=seen.id, entries=entries)
            seen.entries += [(0.0, position, entry) for position, entry in entries]

    async def _by_library(self, seen: Seen, start: int) -> AsyncGenerator[list[tuple[int, Any]]]:
        async with aclosing(self.senders.library.get(str(seen.id)).batches(start)) as batches:
            async for events in batches:
                yield [(event.position, _entry(event)) for event in events]

    async def _by_gateway(self, seen: Seen, start: int) -> AsyncGenerator[list[tuple[int, Any]]]:
        path = f"/v1/tasks/{seen.id}/events?from={start}"
        async with aclosing(self.senders.events("GET", path, key=seen.key)) as events:
            async for some in events:
                told = [(one.kind, json.loads(one.data)) for one in some if one.kind in ("token", "prompt", "end")]
                yield [(said["position"], _told(kind, said)) for kind, said in told]

    async def _poll(self, seen: Seen) -> None:
        while True:
            try:
                body = await self.senders.ask("GET", f"/v1/tasks/{seen.id}", key=seen.key)
                if body["status"] not in ("queued", "in_progress"):
                    self.journal.write("final", id=seen.id, body=body)
                    return
            except Declined as declined:
                if declined.status == 404:
                    return
            except AWAY:
                pass
            await asyncio.sleep(POLL_S)

    async def _cancel(self, seen: Seen, after: float) -> None:
        """Cancel after `after` seconds, repeated until answered."""
        await asyncio.sleep(after)
        while True:
            # Written before the request: this process may be killed between the cancel and its answer.
            self.journal.write("cancel", id=seen.id, accepted=None, status=None)
            try:
                if seen.via == "redis" or (seen.via == "celery" and self.senders.holders):  # no key is a plain task's
                    accepted, status = await self.senders.library.get(str(seen.id)).cancel(), None
                else:
                    told = await self.senders.ask("POST", f"/v1/tasks/{seen.id}/cancel", key=seen.key)
                    accepted, status = told["accepted"], told["status"]
            except TaskNotFound:
                return
            except Declined as declined:
                if declined.status == 404:
                    return
            except (PenstockError, *AWAY):
                pass
            else:
                self.journal.write("cancel", id=seen.id, accepted=accepted, status=status)
                return
            await asyncio.sleep(AGAIN_S)

    async def _wait(self, seen: Seen, manner: Manner) -> None:
        """Call OpenAI's completions, whose callers do not resume a broken answer."""
        body: dict[str, Any] = {name: seen.task[name] for name in _SHARED if name in seen.task}
        body |= {"stream": True, "service_tier": _TIERS.get(manner.tier, manner.tier)}
        texts, whole = [""] * seen.task["n"], False
        leaves = manner.cancel_after
        try:
            async with (
                asyncio.timeout(leaves),
                aclosing(self.senders.events("POST", "/v1/completions", body, key=seen.key)) as events,
            ):
                async for some in events:
                    for event in some:
                        whole |= event.data == "[DONE]"
                        if event.data != "[DONE]":
                            self._chunk(seen, json.loads(event.data), texts)
        except Declined as declined:
            self._write("refused", seen, status=declined.status, error=declined.error)
            return
        except AWAY:
            pass
        if seen.id is not None:
            if not whole:
                self.journal.write("cancel", id=seen.id, accepted=None, status=None)  # by leaving
            self._write("text", seen, texts=texts, whole=whole)

    def _chunk(self, seen: Seen, chunk: dict[str, Any], texts: list[str]) -> None:
        if seen.id is None and "id" in chunk:
            seen.id = str(chunk["id"]).partition("-")[2]
            self._write("maybe", seen, id=seen.id)
        for choice in chunk.get("choices", ()):
            texts[choice["index"]] += choice["text"]


def _entry(event: Event) -> Any:
    """The event as a stream entry, reduced to what readers are shown."""
    if isinstance(event, Token):
        return [event.choice, event.index, event.token_id, event.text, event.finish_reason]
    if isinstance(event, Prompt):
        return {"prompt": event.first, "token_ids": list(event.token_ids)}
    return {"end": event.status, "reasons": list(event.reasons), "usage": event.usage, "error": event.error}


def _told(event: str, said: dict[str, Any]) -> Any:
    if event == "token":
        return [said["choice"], said["index"], said["token_id"], said["text"], said.get("finish_reason")]
    if event == "prompt":
        return {"prompt": said["first"], "token_ids": [one["token_id"] for one in said["tokens"]]}
    return {"end": said["status"], "reasons": said["finish_reasons"], "usage": said["usage"], "error": said["error"]}


def _is_end(entry: Any) -> bool:
    return isinstance(entry, dict) and "end" in entry
