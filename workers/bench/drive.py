"""Sends a load and records when its tokens arrived.

Each request submits a task and follows its stream, over one connection if the server allows. In an open loop a request
is due at its time, whatever became of earlier ones. Its latency counts from then, also if the limit on concurrency or
the client itself delays it. Otherwise a slow server would look fast by slowing down its client.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from workers.bench.connection import Broken, Connections
from workers.bench.load import Ask

#: Interval (s) at which the client measures its event loop's lag.
LOOK_S: Final = 0.02
#: Time limit (s) for cancelling open tasks when the bench is stopped.
CANCEL_S: Final = 5.0


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds since the start of the bench."""

    number: int
    tier: str
    due: float
    """The time at which it should have been sent."""
    sent: float = 0.0
    tokens: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of the tokens."""
    ended: float = 0.0
    error: str | None = None
    """None: the request completed."""
    task_id: str = ""
    queue_wait: float | None = None
    """Seconds from its record to the start of its run, by the store's clock."""
    prompt_tokens: int = 0


@dataclass(slots=True)
class Client:
    """The client's own cost."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    lags: array[float] = field(default_factory=lambda: array("d"))
    """Measured lags of the event loop (s)."""


async def drive(
    url: str,
    asks: Iterable[Ask],
    *,
    concurrency: int | None,
    silence: float = 60.0,
    note: Callable[[Sample], None] = lambda sample: None,
    duration: float | None = None,
) -> tuple[list[Sample], Client]:
    """Send `asks` for at most `duration` seconds, at most `concurrency` at a time.

    Returns the samples and the client's cost. `note` gets each ended sample. A request without data for `silence`
    seconds has failed. When cancelled, this cancels the open tasks.
    """
    run = _Run(Connections(url), silence, note)
    client, cpu = Client(), time.process_time()
    looking = asyncio.create_task(_look(client))
    try:
        await run.send(asks, concurrency, duration)
        client.wall_s, client.cpu_s = run.now(), time.process_time() - cpu
        await run.look_up()
    except asyncio.CancelledError:
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await run.cancel()
        raise
    finally:
        looking.cancel()
        for one in run.going:
            one.cancel()
        run.connections.close()
    return run.samples, client


@dataclass(slots=True)
class _Run:
    connections: Connections
    silence: float
    note: Callable[[Sample], None]
    samples: list[Sample] = field(init=False, default_factory=list)
    going: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _start: float = field(init=False, default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def send(self, asks: Iterable[Ask], concurrency: int | None, duration: float | None) -> None:
        """Send each when it is due and there is room, and follow all to their ends."""
        slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        for ask in asks:
            if duration is not None and max(ask.due, self.now()) >= duration:
                break
            if ask.due > self.now():
                await asyncio.sleep(ask.due - self.now())
            if slots is not None:
                await slots.acquire()
                if duration is not None and self.now() >= duration:
                    break
            one = self._begin(ask)
            if slots is not None:
                one.add_done_callback(lambda _: slots.release())
        while self.going:
            await asyncio.wait(self.going)

    def _begin(self, ask: Ask) -> asyncio.Task[None]:
        sample = Sample(ask.number, str(ask.task["tier"]), ask.due or self.now())
        self.samples.append(sample)
        one = asyncio.create_task(self._one(sample, ask.task))
        self.going.add(one)
        one.add_done_callback(self.going.discard)
        return one

    async def _one(self, sample: Sample, task: dict[str, Any]) -> None:
        sample.sent = self.now()
        try:
            async with asyncio.timeout(self.silence):
                async with self.connections.request("POST", "/v1/tasks", task) as answer:
                    told = await answer.json()
                if answer.status != 202:
                    raise Broken(f"{answer.status} {told.get('error', {}).get('code') or 'error'}")
                sample.task_id = told["id"]
            await self._follow(sample)
        except TimeoutError:
            sample.error = "silence"
        except (Broken, KeyError, AttributeError, ValueError) as error:
            sample.error = " ".join(str(error).split())[:100] or type(error).__name__
        sample.ended = self.now()
        self.note(sample)

    async def _follow(self, sample: Sample) -> None:
        async with (
            asyncio.timeout(self.silence) as patience,
            self.connections.request("GET", f"/v1/tasks/{sample.task_id}/events") as answer,
        ):
            if answer.status != 200:
                raise Broken(f"{answer.status} for the stream")
            told: dict[str, Any] = {}
            async for events in answer.events():
                at = self.now()
                patience.reschedule(asyncio.get_running_loop().time() + self.silence)
                for event in events:
                    # A token's JSON is not parsed: only its arrival counts.
                    if event.kind == "token":
                        sample.tokens.append(at)
                    elif event.kind in ("end", "error"):
                        told = json.loads(event.data)
            sample.prompt_tokens = (told.get("usage") or {}).get("prompt_tokens", 0)
            if told.get("status") not in ("completed", "incomplete"):
                failure = (told.get("error") or {}).get("code") or told.get("status") or "the stream broke off"
                raise Broken(str(failure))

    async def look_up(self) -> None:
        """Set each sample's queue wait. It runs after the load, so that it adds nothing to it."""
        slots = asyncio.Semaphore(16)

        async def one(sample: Sample) -> None:
            async with slots:
                with suppress(Broken, KeyError, TypeError, TimeoutError):
                    async with (
                        asyncio.timeout(self.silence),
                        self.connections.request("GET", f"/v1/tasks/{sample.task_id}") as answer,
                    ):
                        record = await answer.json()
                        sample.queue_wait = record["started_at"] - record["created_at"]

        await asyncio.gather(*(one(sample) for sample in self.samples if sample.task_id))

    async def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        for sample in self.samples:
            if sample.task_id and not sample.ended:
                with suppress(Broken):
                    async with self.connections.request("POST", f"/v1/tasks/{sample.task_id}/cancel") as answer:
                        await answer.json()


async def _look(client: Client) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        client.lags.append(time.perf_counter() - before - LOOK_S)
