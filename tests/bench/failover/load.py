"""Streams that are kept open, read over HTTP, and compared with those of a quiet run."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from workers.trials.bench.connection import Broken, Connections

#: Different tasks; each has a seed of its own.
VARIANTS = 16
#: Pause (s) before a reader tries a port again that gave it nothing.
RETRY_S = 0.02
PATIENCE_S = 120.0


@dataclass(slots=True, eq=False)
class Stream:
    """One task's stream as its reader saw it."""

    id: str
    variant: int
    came: list[tuple[float, int]] = field(default_factory=list)
    """Each token: when it came (monotonic s), and its id."""
    faults: list[str] = field(default_factory=list)
    returns: list[tuple[float, float]] = field(default_factory=list)
    """Each reconnect that worked: when it was tried, and when its first event came."""
    end: str = ""
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: dict[str, object]) -> None:
        """Note an event. Its position and its index must be the next ones."""
        if "token_id" not in event:
            self.end = str(event["status"])
            return
        if not event["position"] == event["index"] == len(self.came):
            self.faults.append(f"position {event['position']}, index {event['index']} after {len(self.came)} tokens")
        self.came.append((time.monotonic(), int(str(event["token_id"]))))
        self.more.set()

    async def token(self, position: int) -> float:
        """When this token came (monotonic s); waits for it."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.came) <= position:
                self.more.clear()
                await self.more.wait()
        return self.came[position][0]


class Load:
    """Keeps `size` streams open until it is closed. `ports`: of gateways; the first takes readers, the next ones take
    those that lost it. `tokens`: length of each stream."""

    def __init__(self, ports: list[int], size: int, tokens: int) -> None:
        self.ports = ports
        self.open: set[Stream] = set()
        self.done: list[Stream] = []
        self.faults: list[str] = []
        self._size, self.tokens = size, tokens
        self._right: dict[int, list[int]] = {}
        self._numbers = count()
        self._gateways = {port: Connections(f"http://127.0.0.1:{port}") for port in ports}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def start(self) -> None:
        """Make each variant once, undisturbed, then keep streams open."""
        quiet = await asyncio.gather(*(self._whole(variant) for variant in range(VARIANTS)))
        self._right = {stream.variant: [token for _, token in stream.came] for stream in quiet}
        assert all(len(tokens) == self.tokens for tokens in self._right.values())
        self._tasks = [asyncio.create_task(self._keep()) for _ in range(self._size)]

    async def close(self) -> None:
        """Read the open streams to their end."""
        self._closing = True
        await asyncio.gather(*self._tasks)
        for gateway in self._gateways.values():
            gateway.close()

    async def _keep(self) -> None:
        while not self._closing:
            stream = await self._whole(next(self._numbers) % VARIANTS)
            right = [token for _, token in stream.came] == self._right[stream.variant]
            if stream.faults or stream.end != "completed" or not right:
                self.faults.append(f"{stream.id} ({stream.end}, as it should be: {right}): {stream.faults[:3]}")
                print(self.faults[-1], flush=True)
            self.done.append(stream)

    async def _whole(self, variant: int) -> Stream:
        async with asyncio.timeout(PATIENCE_S):
            stream = Stream(await self._submit(variant), variant)
        self.open.add(stream)
        reading, came = asyncio.create_task(self._read(stream)), -1
        while not reading.done() and len(stream.came) > came:
            came = len(stream.came)
            await asyncio.wait([reading], timeout=PATIENCE_S)
        if reading.done():
            reading.result()
        else:
            stream.faults.append(f"no token came within {PATIENCE_S} s after {came}")
            reading.cancel()
        self.open.discard(stream)
        return stream

    async def _submit(self, variant: int) -> str:
        """Submit until it is accepted, as one task."""
        task = {"model": "tiny", "prompt": f"def f{variant}(x):", "seed": variant, "temperature": 1.0}
        task |= {"max_tokens": self.tokens, "ignore_eos": True}
        key = {"Idempotency-Key": f"{variant}-{time.monotonic_ns()}"}
        port = self.ports[0]
        while True:
            with suppress(Broken):
                async with self._gateways[port].request("POST", "/v1/tasks", task, key) as answer:
                    told = await answer.json()
                assert answer.status == 202 or answer.status >= 500, told
                if answer.status == 202:
                    return str(told["id"])
            await asyncio.sleep(RETRY_S)
            port = self._after(port)

    async def _read(self, stream: Stream) -> None:
        port = self.ports[0]
        while not stream.end:
            came = len(stream.came)
            with suppress(Broken):
                await self._connection(stream, port)
            if len(stream.came) == came:
                await asyncio.sleep(RETRY_S)
            port = self._after(port)

    def _after(self, port: int) -> int:
        """The gateway that is tried after this one."""
        return self.ports[(self.ports.index(port) + 1) % len(self.ports)]

    async def _connection(self, stream: Stream, port: int) -> None:
        """Read what one connection gives. Raises Broken where it cannot be made, or breaks."""
        began, back = time.monotonic(), bool(stream.came)
        path = f"/v1/tasks/{stream.id}/events?from={len(stream.came)}"
        async with self._gateways[port].request("GET", path) as answer:
            async for event in (event async for events in answer.events() for event in events):
                if event.kind == "error":  # the store was away: come again
                    return
                if back:
                    stream.returns.append((began, time.monotonic()))
                    back = False
                stream.take(json.loads(event.data))
