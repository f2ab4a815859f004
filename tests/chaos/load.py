"""A continuous mixed load: tasks submitted through the client library, every stream followed by a reader.

Everything about a task is a function of the run's seed and the task's number, so that the same tasks can be run again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import textwrap
import threading
import time
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from producers import AsyncClient, Client, Event

TIERS = ("priority", "default", "default", "flex", "batch")


@cache
def _texts() -> list[str]:
    """Something to go on from: beginnings of the standard library's own functions."""
    found = []
    for module in (json.decoder, random, textwrap, inspect, asyncio.queues):
        for _, function in inspect.getmembers(module, inspect.isroutine):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                found.append(inspect.getsource(function)[:400])
    return found


def task_of(seed: int, number: int, model: str, longest: int) -> dict[str, Any]:
    """The fields of a task: tiers, lengths, one choice or two, greedy or sampled, with or without an early end."""
    rng = random.Random(f"{seed}:{number}")
    text = rng.choice(_texts())
    task = {
        "model": model,
        "prompt": text[: rng.randint(20, len(text))],
        "max_tokens": min(longest, 8 + int(rng.expovariate(3 / longest))),
        "n": rng.choice((1, 1, 2)),
        "tier": rng.choice(TIERS),
        "seed": rng.getrandbits(31),
        "ignore_eos": rng.random() < 0.5,
        "temperature": 0.0,
    }
    if rng.random() < 0.5:
        task |= {"temperature": 0.8, "top_p": 0.95, "top_k": rng.choice((0, 50))}
    return task


@dataclass(slots=True)
class Followed:
    """One task, and what its reader was given: (time, event), in the order in which it came."""

    number: int
    id: str
    greedy: bool
    n: int
    received: list[tuple[float, Event]] = field(default_factory=list)
    visits: int = 0
    """How often its reader came: some leave in the midst, and come back for the rest."""
    ended: bool = False
    error: str | None = None


class Load:
    """Keeps `open_tasks` tasks open until `stop`; `wait` until all streams have ended."""

    def __init__(self, url: str, *, seed: int, model: str, open_tasks: int, longest: int) -> None:
        self._url, self._seed, self._model, self._longest = url, seed, model, longest
        self._room = threading.Semaphore(open_tasks)
        self._stopping = threading.Event()
        self.followed: list[Followed] = []
        self.failures: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._reading = threading.Thread(target=self._loop.run_forever, name="readers", daemon=True)
        self._producing = threading.Thread(target=self._produce, name="producer", daemon=True)
        self._readers: list[Future[None]] = []
        self._client: AsyncClient | None = None
        """Of all readers; made on their loop."""

    def start(self) -> None:
        self._reading.start()
        self._producing.start()

    def stop(self) -> None:
        """Submit no more."""
        self._stopping.set()
        self._room.release()
        self._producing.join()

    def wait(self, seconds: float) -> bool:
        """Whether every stream came to its end in time; then everything is closed."""
        deadline = time.monotonic() + seconds
        while not all(reader.done() for reader in self._readers) and time.monotonic() < deadline:
            time.sleep(0.05)
        for reader in self._readers:
            reader.cancel()
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._reading.join()
        self._loop.close()
        return all(task.ended for task in self.followed)

    def _produce(self) -> None:
        try:
            with Client(self._url) as client:
                while self._room.acquire() and not self._stopping.is_set():
                    number = len(self.followed)
                    fields = task_of(self._seed, number, self._model, self._longest)
                    handle = client.submit(**fields)
                    task = Followed(number, handle.id, fields["temperature"] == 0, fields["n"])
                    self.followed.append(task)
                    self._readers.append(asyncio.run_coroutine_threadsafe(self._follow(task), self._loop))
        except Exception as error:
            self.failures.append(f"the producer failed: {error!r}")

    async def _follow(self, task: Followed) -> None:
        if self._client is None:
            self._client = AsyncClient(self._url)
        rng = random.Random(f"{self._seed}:{task.number}:reader")
        try:
            while not task.ended:
                task.visits += 1
                leaves = rng.randint(1, 60) if rng.random() < 0.3 else None
                start = task.received[-1][1].position + 1 if task.received else 0
                await self._visit(task, start, leaves)
        except Exception as error:
            task.error = repr(error)
        finally:
            self._room.release()

    async def _visit(self, task: Followed, start: int, leaves: int | None) -> None:
        """Read from `start` to the end, or `leaves` events."""
        assert self._client is not None
        async with aclosing(self._client.get(task.id).stream(start)) as stream:
            async for event in stream:
                task.received.append((time.monotonic(), event))
                if leaves is not None and (leaves := leaves - 1) == 0:
                    return
            task.ended = True
