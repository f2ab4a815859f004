"""A running system and the tasks that were sent to it, each read as it was made and checked for being whole."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from producers.admin.fleet import Fleet, read_fleet
from producers.client.aio import AsyncClient
from workers.trials.bench.connection import Broken, Connections


@dataclass(slots=True)
class One:
    """A request, on this process's clock. `wrong`: what is wrong with its answer."""

    tier: str
    sent: float
    tokens: int
    first: float = 0.0
    ended: float = 0.0
    id: str = ""
    wrong: str = ""


@dataclass(slots=True)
class System:
    """A running `penstock up`, and what was sent to it."""

    url: str
    server: str
    client: AsyncClient
    model: str
    sent: list[One] = field(default_factory=list)
    seen: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(time, workers wanted, workers up, tasks queued)."""
    pools: set[str] = field(default_factory=set)
    """All pools that were scaled."""

    async def fleet(self) -> Fleet:
        return await read_fleet(self.client.store, self.client.broker)

    async def workers(self) -> int:
        return sum(len(pool.workers) for pool in (await self.fleet()).pools)

    async def watch(self) -> None:
        """Note the numbers until cancelled."""
        while True:
            fleet = await self.fleet()
            self.pools |= fleet.scaling.states.keys()
            wanted = sum(int(state.get("wanted", 0)) for state in fleet.scaling.states.values())
            queued = sum(sum(pool.queued.values()) for pool in fleet.pools)
            self.seen.append((time.monotonic(), wanted, sum(len(pool.workers) for pool in fleet.pools), queued))
            await asyncio.sleep(0.25)

    async def task(self, connections: Connections, tier: str, prompt: int, output: int) -> One:
        """Send one task and read its events. It is noted in any case."""
        one = One(tier, time.monotonic(), output)
        self.sent.append(one)
        body = {"model": self.model, "prompt": [5 + k % 90 for k in range(prompt)], "max_tokens": output, "tier": tier}
        try:
            async with connections.request("POST", "/v1/tasks", {**body, "ignore_eos": True}) as answer:
                said = await answer.json()
                one.id = said.get("id", "")
                one.wrong = "" if answer.status == 202 else f"{answer.status}: {said}"
            if not one.wrong:
                await self._read(connections, one)
        except Broken as error:
            one.wrong = f"broken: {error}"
        one.ended = time.monotonic()
        return one

    async def _read(self, connections: Connections, one: One) -> None:
        async with connections.request("GET", f"/v1/tasks/{one.id}/events") as answer:
            count, status = 0, ""
            async for events in answer.events():
                for event in events:
                    if event.kind == "token":
                        one.first = one.first or time.monotonic()
                        if event.id != str(count):
                            one.wrong = f"position {event.id} came at {count}"
                        count += 1
                    elif event.kind == "end":
                        status = json.loads(event.data)["status"]
        if status != "completed" or count != one.tokens:
            one.wrong = one.wrong or f"ended {status or 'without an end'} after {count} of {one.tokens} tokens"
