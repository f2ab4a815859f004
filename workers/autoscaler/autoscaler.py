"""The autoscaler: leads, reads the fleet, decides each pool's number, keeps the decisions, acts on them.

    acquire the lead ─▶ tick: read once ─▶ decide each pool ─▶ keep (SCALE, fenced by the lead) ─▶ act ─▶ wait ─▶ tick
                          ▲                                        │ another leads
                          └──────────────── acquire ◀──────────────┘

While a pool wants no worker, its first task ends the pause: a glance at its queues is one round trip.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from redis.exceptions import NoPermissionError

from producers.admin.fleet import Fleet, read_fleet
from producers.broker.base import Broker
from producers.client.aio import AsyncClient
from producers.client.leases import Leadership
from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.trouble import error_text
from producers.contract import keys
from producers.contract.levels import looked_after
from producers.contract.profile import sane
from producers.store.fleet import scaling
from workers.autoscaler.control import Acting, Control
from workers.autoscaler.pools import Pools, PoolSettings, Scaled

log = logging.getLogger(__name__)

#: Time limit (s) of one reading, and of keeping the decisions.
LIMIT_S: Final = 3.0
#: Time limit (s) of a glance.
GLANCE_LIMIT_S: Final = 1.0
#: Time (s) without a good reading after which the process says that it is not ready.
SILENT_S: Final = 10.0

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """Settings of one autoscaler. Times are seconds."""

    name: str = field(default_factory=lambda: f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}")
    lease: float = 5.0
    """Silence of the leader after which another autoscaler leads."""
    every: float = 1.0
    """Interval between ticks."""
    glance: float = 0.1
    """Interval of looks at the queues of pools that want no worker."""
    look: float = 5.0
    """Longest time between two readings of an actuator's state."""


class Autoscaler:
    """One process's autoscaler. Any number run, and one leads.

    `show(pool, state, changed)` gets each decision after it was kept. With `dry_run` the process does not lead, keeps
    nothing and changes nothing: it decides and shows.
    """

    given_up = ""

    def __init__(
        self,
        client: AsyncClient,
        pools: Pools,
        settings: AutoscalerSettings | None = None,
        *,
        dry_run: bool = False,
        show: Callable[[str, State, bool], None] = lambda pool, state, changed: None,
    ) -> None:
        self._client, self._pools = client, pools
        self.settings = settings or AutoscalerSettings()
        self._dry, self._show = dry_run, show
        self._leadership = Leadership(
            client, self.settings.name, self.settings.lease, keys.SCALE_LEADER, role="autoscaler"
        )
        self._glance = Glance(client.broker)
        self._controls: dict[str, Control] = {}
        self._before: dict[str, int] = {}
        """The targets when this process led last."""
        self._acts: dict[str, asyncio.Task[None]] = {}
        self._gone: set[str] = set()
        self._well_at = time.monotonic()
        self._pins: dict[str, scaling.Pin] = {}
        self._clock = 0.0
        """The store's clock minus ours, as last read."""
        self._trouble = ""
        self._faulty = False
        """Whether the last tick could not decide a pool."""

    @property
    def leads(self) -> bool:
        return self._leadership.leads

    async def run(self) -> None:
        """Scale whenever this process leads, until cancelled; then give the lead up at once. Actuators stay open."""
        if self._dry:
            await self._scale()
        else:
            await self._leadership.during(self._scale)

    def unready(self) -> list[str]:
        """The reasons why it does not do its work now; empty while it leads, or waits as a standby."""
        now = time.monotonic()
        if self._trouble and now - self._well_at > SILENT_S:
            return [self._trouble]
        if not self._dry and now - self._leadership.heard_at > SILENT_S + self.settings.lease:
            return [self._leadership.fault]
        return []

    # ---- while it leads -------------------------------------------------------------------------------------------

    async def _scale(self) -> None:
        """Ticks until the lead is lost."""
        log.info("%s %s", self.settings.name, "decides, and changes nothing" if self._dry else "leads: it scales")
        self._before = {name: control.target for name, control in self._controls.items() if control.target is not None}
        self._controls = {}
        try:
            while await self._ticked():
                await self._wait_for_tick()
        finally:
            for task in self._acts.values():
                task.cancel()
            if self._acts:
                await asyncio.wait(self._acts.values())
            self._acts = {}

    async def _ticked(self) -> bool:
        try:
            return await self._tick()
        except Exception as error:  # a fault of ours must not end the scaling of all pools
            log.exception("a tick failed, going on")
            self._trouble = f"{type(error).__name__}: {error}"
            return True

    async def _tick(self) -> bool:
        """Read, decide, keep, act. Returns whether this process may go on."""
        fleet = await self._read()
        if fleet is not None:
            self._take(list(self._pools(fleet)))
            self._gone = (self._gone | _forgotten(fleet, self._controls)) - self._controls.keys()
        now = fleet.at if fleet is not None else self._clock + time.time()
        decided: list[tuple[Control, State, bool]] = []
        self._faulty = False
        for control in self._controls.values():
            state = self._decided(control, fleet, now)
            if state is not None:
                decided.append((control, state, control.changed(state)))
        if not await self._keep(decided):
            return False
        for control, state, changed in decided:
            control.act(state, fleet)
            self._show(control.settings.name, state, changed)
            if changed and not self._dry:  # a dry run shows it
                level = logging.WARNING if state["trouble"] else logging.INFO
                log.log(level, "%s: %s%s", control.settings.name, state["reason"], _and(state["trouble"]))
        if fleet is not None:
            # Whatever comes to a pool that is pinned starts no worker.
            empty = [control for control in self._controls.values() if control.target == 0 and not control.pinned]
            self._glance.see(fleet, [control.settings for control in empty])
            if not self._faulty and (decided or not self._controls):
                self._trouble, self._well_at = "", time.monotonic()
        return True

    def _decided(self, control: Control, fleet: Fleet | None, at: float) -> State | None:
        """One pool's state. None if nothing is known, or deciding fails: then the pool stays as it is."""
        try:
            return control.decide(fleet, at, self.settings.name, self._pins.get(control.settings.name))
        except Exception as error:  # a fault of ours in one pool must not end the scaling of the others
            log.exception("no decision could be made of %s, which stays as it is", control.settings.name)
            self._faulty, self._trouble = True, f"{control.settings.name}: {type(error).__name__}: {error}"
            return None

    async def _read(self) -> Fleet | None:
        """The fleet; None if store or broker do not answer."""
        try:
            async with asyncio.timeout(LIMIT_S):
                fleet = await read_fleet(self._client.store, self._client.broker)
                self._pins = await self._read_pins()
        except FAILURES as error:
            self._trouble = f"the store or the broker cannot be read: {error_text(error)}"
            warn_throttled(log, "holds what there is, since store or broker cannot be read: %s", error)
            return None
        self._clock = fleet.at - time.time()
        return fleet

    async def _read_pins(self) -> dict[str, scaling.Pin]:
        try:
            return await scaling.pins(self._client.store)
        except NoPermissionError:  # users of the server as an earlier release made them
            return {}

    def _take(self, scaled: list[Scaled]) -> None:
        """Begins with new pools and drops those that are gone."""
        named = {pool.settings.name: pool for pool in scaled}
        for name in self._controls.keys() - named.keys():
            del self._controls[name]
            self._gone.add(name)
            if (task := self._acts.pop(name, None)) is not None:
                task.cancel()
        for name, pool in named.items():
            if name in self._controls:
                self._controls[name].settings = pool.settings
            else:
                self._controls[name] = self._control(pool)

    def _control(self, scaled: Scaled) -> Control:
        before = self._before.get(scaled.settings.name, 0)
        if scaled.actuator is None:
            return Control(scaled, None, before)
        acting = Acting(scaled.actuator, self._may, self.settings.look)
        self._acts[scaled.settings.name] = asyncio.create_task(acting.run(), name=f"act {scaled.settings.name}")
        return Control(scaled, acting, before)

    def _may(self) -> bool:
        """Whether this process may change anything now. If it was stopped for long, its lease is over."""
        return not self._dry and self._leadership.leads

    async def _keep(self, decided: list[tuple[Control, State, bool]]) -> bool:
        """Writes the decisions. Returns False if another autoscaler leads: then nothing may be done."""
        if self._dry:
            return True
        calls = [
            scaling.keep(self.settings.name, control.settings.name, state, changed=new)
            for control, state, new in decided
        ]
        calls += [scaling.drop(self.settings.name, name) for name in self._gone]
        try:
            async with asyncio.timeout(LIMIT_S):
                answers = await asyncio.gather(*(arun(self._client.store, call) for call in calls))
                for name in self._gone & self._pins.keys() if all(answers) else ():  # another leads, and may scale it
                    await scaling.unpin(self._client.store, name)
        except FAILURES as error:
            self._trouble = f"decisions cannot be kept, so they are not acted on: {error_text(error)}"
            warn_throttled(log, "cannot keep decisions, and does not act on them: %s", error)
            for control, _, _ in decided:
                control.unkept()
            decided.clear()
            return True
        self._gone = set()
        return all(answers)

    async def _wait_for_tick(self) -> None:
        """Wait for the next tick's time, a first task of a pool that wants no worker, or an actuator's first answer."""
        until = time.monotonic() + self.settings.every
        while (remaining := until - time.monotonic()) > 0:
            starting = any(control.target is None for control in self._controls.values())
            await asyncio.sleep(min(remaining, self.settings.glance if starting or self._glance.queues else remaining))
            if any(control.may_begin for control in self._controls.values()):
                return
            if self._glance.queues and time.monotonic() < until and await self._glance.more():
                return


class Glance:
    """Tells whether more waits in the queues of pools that want no worker than the last reading counted.

    It costs one round trip a queue, all at once, against five one after another for a whole reading. `queues`: those to
    look at, by the number that waited there.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.queues: dict[str, int] = {}

    def see(self, fleet: Fleet, pools: Iterable[PoolSettings]) -> None:
        """Look at these pools' queues from now on. The fleet's numbers count as known."""
        waiting = {keys.model_queue(queue.name): sum(queue.queued.values()) for queue in fleet.pools}
        self.queues = {name: waiting.get(name, 0) for pool in pools for name in _queues(fleet, pool)}

    async def more(self) -> bool:
        """Whether more waits now. False after a failure: the next reading decides."""
        try:
            async with asyncio.timeout(GLANCE_LIMIT_S):
                waiting = await asyncio.gather(*(self._broker.waiting(name) for name in self.queues))
        except FAILURES:
            return False
        counts = dict(zip(self.queues, (sum(queue.tiers.values()) for queue in waiting), strict=True))
        more = any(count > self.queues[name] for name, count in counts.items())
        self.queues = counts
        return more


def _queues(fleet: Fleet, pool: PoolSettings) -> list[str]:
    """The queues that new tasks of the pool go to."""
    current = fleet.versions.get(pool.model)
    version = pool.version or current
    queues = [] if version is None else looked_after(keys.version_queue(pool.model, version))
    return queues + ([keys.model_queue(pool.model)] if pool.version in (None, current) else [])


def _forgotten(fleet: Fleet, scaled: Container[str]) -> set[str]:
    """Pools that nobody has scaled for a day, or whose state cannot be read."""
    ages = {name: abs(fleet.at - (sane(state.get("at")) or 0.0)) for name, state in fleet.scaling.states.items()}
    return {name for name, age in ages.items() if name not in scaled and age > scaling.FORGOTTEN_S}


def _and(trouble: str) -> str:
    return f"; {trouble}" if trouble else ""
