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
    run = _Run(Connections(url), silence, time.perf_counter())
    slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
    going: set[asyncio.Task[None]] = set()
    samples: list[Sample] = []
    client, cpu = Client(), time.process_time()
    looking = asyncio.create_task(_look(client))
    try:
        for ask in asks:
            if duration is not None and max(ask.due, run.now()) >= duration:
                break
            if ask.due > run.now():
                await asyncio.sleep(ask.due - run.now())
            if slots is not None:
                await slots.acquire()
                if duration is not None and run.now() >= duration:
                    break
            sample = Sample(ask.number, str(ask.task["tier"]), ask.due or run.now())
            samples.append(sample)
            one = asyncio.create_task(run.one(sample, ask.task, note))
            going.add(one)
            one.add_done_callback(going.discard)
            if slots is not None:
                one.add_done_callback(lambda _: slots.release())
        while going:
            await asyncio.wait(going)
        client.wall_s, client.cpu_s = run.now(), time.process_time() - cpu
        await run.look_up(samples)
    except asyncio.CancelledError:
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await run.cancel([sample for sample in samples if not sample.ended])
        raise
    finally:
        looking.cancel()
        for one in going:
            one.cancel()
        run.connections.close()
    return samples, client


@dataclass(slots=True)
class _Run:
    connections: Connections
    silence: float
    start: float

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def one(self, sample: Sample, task: dict[str, Any], note: Callable[[Sample], None]) -> None:
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
        note(sample)

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

    async def look_up(self, samples: list[Sample]) -> None:
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

        await asyncio.gather(*(one(sample) for sample in samples if sample.task_id))

    async def cancel(self, samples: list[Sample]) -> None:
        for sample in samples:
            if sample.task_id:
                with suppress(Broken):
                    async with self.connections.request("POST", f"/v1/tasks/{sample.task_id}/cancel") as answer:
                        await answer.json()


async def _look(client: Client) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        client.lags.append(time.perf_counter() - before - LOOK_S)
