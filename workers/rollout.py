"""Rolling updates: brings new workers up, moves new tasks to them, waits until the old version has nothing left.

    begin: check, write the record ─▶ starting: wait for ready workers ─▶ publish the card ─▶ draining: wait ─▶ done

`begin` finds everything that can be wrong with an update before anything starts, and writes the record
(`producers.store.fleet.rollouts`, which also describes what happens when a process dies). `Carrier` takes a record from
phase to phase: it may stop anywhere, and another process goes on. `FleetView` is what the fleet has of the two
versions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis import Redis

from producers.admin.fleet import Fleet, read_fleet
from producers.client.aio import AsyncClient
from producers.client.directory import SETTLED_S
from producers.client.steps import FAILURES
from producers.connection.script import parsed, text
from producers.connection.trouble import error_text
from producers.contract import keys
from producers.contract.profile import sane
from producers.rollouts import operations
from producers.rollouts.operations import RolloutError
from producers.store.fleet import canaries, cards, rollouts
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import RoutingError
from producers.store.fleet.scaling import is_fresh
from workers.autoscaler import watch
from workers.autoscaler.pools import PoolSettings
from workers.errors import Refused
from workers.library import ResolvedModel

#: Time (s) in which an autoscaler has noticed a rollout.
SOON_S: Final = 5.0
#: Interval (s) of looks.
LOOK_S: Final = 0.5
#: Recorded tasks without a message that are looked at for the old version's.
PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class New:
    """The new version: its folder, its card, and its tokenizer's files. `url`: a bucket's that names it, or ''."""

    model: ResolvedModel
    card: dict[str, Any]
    files: dict[str, bytes]
    url: str = ""

    @property
    def version(self) -> str:
        return str(self.card["version"])

    @property
    def reference(self) -> str:
        """A reference to it for workers: also for those of other machines, where a bucket has it."""
        return f"{self.model.name}={self.url}" if self.url else self.model.reference


def begin(store: Redis, new: New, workers: int | None, ready: int) -> Rollout:
    """Write the record, or take up the one that is under way. Raises Refused; redis errors.

    `workers`: ready workers to wait for; None: as many as the old version has, `ready`, and one at least.
    """
    name = new.model.name
    _check_judged(store, name)
    last = rollouts.read(store, name)
    if last is not None and last.phase in rollouts.UNDER_WAY and last.version == new.version:
        return _again(store, last, workers)
    card = cards.read(store, name)
    _check(new, card)
    assert card is not None
    try:
        cards.check_default(store, name, new.version)
    except RoutingError as error:
        raise Refused(str(error)) from error
    cards.pin(store, name, card["version"])  # else the first new worker would take the new tasks
    now = rollouts.now(store)
    requested = Rollout(name, new.reference, new.version, card["version"], workers or max(1, ready), now, now)
    if last is not None and last.version == requested.before:
        requested = replace(requested, before_reference=last.reference)
    current = rollouts.begin(store, requested)
    if current.version != new.version:
        raise Refused(
            f"a rollout of {name} to version {current.version} ({current.reference}) is under way: let it end, or run "
            f"`penstock rollout {name} --cancel`"
        )
    return current


def cancel(store: Redis, model: str) -> Rollout:
    """End a rollout that has not switched yet. Raises Refused without one; redis errors."""
    _check_judged(store, model)
    try:
        return operations.cancel(store, model)
    except RolloutError as error:
        raise Refused(str(error)) from error


def _check_judged(store: Redis, model: str) -> None:
    """Raises Refused while a rollout that judges is under way: it has the record, to bring its workers up."""
    judged = canaries.read(store, model)
    if judged is not None and judged.under_way:
        raise Refused(
            f"a rollout of {model} to version {judged.version} is {judged.phase}, at {judged.percent:g}%: let it "
            f"end, or run `penstock rollout abort {model}`"
        )


def _again(store: Redis, current: Rollout, workers: int | None) -> Rollout:
    """Go on with a rollout, perhaps with another number of workers."""
    if workers is None or workers == current.workers:
        return current
    other = replace(current, workers=workers)
    return other if rollouts.change(store, current, other) else rollouts.read(store, current.model) or current


def _check(new: New, card: dict[str, Any] | None) -> None:
    """Raises Refused for an update that changes nothing, or that would break requests of today."""
    name = new.model.name
    if card is None:
        raise Refused(f"there is no model {name} to update: `penstock models publish {new.reference}` begins it")
    if card["version"] == new.version:
        raise Refused(f"new tasks of {name} go to version {new.version} already, and {new.model.folder} has that one")
    missing = [capability for capability in card["capabilities"] if capability not in new.card["capabilities"]]
    if missing:
        raise Refused(
            f"version {new.version} in {new.model.folder} lacks {', '.join(missing)}, which version "
            f"{card['version']} of {name} has: requests would fail. `penstock models publish` switches all the same"
        )


@dataclass(frozen=True, slots=True)
class FleetView:
    """One look at the two versions."""

    ready: int
    """Workers of the new version that take tasks."""
    unready: int
    """Those that have a lease and take no tasks."""
    old: int
    """Workers of the old version that do not drain."""
    remaining: int | None
    """Tasks of the old version that are queued, delayed or in flight; None where a number is missing."""
    trouble: str
    """The autoscaler's reason why new workers do not come up."""
    failures: int
    """Starts in a row that failed."""
    given_up: bool
    """Whether the new version's own autoscaler has given its starts up since the rollout was requested."""
    starts: bool
    """Whether an autoscaler starts workers of the new version, or may in a moment."""
    ends: bool
    """Whether one ends those of the old version: it scales them apart from others."""

    @property
    def notable(self) -> tuple[int | bool, ...]:
        """The part whose change a person is told of: not the seconds until another try."""
        return self.ready, self.unready, self.failures, bool(self.trouble), self.starts

    @classmethod
    def of(cls, fleet: Fleet, rollout: Rollout) -> FleetView:
        new, old = (PoolSettings(rollout.model, version) for version in (rollout.version, rollout.before))
        workers = list(watch.workers(watch.served(fleet, new)))
        ready = sum(map(watch.takes_tasks, workers))
        state = fleet.scaling.states.get(new.name) or fleet.scaling.states.get(rollout.model) or {}
        fresh = is_fresh(state.get("at"), fleet.at)
        return cls(
            ready,
            len(workers) - ready,
            sum(not worker.get("draining") for worker in watch.workers(watch.served(fleet, old))),
            watch.remaining_tasks(fleet, old),
            str(state.get("trouble") or "") if fresh else "",
            _failures(state) if fresh else 0,
            fresh and _given_up(fleet.scaling.states.get(new.name) or {}, rollout),
            _scaled(fleet, new) or (bool(fleet.scaling.leads) and fleet.at - rollout.asked < SOON_S),
            _scaled(fleet, old),
        )


def _scaled(fleet: Fleet, pool: PoolSettings) -> bool:
    """Whether an autoscaler decides on this pool now. One that ended may have left its state in the store."""
    state = fleet.scaling.states.get(pool.name) or {}
    return bool(fleet.scaling.leads) and is_fresh(state.get("at"), fleet.at)


def _failures(state: dict[str, Any]) -> int:
    starts = state.get("starts")
    return int(sane(starts.get("failures")) or 0) if isinstance(starts, dict) else 0


def _given_up(state: dict[str, Any], rollout: Rollout) -> bool:
    """Whether the version's own pool was given up: the state of all versions may be about the old one's starts."""
    return (sane(state.get("given_up")) or 0.0) >= rollout.asked


def ready(fleet: Fleet, model: str) -> int:
    """Workers that take new tasks of the model now."""
    current = PoolSettings(model, fleet.versions.get(model))
    return sum(map(watch.takes_tasks, watch.workers(watch.served(fleet, current))))


@dataclass(slots=True)
class Carrier:
    """`client` and `store`: both of the same system. `say` gets a line for each change.

    `timeout`: longest time (s) for new workers to become ready. `drain_old`: tell idle old workers to drain, once
    nothing waits for them. A server that is away is waited for.
    """

    client: AsyncClient
    store: Redis
    new: New
    say: Callable[[str], None]
    timeout: float
    drain_old: bool = False
    _last_told: Any = field(init=False, default=None)

    async def run(self, rollout: Rollout) -> Rollout:
        """Go on with it. Returns its last state: `done`, `failed`, `cancelled`, or another's that replaced it."""
        until, mine = time.monotonic() + self.timeout, rollout.version
        while rollout.version == mine and rollout.phase in rollouts.UNDER_WAY:
            try:
                rollout = await (self._start(rollout, until) if rollout.phase == "starting" else self._drain(rollout))
            except FAILURES as error:
                self._tell_once(f"store or broker do not answer, trying again: {error_text(error)}")
                await asyncio.sleep(LOOK_S)
        return rollout

    async def _start(self, rollout: Rollout, until: float) -> Rollout:
        """Wait for the new workers, and switch. Returns the current record."""
        switched = False
        while True:
            record = self._read(rollout)
            if record.phase != "starting" or record.version != rollout.version:
                return self._late(record) if switched else record
            current = self._current(rollout)
            if current not in (rollout.before, rollout.version):
                return self._to(record, "failed", _replaced(current))
            if current == rollout.version:
                return self._to(record, "draining")
            view = await self._look(record)
            unready = f" ({view.unready} more are not ready)" if view.unready else ""
            waits = f"ready workers of version {record.version}: {view.ready} of {record.workers}{unready}"
            if view.ready >= record.workers:
                publisher = cards.rollout_publisher(cards.read(self.store, rollout.model))
                try:
                    await asyncio.to_thread(
                        cards.publish, self.store, self.new.card, self.new.files, rollout.before, publisher
                    )
                except RoutingError as error:  # somebody has changed its stage meanwhile
                    return self._to(record, "failed", f"nothing was switched; {error}")
                self._tell_once(f"new tasks go to version {rollout.version}")
                switched = True
                continue
            why = f"; {view.trouble}" if view.trouble else ""
            if view.given_up or time.monotonic() > until:
                after = "" if view.given_up else f"after {self.timeout:g} s, "
                return self._to(record, "failed", f"nothing was switched; {after}{waits}{why}")
            self._tell_once(waits + why + ("" if view.starts else " (no autoscaler does: start them)"), view.notable)
            await asyncio.sleep(LOOK_S)

    def _late(self, record: Rollout) -> Rollout:
        """The record once this process has switched. One that was cancelled, or failed, meanwhile goes on: the card
        decides."""
        mine = record.version == self.new.version == self._current(record)
        return self._to(record, "draining") if mine and record.phase in ("cancelled", "failed") else record

    async def _drain(self, rollout: Rollout) -> Rollout:
        """Wait until nothing of the old version is left. Returns the current record."""
        settled = time.monotonic() + SETTLED_S
        while True:
            record = self._read(rollout)
            if record.phase != "draining" or record.version != rollout.version:
                return record
            if (current := self._current(rollout)) != rollout.version:
                return self._to(record, "failed", _replaced(current))
            view = await self._look(record)
            remaining = view.remaining if view.remaining != 0 else await self._unsent(rollout)
            over = remaining == 0 and time.monotonic() > settled
            if over and (view.old == 0 or view.ends):
                if view.old:
                    self._tell_once(f"workers of version {rollout.before} that its autoscaler ends later: {view.old}")
                return self._to(record, "done")
            if over and self.drain_old and (drained := await drain_idle(self.client, rollout.model, rollout.before)):
                self._tell_once(f"told {drained} workers of version {rollout.before} to drain")
            if remaining != 0 or (view.old and not view.ends):
                self._tell_once(_waits(view, remaining, rollout, drains=self.drain_old))
            await asyncio.sleep(LOOK_S)

    def _current(self, rollout: Rollout) -> str:
        """The version that new tasks go to; empty if the card is gone."""
        card = cards.read(self.store, rollout.model)
        return "" if card is None else str(card["version"])

    async def _look(self, rollout: Rollout) -> FleetView:
        return FleetView.of(await read_fleet(self.client.store, self.client.broker), rollout)

    async def _unsent(self, rollout: Rollout) -> int:
        """Tasks of the old version that are recorded, and whose message may not be sent yet."""
        ids = list(map(text, await self.client.store.zrange(keys.SUBMITTING, 0, PAGE - 1)))
        async with self.client.store.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hmget(keys.task(task_id), "model", "version")
            fields = await pipe.execute()
        old_version = [rollout.model, rollout.before]
        return sum([text(value) for value in values] == old_version for values in fields)

    def _read(self, rollout: Rollout) -> Rollout:
        """The current record. One that is gone was lost with the store's data, and is written again."""
        record = rollouts.read(self.store, rollout.model)
        return rollouts.begin(self.store, rollout) if record is None else record

    def _to(self, old: Rollout, phase: str, reason: str = "") -> Rollout:
        new = old.to(phase, rollouts.now(self.store), reason)
        return new if rollouts.change(self.store, old, new) else self._read(old)

    def _tell_once(self, line: str, subject: Any = None) -> None:
        """Says the line, unless its subject was said last. `subject`: None stands for the line itself."""
        if (subject or line) != self._last_told:
            self._last_told = subject or line
            self.say(line)


def _replaced(current: str) -> str:
    state = f"that of version {current}" if current else "gone"
    return f"the card is {state}: somebody published another one meanwhile"


def _waits(view: FleetView, remaining: int | None, rollout: Rollout, *, drains: bool) -> str:
    version = rollout.before
    if remaining != 0:
        start = f"`penstock worker --model {rollout.model}=FOLDER`, the folder of that version"
        hint = "" if view.old or view.ends else f" (no worker takes more of them: start one with {start})"
        return f"tasks left of version {version}: {'not known' if remaining is None else remaining}{hint}"
    hint = "" if drains else " (no autoscaler does: end them, or say --drain-old)"
    return f"no task is left of version {version}; workers of it that are yet to end: {view.old}{hint}"


async def drain_idle(client: AsyncClient, model: str, version: str) -> int:
    """Tell each live worker of the version that holds no task to drain. Returns their number; raises redis errors."""
    listed = [worker.incarnation for worker in await client.broker.workers() if worker.remaining_s is not None]
    drained = 0
    for incarnation in listed:
        lease = parsed(await client.store.get(keys.lease(incarnation)) or "{}")
        mine = (lease.get("model"), lease.get("version")) == (model, version)
        if mine and lease.get("tasks") == 0 and not lease.get("draining"):
            drained += await client.store.publish(keys.control(incarnation), "drain")
    return drained
