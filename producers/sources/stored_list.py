"""A list of the store as an inbox: senders RPUSH, messages are taken from its head.

| key | what it holds |
| --- | --- |
| `NAME` | messages that wait |
| `NAME:taken` | hash: a message's id -> its body, of those that a process works on |
| `NAME:hidden` | zset: id -> server time (ms) until which it is hidden from others |
| `NAME:dead` | list: bad messages as JSON `{id, reason, at, body}`; nothing removes them |
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis

from producers.connection.connect import SILENT_S
from producers.connection.script import Call, arun, script
from producers.sources.inbox import Inbox, Received
from producers.store.protocol import PACKAGE

#: Time (s) for which a receive waits for a message.
WAIT_S: Final = 2.0
#: Most messages of one receive.
MOST: Final = 10


class ListInbox(Inbox):
    """A list by its name. `waiting`: connections to the store that may wait, which takes others' place in a pool."""

    def __init__(self, store: Redis, waiting: Redis, name: str, hidden_s: float) -> None:
        self._store, self._waiting, self._name, self.hidden_s = store, waiting, name, hidden_s
        self._taken, self._hidden, self._dead = f"{name}:taken", f"{name}:hidden", f"{name}:dead"

    async def open(self) -> None:
        """A list is there once somebody pushes to it."""

    async def receive(self) -> list[Received]:
        if messages := await self._take():
            return messages
        # It moves the head to where it was: a wait for a message that changes nothing.
        async with asyncio.timeout(WAIT_S + SILENT_S):
            await self._waiting.execute_command("BLMOVE", self._name, self._name, "LEFT", "LEFT", WAIT_S)
        return await self._take()

    async def remove(self, messages: Sequence[Received]) -> None:
        ids = [one.id for one in messages]
        async with asyncio.timeout(SILENT_S), self._store.pipeline(transaction=True) as pipe:
            pipe.hdel(self._taken, *ids)
            pipe.zrem(self._hidden, *ids)
            await pipe.execute()

    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        if messages:
            await self._run("list_hide", (self._hidden,), int(seconds * 1000), *(one.id for one in messages))

    async def bury(self, message: Received, reason: str) -> None:
        letter = {"id": message.id, "reason": reason, "at": int(time.time()), "body": message.body}
        await self._run("list_bury", (self._taken, self._hidden, self._dead), message.id, json.dumps(letter))

    def close(self) -> None:
        """The store's connections are the client's."""

    async def _take(self) -> list[Received]:
        ids = [uuid.uuid4().hex for _ in range(MOST)]
        found = await self._run("list_take", (self._name, self._taken, self._hidden), int(self.hidden_s * 1000), *ids)
        said = [one.decode("utf-8", "surrogateescape") for one in found]
        return [Received(message_id, body) for message_id, body in zip(said[::2], said[1::2], strict=True)]

    async def _run(self, name: str, keys: Sequence[str], *args: str | int) -> list[bytes]:
        async with asyncio.timeout(SILENT_S):
            answer: list[bytes] = await arun(self._store, Call(script(PACKAGE, name), keys, args))
        return answer
