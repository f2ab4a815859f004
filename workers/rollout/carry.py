"""Takes a rollout from phase to phase, until it has ended. It may stop anywhere, and another process goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from producers.admin.fleet import read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.client.submission import SETTLED_S
from producers.connection.script import parsed, text
from producers.connection.trouble import error_text
from producers.contract import keys
from producers.store.fleet import cards, rollouts
from producers.store.fleet.rollouts import Rollout
from workers.rollout.begin import New
from workers.rollout.seen import Seen

#: Interval (s) of looks.
LOOK_S: Final = 0.5
#: Recorded tasks without a message that are looked at for the old version's.
PAGE: Final = 1000


@dataclass(slots=True)
class Carrier:
    """`client` and `store`: both of the same system. `say` gets what changed, in words.

    `timeout`: longest time (s) for new workers to become ready. `drain_old`: tell idle old workers to drain, once
    nothing waits for them. A server that is away is waited for.
    """

    client: AsyncClient
    store: Redis
    new: New
    say: Callable[[str], None]
    timeout: float
    drain_old: bool = False
    _said: Any = field(init=False, default=None)

    async def run(self, rollout: Rollout) -> Rollout:
        """Go on with it. Returns its last state: `done`, `failed`, `cancelled`, or another's that replaced it."""
        until, mine = time.monotonic() + self.timeout, rollout.version
        while rollout.version == mine and rollout.phase in rollouts.UNDER_WAY:
            try:
                rollout = await (self._start(rollout, until) if rollout.phase == "starting" else self._drain(rollout))
            except FAILURES as error:
                self._tell(f"store or broker do not answer, trying again: {error_text(error)}")
                await asyncio.sleep(LOOK_S)
        return rollout

    async def _start(self, rollout: Rollout, until: float) -> Rollout:
        """Wait for the new workers, and switch. Returns the record that stands."""
        switched = False
        while True:
            stands = self._read(rollout)
            if stands.phase != "starting" or stands.version != rollout.version:
                return self._late(stands) if switched else stands
            current = self._current(rollout)
            if current not in (rollout.before, rollout.version):
                return self._to(stands, "failed", _replaced(current))
            if current == rollout.version:
                return self._to(stands, "draining")
            seen = await self._look(stands)
            unready = f" ({seen.unready} more are not ready)" if seen.unready else ""
            waits = f"ready workers of version {stands.version}: {seen.ready} of {stands.workers}{unready}"
            if seen.ready >= stands.workers:
                await asyncio.to_thread(cards.publish, self.store, self.new.card, self.new.files, rollout.before)
                self._tell(f"new tasks go to version {rollout.version}")
                switched = True
                continue
            why = f"; {seen.trouble}" if seen.trouble else ""
            if seen.given_up or time.monotonic() > until:
                after = "" if seen.given_up else f"after {self.timeout:g} s, "
                return self._to(stands, "failed", f"nothing was switched; {after}{waits}{why}")
            self._tell(waits + why + ("" if seen.starts else " (no autoscaler does: start them)"), seen.told)
            await asyncio.sleep(LOOK_S)

    def _late(self, stands: Rollout) -> Rollout:
        """The record once this process has switched. One that was cancelled, or failed, meanwhile goes on: the card
        decides."""
        mine = stands.version == self.new.version == self._current(stands)
        return self._to(stands, "draining") if mine and stands.phase in ("cancelled", "failed") else stands

    async def _drain(self, rollout: Rollout) -> Rollout:
        """Wait until nothing of the old version is left. Returns the record that stands."""
        settled = time.monotonic() + SETTLED_S
        while True:
            stands = self._read(rollout)
            if stands.phase != "draining" or stands.version != rollout.version:
                return stands
            if (current := self._current(rollout)) != rollout.version:
                return self._to(stands, "failed", _replaced(current))
            seen = await self._look(stands)
            left = seen.left if seen.left != 0 else await self._unsent(rollout)
            over = left == 0 and time.monotonic() > settled
            if over and seen.old == 0:
                return self._to(stands, "done")
            if over and self.drain_old and (told := await drain_idle(self.client, rollout.model, rollout.before)):
                self._tell(f"told {told} workers of version {rollout.before} to drain")
            if left != 0 or seen.old:
                self._tell(_waits(seen, left, rollout, drains=self.drain_old))
            await asyncio.sleep(LOOK_S)

    def _current(self, rollout: Rollout) -> str:
        """The version that new tasks go to; empty if the card is gone."""
        card = cards.read(self.store, rollout.model)
        return "" if card is None else str(card["version"])

    async def _look(self, rollout: Rollout) -> Seen:
        return Seen.of(await read_fleet(self.client.store, self.client.broker), rollout)

    async def _unsent(self, rollout: Rollout) -> int:
        """Tasks of the old version that are recorded, and whose message may not be sent yet."""
        ids = list(map(text, await self.client.store.zrange(keys.SUBMITTING, 0, PAGE - 1)))
        async with self.client.store.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hmget(keys.task(task_id), "model", "version")
            found = await pipe.execute()
        own = [rollout.model, rollout.before]
        return sum([text(value) for value in values] == own for values in found)

    def _read(self, rollout: Rollout) -> Rollout:
        """The record that stands; one that is gone was lost with the store's data, and is written anew."""
        stands = rollouts.read(self.store, rollout.model)
        return rollouts.begin(self.store, rollout) if stands is None else stands

    def _to(self, old: Rollout, phase: str, reason: str = "") -> Rollout:
        new = old.to(phase, rollouts.now(self.store), reason)
        return new if rollouts.change(self.store, old, new) else self._read(old)

    def _tell(self, line: str, about: Any = None) -> None:
        """Once, until something else is told. `about`: what counts as something else; None: any other line."""
        if (about or line) != self._said:
            self._said = about or line
            self.say(line)


def _replaced(current: str) -> str:
    what = f"that of version {current}" if current else "gone"
    return f"the card is {what}: somebody published another one meanwhile"


def _waits(seen: Seen, left: int | None, rollout: Rollout, *, drains: bool) -> str:
    version = rollout.before
    if left != 0:
        start = f"`penstock worker --model {rollout.model}=FOLDER`, the folder of that version"
        hint = "" if seen.old or seen.ends else f" (no worker takes more of them: start one with {start})"
        return f"tasks left of version {version}: {'not known' if left is None else left}{hint}"
    hint = "" if drains or seen.ends else " (no autoscaler does: end them, or say --drain-old)"
    return f"no task is left of version {version}; workers of it that are yet to end: {seen.old}{hint}"


async def drain_idle(client: AsyncClient, model: str, version: str) -> int:
    """Tell each live worker of the version that holds no task to drain. Returns their number; raises redis errors."""
    listed = [one.incarnation for one in await client.broker.workers() if one.remaining_s is not None]
    told = 0
    for incarnation in listed:
        about = parsed(await client.store.get(keys.lease(incarnation)) or "{}")
        mine = (about.get("model"), about.get("version")) == (model, version)
        if mine and about.get("tasks") == 0 and not about.get("draining"):
            told += await client.store.publish(keys.control(incarnation), "drain")
    return told
