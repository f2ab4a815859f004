"""The controller of rollouts that judge: a duty of the sweeper that leads.

    look:  state ─▶ decided, but not acted? act ─▶ else: rows of the ledger ─▶ evidence ─▶ decide ─▶ act

Each write names what it replaces, so any number of controllers may run, and die between any two lines; the table is in
`docs/how/rollouts.md`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from redis import Redis

from producers.admin import routes
from producers.admin.fleet import Fleet, read_fleet
from producers.client.aio import AsyncClient
from producers.connection.connect import connect
from producers.connection.script import parsed, text
from producers.contract import keys
from producers.contract.levels import split
from producers.contract.profile import sane
from producers.rollouts import refusals
from producers.rollouts.metrics import Evidence, Finding, Matcher, findings
from producers.store.fleet import canaries, rollouts
from producers.store.fleet.canaries import ALIAS, Canary
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import Routing, RoutingError
from producers.store.shadows import Pair, Score

log = logging.getLogger(__name__)

#: Rows of the ledger that one look takes at most; the next look goes on.
PAGE: Final = 2000
#: Answers of each version whose beginning is read in a look.
ANSWERS: Final = 64
#: A row of the log has what was compared whenever that has grown by this factor.
NOTED: Final = 1.1
#: Time (s) after a promotion in which `penstock up` can start the baseline again.
KNOWN_S: Final = 3600.0
#: Time (ms) in which an autoscaler has noticed a rollout.
SOON_MS: Final = 5000
_DELETED: Final = "the state of this rollout was deleted: the default has all tasks again"
#: Who decides, in rows and in the audit log.
BY: Final = "controller"


class Decision(NamedTuple):
    """A change of a rollout. `what`: as of `canaries.change`."""

    what: str
    phase: str
    reason: str
    step: int | None = None


class Controller:
    """Looks at all rollouts that are under way. `store`: blocking, of the client's system."""

    def __init__(self, client: AsyncClient, url: str) -> None:
        self._client = client
        self._store = connect(url)
        self._matchers: dict[str, Matcher] = {}
        #: Rollout's id -> since when (monotonic) no worker of its candidate is ready.
        self._lost: dict[str, float] = {}

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    async def sweep(self) -> dict[str, int]:
        """One look at each rollout. Returns how often what was decided. Raises redis.RedisError or OSError."""
        raw: Any = await self._client.store.hgetall(keys.CANARIES)
        every = [state for state in map(Canary.of, raw.values()) if state is not None]
        states = [state for state in every if state.under_way]
        for state in every:
            if state.phase == "promoted" and state.since and time.time() - state.since / 1000 > KNOWN_S:
                await asyncio.to_thread(_let_go, self._store, state)
        ids = {state.id for state in states}
        self._matchers = {name: matcher for name, matcher in self._matchers.items() if name in ids}
        self._lost = {name: since for name, since in self._lost.items() if name in ids}
        # One that cannot be read is a later release's, which judges it.
        unread = {text(model) for model, value in raw.items() if Canary.of(value) is None}
        await asyncio.to_thread(self._end_deleted, unread | {state.model for state in states})
        if not states:
            return {}
        fleet = await read_fleet(self._client.store, self._client.broker)
        decided, failure = 0, None
        for state in states:
            try:
                decided += await asyncio.to_thread(self.look, state, fleet)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other rollouts are judged
                failure = failure or error
        if failure is not None:
            raise failure
        return {"rollouts_decided": decided}

    def _end_deleted(self, judged: Container[str]) -> None:
        """End what is left of rollouts whose state was deleted. `judged`: the models that have one under way."""
        for record in rollouts.all_of(self._store):
            if record.phase == "starting" and record.model not in judged:
                end_deleted(self._store, record)

    def look(self, state: Canary, fleet: Fleet) -> int:
        """One look at a rollout. Returns 1 if it decided something."""
        if not state.since:
            act(self._store, state)
            return 0
        decision = self._decide(state, fleet)
        if decision is None:
            return 0
        decided = decide(self._store, state, decision, BY)
        if decided is not None:
            act(self._store, decided)
        return int(decided is not None)

    def _decide(self, state: Canary, fleet: Fleet) -> Decision | None:
        try:
            current = routes.current(self._store, state.model)
        except RoutingError:
            return Decision("abort", "aborted", f"the model {state.model} was removed")
        if (interference := _interference(state, current)) is not None:
            return interference
        if state.phase == "preparing":
            return self._prepared(state, fleet)
        if state.step < 0:  # paused before the first one: there is nothing to judge
            return None
        outcomes, compared = self._observe(state)
        if worse := [finding for finding in outcomes if finding.worse]:
            also = ", ".join(finding.settings.metric.name for finding in worse[1:])
            return Decision("roll_back", "rolled_back", worse[0].text() + (f"; also worse: {also}" if also else ""))
        if (lost := self._lost_for(state, fleet)) is not None and lost >= state.plan.lost_s:
            return Decision("roll_back", "rolled_back", f"no worker of {state.version} has been ready for {lost:.0f} s")
        return None if state.phase == "paused" else raised(state, outcomes, compared, canaries.now_ms(self._store))

    def _prepared(self, state: Canary, fleet: Fleet) -> Decision | None:
        """The first step, once enough workers of the candidate are ready; the end, if that takes too long."""
        ready, unready = workers_of(fleet, state.model, state.version)
        if ready >= state.plan.workers:
            return Decision("raise", "judging", f"{ready} of {state.plan.workers} workers of it are ready", 0)
        _bring_up(self._store, state)
        waited = (canaries.now_ms(self._store) - state.begun) / 1000
        scaling = fleet.scaling.states.get(f"{state.model}@{state.version}") or {}
        given_up = (sane(scaling.get("given_up")) or 0.0) * 1000 >= state.begun
        if waited < state.plan.timeout_s and not given_up:
            return None
        why = _start_trouble(scaling, state, canaries.now_ms(self._store))
        waits = f"ready workers of {state.version} after {waited:.0f} s: {ready} of {state.plan.workers}"
        more = f" ({unready} more are not ready)" if unready else ""
        return Decision("fail", "failed", f"it got no tasks; {waits}{more}{'; ' + why if why else ''}")

    def _observe(self, state: Canary) -> tuple[list[Finding], int]:
        """Enter new rows of the ledger into the evidence. Returns all findings, and the comparisons of this step."""
        matcher = self._matchers.setdefault(state.id, Matcher(state))
        raw = canaries.read_evidence(self._store, state.model)
        evidence = Evidence.of(raw, state)
        entries: Any = self._store.xrange(keys.LEDGER, f"({evidence.cursor}", "+", count=PAGE)
        rows = self._rows(state, matcher, entries)
        scores: Any = self._store.xrange(keys.FEEDBACK, f"({evidence.scores}", "+", count=PAGE)
        rows += [{text(name): text(value) for name, value in fields.items()} for _, fields in scores]
        copies: Any = self._store.xrange(keys.shadow_pairs(state.model), f"({evidence.pairs}", "+", count=PAGE)
        matcher.enter(rows, evidence, state.step)
        rows_of_copies = [value for _, fields in copies for value in fields.values()]
        pairs = (Pair.parse(value) or Score.parse(value) for value in rows_of_copies)
        matcher.enter_pairs((pair for pair in pairs if pair is not None), evidence, state.step)
        outcomes = findings(state, evidence)
        if entries or scores or copies:
            evidence.cursor = text(entries[-1][0]) if entries else evidence.cursor
            evidence.scores = text(scores[-1][0]) if scores else evidence.scores
            evidence.pairs = text(copies[-1][0]) if copies else evidence.pairs
            total = sum(evidence.compared(step, copies=True) for step in range(len(evidence.steps)))
            row = None
            if total > evidence.noted * NOTED:
                evidence.noted, row = total, seen(state, evidence, outcomes)
            del self._matchers[state.id]  # unless it is written, these rows are read again
            if not canaries.write_evidence(self._store, state.model, raw, evidence.to_json(), row):
                return [], 0  # another controller was faster: go on from what it wrote
            self._matchers[state.id] = matcher
        return outcomes, evidence.samples(state)

    def _rows(self, state: Canary, matcher: Matcher, entries: Any) -> list[dict[str, str]]:
        """The rows that are compared, with the time of their end and, while their record is there, finish reasons, form
        and, of some, whether they refused."""
        rows = [
            {**{text(name): text(value) for name, value in fields.items()}, "ended": text(entry).partition("-")[0]}
            for entry, fields in entries
        ]
        rows = [row for row in rows if matcher.is_candidate(row) is not None]
        with self._store.pipeline(transaction=False) as pipe:
            for row in rows:
                pipe.hmget(keys.task(row["id"]), "reasons", "form", "prompt")
            records = pipe.execute()
        answered: tuple[list[dict[str, str]], ...] = [], []
        for row, (reasons, form, prompt) in zip(rows, records, strict=True):
            row |= {"reasons": text(reasons or ""), "form": text(form or "")}
            # Where log probabilities of its prompt were asked for, they come first.
            if reasons and row["status"] == "completed" and not prompt:
                answered[bool(matcher.is_candidate(row))].append(row)
        if "refused" in state.plan.metrics:
            self._read_refusals([row for rows in answered for row in _spread(rows)], state.plan.refusals)
        return rows

    def _read_refusals(self, rows: list[dict[str, str]], phrases: tuple[str, ...]) -> None:
        """Note of each row whether its answer begins as a refusal, unless its stream is gone or compacted."""
        with self._store.pipeline(transaction=False) as pipe:
            for row in rows:
                pipe.xrange(keys.stream(row["id"]), count=refusals.TOKENS)
            streams: list[Any] = pipe.execute()
        for row, entries in zip(rows, streams, strict=True):
            if (answer := beginning_of(fields[b"e"] for _, fields in entries)) is not None:
                row["refused"] = str(int(refusals.refuses(answer, phrases)))

    def _lost_for(self, state: Canary, fleet: Fleet) -> float | None:
        """Seconds for which no worker of the candidate has been ready, as this controller saw it; None: one is."""
        if workers_of(fleet, state.model, state.version)[0]:
            self._lost.pop(state.id, None)
            return None
        now = time.monotonic()
        return now - self._lost.setdefault(state.id, now)


def _spread(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """At most ANSWERS of the rows, at even distances."""
    return rows[:: -(-len(rows) // ANSWERS)] if rows else rows


def beginning_of(entries: Iterable[bytes]) -> str | None:
    """The text of a task's first choice by its stream's first entries; None without a token of it."""
    try:
        tokens = [token for token in map(json.loads, entries) if isinstance(token, list) and token[0] == 0]
        return "".join(str(token[3]) for token in tokens) if tokens else None
    except (ValueError, IndexError):
        return None


def workers_of(fleet: Fleet, model: str, version: str) -> tuple[int, int]:
    """The version's workers: how many take tasks, and how many do not."""
    prefix = f"{model}@{version}"
    pools = [pool for pool in fleet.pools if f"{split(pool.name)[0]}.".startswith(f"{prefix}.")]
    taking = [not worker.get("draining") and not worker.get("unready") for pool in pools for worker in pool.workers]
    return sum(taking), len(taking) - sum(taking)


def raised(state: Canary, outcomes: list[Finding], compared: int, now: int) -> Decision | None:
    """The next step, or the candidate as the default, once this one has lasted and nothing looks worse."""
    held_s = (now - state.since) / 1000
    if held_s < state.plan.hold_s or compared < state.plan.min_samples or any(finding.suspect for finding in outcomes):
        return None
    return next_step(state, f"held {held_s:.0f} s at {state.percent:g}%; nothing looks worse in {compared} comparisons")


def next_step(state: Canary, reason: str) -> Decision:
    """The next step, or the promotion behind the last one."""
    if state.step + 1 < len(state.plan.steps):
        return Decision("raise", "judging", reason, state.step + 1)
    return Decision("promote", "promoted", reason)


def start_trouble(store: Redis, state: Canary) -> str:
    """What keeps a candidate's workers from coming up, as far as it is known; "" if nothing does. Raises
    redis.RedisError or OSError."""
    scaling = parsed(store.hget(keys.SCALE_POOLS, f"{state.model}@{state.version}"))
    return _start_trouble(scaling, state, canaries.now_ms(store))


def _start_trouble(scaling: Mapping[str, Any], state: Canary, now: int) -> str:
    """`scaling`: the last state of the autoscaler's pool of the version."""
    if (sane(scaling.get("at")) or 0.0) * 1000 >= state.begun:
        return str(scaling.get("trouble") or "")
    if now - state.begun < SOON_MS:
        return ""
    return f"no autoscaler has a pool of it: start them, by `penstock worker --model {state.model}=FOLDER`"


def waits_for(state: Canary, outcomes: list[Finding], compared: int, now: int, trouble: str = "") -> str:
    """The reason why a rollout stays at its step, for a person. `trouble`: as of `start_trouble`."""
    if state.phase == "preparing":
        return f"for {state.plan.workers} ready workers of {state.version}" + (f"; {trouble}" if trouble else "")
    if state.phase == "paused":
        return "for `resume`, `promote` or `abort`"
    suspects = [finding.text() for finding in outcomes if finding.suspect]
    held_s = (now - state.since) / 1000
    reasons = (
        [f"for {state.plan.hold_s - held_s:.0f} s of {state.plan.hold_s:g} s"] if held_s < state.plan.hold_s else []
    )
    if compared < state.plan.min_samples:
        which = "" if state.percent else " of copies by each of their metrics"
        reasons.append(f"for comparisons{which}: {compared} of {state.plan.min_samples}")
    return "; ".join([*reasons, *(f"it looks worse: {text_}" for text_ in suspects)])


def seen(state: Canary, evidence: Evidence, outcomes: list[Finding]) -> dict[str, Any]:
    """The row of a look: what was compared so far."""
    figures = {finding.settings.metric.name: finding.figures() for finding in outcomes if finding.count}
    tasks = {"candidate": evidence.candidate.tasks, "baseline": evidence.baseline.tasks}
    return {
        "rollout": state.id,
        "what": "seen",
        "step": state.step,
        "percent": state.percent,
        **tasks,
        "metrics": figures,
    }


def _interference(state: Canary, current: Routing) -> Decision | None:
    """What is done where somebody else changed what the rollout had made of the routing."""
    if current.default == state.version:
        return Decision("promote", "promoted", f"somebody else made it the default (generation {current.generation})")
    if current.default != state.before:
        return Decision("abort", "aborted", f"somebody made {current.default} the default: it has no baseline any more")
    target = routed(current, state)
    if target == current or state.phase == "paused":
        return None
    return Decision(
        "pause",
        "paused",
        f"{current.by or 'somebody'} changed its part in generation {current.generation}: "
        "`penstock rollout resume` sets it again",
    )


def routed(current: Routing, state: Canary) -> Routing:
    """The routing that a state asks for, where all else stays as it is. What others lead to the alias ends with it."""
    ended = _without(current)
    if state.phase in canaries.UNDER_WAY:
        part = {ALIAS: state.percent} if state.percent else {}
        aliases = {**ended.aliases, ALIAS: state.version}
        return replace(current, aliases=aliases, split={**ended.split, **part})
    return replace(ended, default=state.version) if state.phase == "promoted" else ended


def _without(current: Routing) -> Routing:
    """The routing without a rollout's alias, and without what leads to that."""
    return replace(
        current,
        aliases={name: version for name, version in current.aliases.items() if name != ALIAS},
        split={target: percent for target, percent in current.split.items() if target != ALIAS},
        rules=tuple(rule for rule in current.rules if rule.to != ALIAS),
        shadow=None if current.shadow is not None and current.shadow.to == ALIAS else current.shadow,
    )


def decide(store: Redis, state: Canary, decision: Decision, by: str) -> Canary | None:
    """Write a decision, with its row. None if the state was changed meanwhile. Raises redis errors."""
    new = state.decided(decision.phase, decision.reason, decision.step)
    if not canaries.change(store, state, new, decision.what, by):
        return None
    log.info("rollout of %s to %s: %s: %s", new.model, new.version, decision.what, decision.reason)
    return new


def act(store: Redis, state: Canary) -> Canary:
    """Do what a state says, and note that it is done: the routing, and the record by which workers are brought up.

    May be done any number of times, by any number of processes. Returns the state that stands. Raises redis errors.
    """
    try:
        label = f"rollout {state.phase} {state.percent:g}%"
        routes.update(store, state.model, label, lambda now: _ours(store, now, state), by=BY)
    except RoutingError as error:
        if state.phase in (*canaries.UNDER_WAY, "promoted"):  # such as parts of others that leave too little
            return _refused(store, state, str(error))
        log.warning("the routing of %s stays as it is: %s", state.model, error)
    except _Stale:
        return canaries.read(store, state.model) or state
    _bring_up(store, state)
    done = state.acted(canaries.now_ms(store))
    return done if canaries.change(store, state, done, "acted", BY) else canaries.read(store, state.model) or state


class _Stale(Exception):
    """The rollout's state was changed before the routing was."""


def _ours(store: Redis, current: Routing, state: Canary) -> Routing:
    """`routed`, unless the rollout was decided otherwise meanwhile: a controller that was stopped for a while must not
    bring back what an operator has ended. What it reads before that, ROUTE's generation covers. A paused rollout
    leaves the routing as it is: perhaps somebody else wants it so."""
    if (stored_state := canaries.read(store, state.model)) is None or stored_state.revision != state.revision:
        raise _Stale
    return current if state.phase == "paused" else routed(current, state)


def _refused(store: Redis, state: Canary, reason: str) -> Canary:
    label = "it could not become the default" if state.phase == "promoted" else "its part could not be set"
    ended = state.decided("aborted", f"{label}: {reason}")
    if canaries.change(store, state, ended, "abort", BY):
        return act(store, ended)
    return canaries.read(store, state.model) or state


def _bring_up(store: Redis, state: Canary) -> None:
    """Keep the record that makes autoscalers bring the candidate's workers up, and end them when it has ended."""
    record = rollouts.read(store, state.model)
    ours = record is not None and record.version == state.version and record.asked * 1000 >= state.begun
    if state.phase in canaries.UNDER_WAY:
        if not ours or record is None or record.phase not in rollouts.UNDER_WAY:
            at = rollouts.now(store)
            if record is not None and record.phase == "draining":  # of an earlier rollout
                rollouts.change(store, record, record.to("done", at))
            new = Rollout(state.model, state.reference, state.version, state.before, state.plan.workers, at, at)
            if record is not None and record.version == state.before:
                new = replace(new, before_reference=record.reference)
            rollouts.begin(store, new)
    elif ours and record is not None and record.phase == "starting":
        # While it drains, `penstock up` knows the baseline, and starts its workers where somebody goes back to it.
        phase = "draining" if state.phase == "promoted" else "failed"
        rollouts.change(store, record, record.to(phase, rollouts.now(store), state.reason if phase == "failed" else ""))


def end_deleted(store: Redis, record: Rollout) -> None:
    """Give the baseline all tasks again where a rollout's state was deleted, with the record that it left; nothing
    while there is one, or where the alias is not its own. Raises redis errors."""
    noted = record

    def change(current: Routing) -> Routing:
        nonlocal noted
        raw: Any = store.hget(keys.CANARIES, record.model)
        state = Canary.of(raw)
        under_way = raw is not None if state is None else state.under_way
        ours = current.aliases.get(ALIAS) == record.version
        if under_way or not (ours or noted.reason == _DELETED):
            raise _Stale
        if not ours:  # whoever noted it died behind ROUTE
            return current
        if noted.reason != _DELETED:
            noted = replace(record, reason=_DELETED)
            if not rollouts.change(store, record, noted):
                raise _Stale
        return _without(current)

    try:
        routes.update(store, record.model, "rollout deleted: its part ends", change, by=BY)
    except (RoutingError, _Stale):
        return
    rollouts.change(store, noted, noted.to("failed", rollouts.now(store), _DELETED))
    log.warning("rollout of %s to %s: its state was deleted, so its part ends", record.model, record.version)


def _let_go(store: Redis, state: Canary) -> None:
    """End the record of a rollout that was promoted KNOWN_S ago."""
    record = rollouts.read(store, state.model)
    if record is not None and record.version == state.version and record.phase == "draining":
        rollouts.change(store, record, record.to("done", rollouts.now(store)))
