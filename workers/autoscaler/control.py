"""One pool's part of a tick: its signals, the decision, the state that is kept, and the call to the actuator."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any, Final

from producers.admin.fleet import Fleet
from producers.client.submission import SETTLED_S
from producers.store.fleet.scaling import is_fresh
from workers.autoscaler import watch
from workers.autoscaler.acting import Acting
from workers.autoscaler.policy import Decision, Memory, Rules, Signals, decide, restored
from workers.autoscaler.pools import PoolSettings, Scaled
from workers.autoscaler.starts import Starts, limit_of

log = logging.getLogger(__name__)

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
        self._stranded, self._stranded_since = "", 0.0
        self._shown: tuple[Any, ...] = ()

    def decide(self, fleet: Fleet | None, at: float, by: str) -> dict[str, Any] | None:
        """The pool's new state (`producers.store.fleet.scaling`); None while nothing is known of it.

        `fleet`: None if it could not be read; then everything stays as it is.
        """
        if fleet is not None and not self._restored:
            self._restore(fleet)
        if self._memory is None:
            self._memory = self._begin(fleet)
        if self._memory is None:
            return None if fleet is None else self._waits(fleet, by)
        self._before = self._memory
        if fleet is None:
            decision, self._memory = decide(self._rules, None, self._memory)
            return self._state(at, decision, None, by)
        self._rules, old = rules_now(fleet, self.settings)
        signals = watch.signals(fleet, self.settings)
        decision, self._memory = _decided(self._rules, signals, self._memory)
        self._old_since = (self._old_since or at) if old else None
        settled = self._old_since is not None and at - self._old_since >= SETTLED_S
        if settled and watch.remaining_tasks(fleet, self.settings) == 0:
            decision = Decision(0, "0: another version has replaced it, and nothing of it is left", decision.raw)
            self._memory = replace(self._memory, wanted=0)
        self.target = decision.target
        self._watch_starts(fleet, signals, decision.target)
        before, self._stranded = self._stranded, watch.stranded(fleet, self.settings)
        self._stranded_since = self._stranded_since if before else at
        return self._state(at, decision, signals, by)

    def changed(self, state: dict[str, Any]) -> bool:
        """Whether the state differs from the last one in its number or its trouble. Remaining times do not count."""
        shown = (state["wanted"], state["told"], self._starts.failures, bool(state["trouble"]))
        before, self._shown = self._shown, shown
        return before != shown

    def unkept(self) -> None:
        """Notes that the last state could not be written: the next one counts as changed."""
        self._shown = ()

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
            if is_fresh(kept["at"], fleet.at) and kept["memory"] is not None:
                self._memory = restored(Memory, kept["memory"])
                self._shown = (kept["wanted"], kept["told"], self._starts.failures, bool(kept["trouble"]))
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
            "actual": None if acting is None or acting.actual is None else asdict(acting.actual),
            "actuator": "" if acting is None else acting.actuator.name,
            "trouble": self._trouble(at, requested),
            "given_up": self._starts.given_up(at, self.settings.tries),
            "by": by,
        }


def rules_now(fleet: Fleet | None, pool: PoolSettings) -> tuple[Rules, bool]:
    """The pool's rules at this moment, and whether its version is an old one, which is to end.

    A version that is being rolled out keeps the workers that its rollout waits for. A version that is not the card's
    keeps workers only while something of it is left.
    """
    current = None if fleet is None else fleet.versions.get(pool.model)
    if fleet is None or pool.version is None or current is None or current == pool.version:
        return pool.rules, False
    rollout = fleet.scaling.rollouts.get(pool.model, {})
    if rollout.get("phase") == "starting" and rollout.get("version") == pool.version:
        workers = rollout.get("workers")
        least = max(pool.rules.min, workers if isinstance(workers, int) else 1)
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
