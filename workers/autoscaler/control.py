"""One pool's part of a tick: its signals, the decision, the state that is kept, and the call to the actuator.

**Starts.** Backs off from starts of workers that fail, and gives up after a number of them.

    ready < requested, and the actuator reports a failed start, or nothing became ready for the start limit
        ─▶ failures + 1 ─▶ pause of 5 s, 10 s, 20 s, ...: no more workers are requested than were ready
        ─▶ after `tries`: pause of 15 minutes, then one more try
    another worker is ready, or an operator requests a retry ─▶ all is forgotten

The start limit doubles with each failure, so that a start which is only slow succeeds in the end.

Workers whose leases lapse while the store is away are not ready for a moment, and well: so a lower number of ready
workers is believed only once it was seen for a minute, and a time that was not seen does not count.

**Acting.** Passes the target to one pool's actuator, beside the ticks: a slow platform delays no other pool.

set_target(number) ─▶ read the state ─▶ does this process still lead? ─▶ scale ─▶ read again, soon
                          ▲ refused: again after 1 s, 2 s, ... 60 s
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, with_config

from producers.admin.fleet import Fleet
from producers.client.directory import SETTLED_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import error_text
from producers.store.fleet.scaling import Pin, is_fresh
from workers.autoscaler import watch
from workers.autoscaler.actuators import Actual, Actuator
from workers.autoscaler.policy import STRICT, Count, Decision, Memory, Rules, Signals, decide, restored
from workers.autoscaler.pools import PoolSettings, Scaled

Time = Annotated[float, Field(ge=0)]

#: Shortest limit (s) of a start, and how many measured cold starts it may take.
LIMIT_S: Final = 120.0
COLD_STARTS: Final = 4
#: Pause (s) after the first failure, and the longest. Each is twice the one before.
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0
#: Pause (s) after the last try.
GIVEN_UP_S: Final = 900.0
#: Time (s) after which a lower number of ready workers is believed, and the longest time between two looks at it.
SURE_S: Final = 60.0
BLIND_S: Final = 15.0


def limit_of(setting: float | None, cold_start: float) -> float:
    """Longest start (s). `setting`: the setting; None: by the measured cold start (s)."""
    return setting if setting is not None else max(LIMIT_S, COLD_STARTS * cold_start)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Starts:
    """The memory of a pool's starts. Kept with its state. Times are unix seconds of the store."""

    failures: Count = 0
    """Starts in a row that failed."""
    why: str = ""
    """The reason of the last failure."""
    until: Time = 0.0
    """End of the pause."""
    since: Time | None = None
    """Since when fewer workers are ready than are wanted, without one more."""
    ready: Count = 0
    """Workers that were ready at the last look."""
    sure: Count = 0
    """Workers that are ready for sure: fewer are believed later."""
    fewer_since: Time | None = None
    """Since when fewer than those are ready."""
    seen_at: Time = 0.0
    counted: Count | None = None
    """The actuator's own count of failures, as last seen."""
    retried: Time = 0.0
    """The last retry of an operator that was carried out."""

    def paused(self, at: float) -> bool:
        """Whether no new worker is tried. A pause longer than any counts as over: the clock was set back."""
        return 0 < self.until - at <= GIVEN_UP_S

    def request(self, target: int, at: float) -> int:
        """The number to request from the actuator."""
        return min(target, self.sure) if self.paused(at) else target

    def updated(
        self,
        at: float,
        ready: int,
        target: int,
        actual: Actual | None,
        *,
        limit: float,
        tries: int,
        retry: float,
        unready: str = "",
    ) -> Starts:
        """The memory after another look.

        `target`: the policy's number. `retry`: the time of an operator's last request to retry. `unready`:
        why workers that are there take no tasks.
        """
        starts = self._believing(at, ready)
        if retry and retry != starts.retried:
            starts = replace(starts._well(actual), retried=retry)
        if ready > self.ready or (ready and ready >= target and not starts.paused(at)):
            starts = starts._well(actual)
        if ready >= target:
            return replace(starts, since=None, counted=_count(actual))
        since = at if starts.since is None or starts.paused(at) else min(starts.since, at)
        starts = replace(starts, since=since)
        if actual is not None and starts.counted is not None and actual.failures > starts.counted:
            more = actual.failures - starts.counted
            return starts._failed(at, more, actual.failing or "its process ended", actual, tries)
        starts = replace(starts, counted=_count(actual))
        late = at - since
        if late > limit * 2.0 ** min(starts.failures, 10):
            return starts._failed(at, 1, _slow(actual, late, unready), actual, tries)
        return starts

    def _believing(self, at: float, ready: int) -> Starts:
        """The memory with the number of ready workers; a lower one is believed after a while."""
        starts = replace(self, ready=ready, seen_at=at)
        if ready >= self.sure:
            return replace(starts, sure=ready, fewer_since=None)
        if self.fewer_since is None or not 0 <= at - self.seen_at <= BLIND_S:
            return replace(starts, fewer_since=at)
        return replace(starts, sure=ready, fewer_since=None) if at - self.fewer_since > SURE_S else starts

    def _well(self, actual: Actual | None) -> Starts:
        """The memory without any failure."""
        return replace(self, failures=0, why="", until=0.0, since=None, counted=_count(actual))

    def _failed(self, at: float, more: int, why: str, actual: Actual | None, tries: int) -> Starts:
        failures = self.failures + more
        pause = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S)
        until = at + (GIVEN_UP_S if failures >= tries else pause)
        return replace(self, failures=failures, why=why, until=until, since=at, counted=_count(actual))

    def given_up(self, at: float, tries: int) -> float | None:
        """The time at which the last of all tries failed; None while there are more, or after the pause."""
        return self.until - GIVEN_UP_S if self.failures >= tries and self.paused(at) else None

    def trouble(self, at: float, tries: int, pool: str) -> str:
        """The reason why workers do not come up, for people; empty if there is none."""
        if not self.failures:
            return ""
        failed = "1 try failed" if self.failures == 1 else f"{self.failures} tries in a row failed"
        if not self.paused(at):
            return f"{failed}: {self.why} (trying again)"
        pause = f"{self.until - at:.0f} s"
        if self.failures < tries:
            return f"{failed}: {self.why} (the next try is in {pause})"
        return f"{failed}: {self.why} (given up; the next try is in {pause}, or after `penstock scale retry {pool}`)"


def _count(actual: Actual | None) -> int | None:
    return None if actual is None else actual.failures


def _slow(actual: Actual | None, late: float, unready: str) -> str:
    if unready:
        return f"held back for {late:.0f} s: {unready}"
    failing = f": {actual.failing}" if actual is not None and actual.failing else ""
    return f"no worker became ready for {late:.0f} s{failing}"


log = logging.getLogger(__name__)

T = TypeVar("T")

#: Time limit (s) of one call of an actuator.
CALL_S: Final = 9.0
#: Pause (s) after an actuator's first error, and the longest. Each is twice the one before.
FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0
#: Pause (s) until the platform's state is read after a change.
SOON_S: Final = 1.0


class Acting:
    """One actuator, and its last answer. Run `run` as a task.

    `may`: whether this process may act now; called right before each call that changes something. `look`: longest time
    (s) between two readings of the state.
    """

    def __init__(self, actuator: Actuator, may: Callable[[], bool], look: float) -> None:
        self.actuator = actuator
        self.actual: Actual | None = None
        self.refused = ""
        """The text of the actuator's last error; empty after an answer."""
        self._may, self._look = may, look
        self._target: int | None = None
        self._first: Sequence[str] = ()
        self._changed = asyncio.Event()
        self._errors = 0

    def set_target(self, target: int, first: Sequence[str]) -> None:
        """Sets the number of workers to run. `first`: as in `Actuator.scale`."""
        self._first = first
        if target != self._target:
            self._target = target
            self._changed.set()

    def wake(self) -> None:
        """Look at once."""
        self._changed.set()

    async def run(self) -> None:
        """Act until cancelled."""
        while True:
            self._changed.clear()
            pause = await self._once()
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _once(self) -> float:
        """Reads the state, and acts if something is to change. Returns the pause (s) until the next reading."""
        try:
            before, actual = self.actual, await self._called(self.actuator.actual())
            self.actual, target = actual, self._target
            changes = target is not None and actual.wanted != target
            # The next tick judges a start that has just failed: it may not want another try yet.
            failed = before is not None and actual.failures > before.failures
            if target is not None and (changes or (actual.up < target and not failed)) and self._may():
                if changes:
                    log.info("%s: from %d to %d workers", self.actuator.name, actual.wanted, target)
                await self._called(self.actuator.scale(target, self._first))
        except OSError as error:
            pause = self._failed(
                f"no answer for {CALL_S:g} s" if isinstance(error, TimeoutError) else error_text(error)
            )
            warn_throttled(log, "%s fails, trying again: %s", self.actuator.name, self.refused)
            return pause
        except Exception as error:  # a fault of ours in one actuator must not end the others' scaling
            log.exception("%s failed here, trying again", self.actuator.name)
            return self._failed(f"{type(error).__name__}: {error}")
        self._errors, self.refused = 0, ""
        return min(SOON_S, self._look) if changes else self._look

    async def _called(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(CALL_S):
            return await call

    def _failed(self, why: str) -> float:
        """Note an error. Returns the pause (s) until the next try."""
        self.refused = why
        self._errors += 1
        return min(FIRST_RETRY_S * 2.0 ** min(self._errors - 1, 20), LONGEST_RETRY_S)


#: Time (s) for which a platform may have fewer workers than requested, or only those of another version.
FEWER_S: Final = 30.0
#: Fields of signals and memory that the release before does not know.
ADDED: Final = frozenset({"below", "levels", "aside"})


class Control:
    """Decides one pool's number while this process leads. Each lead makes a new one, from the state in the store.

    `before`: the number of this process's last lead; it counts where the store has lost what it kept.
    """

    def __init__(self, scaled: Scaled, acting: Acting | None, before: int = 0) -> None:
        self.settings = scaled.settings
        self.acting = acting
        self.target: int | None = None
        """The policy's number; None before the first decision."""
        self._memory: Memory | None = None
        self._before: Memory | None = None
        self._starts = Starts()
        self._restored = False
        self._rules, self._kept = scaled.settings.rules, before
        self._fewer_since: float | None = None
        self._old_since: float | None = None
        self._default_at: float | None = None
        self._stranded, self._stranded_since = "", 0.0
        self._shown: tuple[Any, ...] = ()
        self._pin: Pin | None = None

    def decide(self, fleet: Fleet | None, at: float, by: str, pin: Pin | None = None) -> dict[str, Any] | None:
        """The pool's new state (`producers.store.fleet.scaling`); None while nothing is known of it.

        `fleet`: None if it could not be read; then everything stays as it is. `pin`: an operator's, which decides.
        """
        self._pin = pin if pin is not None and pin.holds(at) else None
        if fleet is not None and not self._restored:
            self._restore(fleet)
        if self._memory is None:
            self._memory = self._begin(fleet)
        if self._memory is None:
            return None if fleet is None else self._waits(fleet, by)
        self._before = self._memory
        if fleet is None:
            decision, self._memory = decide(self._rules, None, self._memory)
            return self._state(at, self._pinned(decision), None, by)
        self._rules, old = rules_now(fleet, self.settings, warm=self._is_warm(fleet, at))
        signals = watch.signals(fleet, self.settings)
        decision, self._memory = _decided(self._rules, signals, self._memory)
        self._old_since = (self._old_since or at) if old else None
        settled = self._old_since is not None and at - self._old_since >= SETTLED_S
        if settled and watch.remaining_tasks(fleet, self.settings) == 0:
            decision = Decision(0, "0: another version has replaced it, and nothing of it is left", decision.raw)
            self._memory = replace(self._memory, wanted=0)
        decision = self._pinned(decision)
        self.target = decision.target
        self._watch_starts(fleet, signals, decision.target)
        before, self._stranded = self._stranded, watch.stranded(fleet, self.settings)
        self._stranded_since = self._stranded_since if before else at
        return self._state(at, decision, signals, by)

    def _pinned(self, decision: Decision) -> Decision:
        """The decision, or an operator's in its place, within the most that the settings allow.

        The policy remembers the pinned number, so that it goes on from there when the pin ends.
        """
        if self._pin is None or self._memory is None:
            return decision
        target = min(self._pin.workers, self.settings.rules.max)
        reason = f"{target}: pinned by {self._pin.by}; without the pin {decision.target}: {decision.reason}"
        if target != self._memory.wanted:
            self._memory = replace(self._memory, wanted=target, changed_at=self._memory.seen_at)
        return Decision(target, reason, decision.raw)

    def _is_warm(self, fleet: Fleet, at: float) -> bool:
        """Whether the version keeps its workers because it was the default lately. A rollout takes their room."""
        model, version = self.settings.model, self.settings.version
        if version is not None and fleet.versions.get(model) == version:
            self._default_at = at
        lately = self._default_at is not None and 0 <= at - self._default_at < self.settings.keep_warm
        starting = fleet.scaling.rollouts.get(model, {}).get("phase") == "starting"
        return lately and not starting and self._memory is not None and self._memory.wanted > 0

    def changed(self, state: dict[str, Any]) -> bool:
        """Whether the state differs from the last one in its number, pin or trouble. Remaining times do not count."""
        shown = (state["wanted"], state["told"], self._starts.failures, bool(state["trouble"]), state["pin"])
        before, self._shown = self._shown, shown
        return before != shown

    def unkept(self) -> None:
        """Notes that the last state could not be written: the next one counts as changed."""
        self._shown = ()

    @property
    def pinned(self) -> bool:
        """Whether an operator's number decides."""
        return self._pin is not None

    @property
    def may_begin(self) -> bool:
        """Whether the actuator has answered, for which its first decision waits."""
        return self.target is None and self.acting is not None and self.acting.actual is not None

    def act(self, state: dict[str, Any], fleet: Fleet | None) -> None:
        """Passes the target to the actuator."""
        if self.acting is not None and fleet is not None and self._memory is not None:
            self.acting.set_target(state["told"], watch.victims(fleet, self.settings))

    # ---- what was before ------------------------------------------------------------------------------------------

    def _restore(self, fleet: Fleet) -> None:
        """Continues from the kept state, unless it is old or cannot be read."""
        self._restored = True
        name = self.settings.name
        kept = fleet.scaling.states.get(name)
        if kept is None:
            return
        try:
            self._starts = restored(Starts, kept["starts"])
            if not is_fresh(kept["at"], fleet.at):  # nobody has looked since: that time is no start's
                self._starts = replace(self._starts, since=None)
            self._kept = max(0, int(kept["wanted"]))
            self._default_at = None if kept.get("default_at") is None else float(kept["default_at"])
            if is_fresh(kept["at"], fleet.at) and kept["memory"] is not None:
                self._memory = restored(Memory, kept["memory"])
                self._shown = (
                    *(kept["wanted"], kept["told"], self._starts.failures, bool(kept["trouble"])),
                    kept.get("pin"),
                )
        except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            log.warning(
                "the kept state of %s cannot be read (%r): it begins anew, with the workers there are", name, error
            )

    def _begin(self, fleet: Fleet | None) -> Memory | None:
        """The memory to begin with: the present number, never zero for want of one. None: it is not known yet."""
        if fleet is None:
            return None
        if self.acting is None:
            return Memory(self._least(fleet), changed_at=fleet.at)
        actual = self.acting.actual
        return None if actual is None else Memory(actual.wanted, changed_at=fleet.at)

    def _least(self, fleet: Fleet) -> int:
        """A lower bound of the workers: those that are ready, or the kept number, which others may still follow."""
        return max(watch.signals(fleet, self.settings).ready, self._kept)

    def _waits(self, fleet: Fleet, by: str) -> dict[str, Any] | None:
        """The state while the actuator does not say how many workers there are. It is not acted on."""
        if self.acting is None or not self.acting.refused:
            return None
        least = self._least(fleet)
        decision = Decision(least, f"holds {least}: the actuator does not say how many workers there are", {})
        return self._state(fleet.at, decision, watch.signals(fleet, self.settings), by)

    # ---- starts ---------------------------------------------------------------------------------------------------

    def _watch_starts(self, fleet: Fleet, signals: Signals, target: int) -> None:
        actual, retried = None if self.acting is None else self.acting.actual, self._starts.retried
        self._starts = self._starts.updated(
            signals.at,
            signals.ready,
            target,
            actual,
            limit=limit_of(self.settings.start_limit, signals.profile.cold_start.get("total", 0.0)),
            tries=self.settings.tries,
            retry=fleet.scaling.retries.get(self.settings.name, 0.0),
            unready=watch.unready_reasons(fleet, self.settings),
        )
        if self.acting is not None and self._starts.retried != retried:
            self.acting.wake()

    def _trouble(self, at: float, requested: int) -> str:
        """The reason why workers do not come up."""
        trouble = self._starts.trouble(at, self.settings.tries, self.settings.name)
        if not trouble and self._stranded and at - self._stranded_since > FEWER_S:
            trouble = self._stranded
        if self.acting is None:
            return trouble
        if self.acting.refused:
            return f"{self.acting.actuator.name}: {self.acting.refused}" + (f"; {trouble}" if trouble else "")
        actual = self.acting.actual
        fewer = actual is not None and actual.wanted == requested and actual.up < requested
        self._fewer_since = (self._fewer_since or at) if fewer else None
        if not trouble and actual is not None and self._fewer_since is not None and at - self._fewer_since > FEWER_S:
            why = f": {actual.failing}" if actual.failing else ""
            return f"{self.acting.actuator.name} was told {requested} and has {actual.up}{why}"
        return trouble

    def _state(self, at: float, decision: Decision, signals: Signals | None, by: str) -> dict[str, Any]:
        acting = self.acting
        requested = decision.target if acting is None else self._starts.request(decision.target, at)
        return {
            "at": at,
            "model": self.settings.model,
            "wanted": decision.target,
            "told": requested,
            "reason": decision.reason,
            "raw": decision.raw,
            "signals": _written(signals),
            "before": _written(self._before),
            "memory": _written(self._memory),
            "rules": asdict(self._rules),
            "starts": asdict(self._starts),
            "default_at": self._default_at,
            "actual": None if acting is None or acting.actual is None else asdict(acting.actual),
            "actuator": "" if acting is None else acting.actuator.name,
            "trouble": self._trouble(at, requested),
            "pin": None if self._pin is None else asdict(self._pin),
            "given_up": self._starts.given_up(at, self.settings.tries),
            "by": by,
        }


def rules_now(fleet: Fleet | None, pool: PoolSettings, *, warm: bool = False) -> tuple[Rules, bool]:
    """The pool's rules at this moment, and whether its version is an old one, which is to end.

    A version that is being rolled out keeps the workers that its rollout waits for. A version that is not the card's
    keeps workers only while something of it is left, or, at least one, while it is `warm`.
    """
    current = None if fleet is None else fleet.versions.get(pool.model)
    if fleet is None or pool.version is None or current is None or current == pool.version:
        return pool.rules, False
    rollout = fleet.scaling.rollouts.get(pool.model, {})
    if rollout.get("phase") == "starting" and rollout.get("version") == pool.version:
        workers = rollout.get("workers")
        least = max(pool.rules.min, workers if isinstance(workers, int) else 1)
        return replace(pool.rules, min=least, max=max(pool.rules.max, least)), False
    if warm:
        least = max(1, pool.rules.min)
        return replace(pool.rules, min=least, max=max(pool.rules.max, least)), False
    return replace(pool.rules, min=0), True


def _written(part: Signals | Memory | None) -> dict[str, Any] | None:
    """The form in which it is kept. Fields that the release before would refuse are left out while they are empty."""
    if part is None:
        return None
    return {name: value for name, value in asdict(part).items() if value or name not in ADDED}


def _decided(rules: Rules, signals: Signals | None, memory: Memory) -> tuple[Decision, Memory]:
    """The policy's decision. If it cannot compute with a number, the pool stays as it is."""
    try:
        return decide(rules, signals, memory)
    except ArithmeticError as error:
        log.exception("no decision could be made of %s", signals)
        decision, memory = decide(rules, None, memory)
        return replace(decision, reason=f"holds {decision.target}: its figures make no sense ({error})"), memory
