"""Rollouts that judge (`producers.rollouts`): their states, evidence and decisions.

The hash `penstock:canaries` has the last rollout of each model (JSON, `Canary`), changed by SWAP, which appends a row
to the stream `penstock:canaries:log:<model>` (the latest KEPT) in the same script. A decision is such a change:

    decided:  the phase, step and percentage that shall be; `since` is 0      SWAP, with the decision's row
    acted:    the model's routing gives them; `since` is the time             ROUTE; then SWAP

So each decision is a row before anything acts on it, and whoever reads a state with `since` 0 knows what is left to do.
`docs/how/rollouts.md` has the table of deaths.

The hash `penstock:canaries:evidence` has what was compared (JSON, `producers.rollouts.metrics.Evidence`), with the id
of the last row of the ledger that is in it: no row counts twice, whoever dies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

from redis import Redis

from producers.connection.script import Call, run, script, text
from producers.contract import keys
from producers.store.protocol import PACKAGE

#: Rows of a model that are kept.
KEPT: Final = 2000
#: The alias by which a rollout's part of the tasks is told from what callers address themselves.
ALIAS: Final = "rollout"
#: The metric for which outputs are scored (`producers.store.shadows`).
LIKELIHOOD: Final = "likelihood"
#: Phases in which the candidate may get a part of the tasks.
UNDER_WAY: Final = ("preparing", "judging", "paused")


@dataclass(frozen=True, slots=True)
class Plan:
    """An operator's settings of a rollout. `alpha`: probability of rolling back a candidate that is no worse, over all
    metrics, steps and looks; `metrics`: name -> its margin and tolerance."""

    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0)
    """Percentages below 100, the first perhaps 0; after the last one the candidate becomes the default."""
    hold_s: float = 600.0
    """Shortest time of a step."""
    min_samples: int = 50
    """Fewest comparisons of a step."""
    workers: int = 1
    """Ready workers of the candidate to wait for before the first step."""
    timeout_s: float = 600.0
    """Longest time for them to become ready."""
    lost_s: float = 30.0
    """Time without a ready worker of the candidate after which it is rolled back."""
    warm_up_s: float = 30.0
    """Time from the first traffic whose tasks' times are not compared."""
    alpha: float = 0.01
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    """Phrases by which refusals are told; none: the usual ones (`producers.rollouts.refusals`)."""
    block_s: float = 10.0
    """Time whose comparisons of times count as one; 0: each counts."""
    per_tenant: int = 0
    """Most tasks of a tenant's that are compared in a step, of the candidate; 0: no bound."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A rollout. Times are the store's (unix ms).

    `version`: the candidate; `before`: the baseline, the default when it began; `reference`: the candidate's for
    `penstock up`, NAME=FOLDER or NAME=URL, or ''; `phase`: of UNDER_WAY, or promoted, rolled_back, aborted, failed;
    `step`: of the plan's, from 0; -1 before the first; `percent`: the candidate's part; `since`: when the routing began
    to give it; 0: it is yet to; `traffic`: when the first step began; 0: it has not; `revision`: number of changes.
    """

    model: str
    id: str
    version: str
    before: str
    plan: Plan
    begun: int
    by: str
    reference: str = ""
    phase: str = "preparing"
    step: int = -1
    percent: float = 0.0
    since: int = 0
    traffic: int = 0
    reason: str = ""
    revision: int = 0

    @classmethod
    def of(cls, raw: Any) -> Self | None:
        """A stored state; None for a missing or unreadable one."""
        try:
            fields = json.loads(raw)
            plan = fields["plan"]
            refusals = tuple(plan.get("refusals", ()))
            return cls(**{**fields, "plan": Plan(**{**plan, "steps": tuple(plan["steps"]), "refusals": refusals})})
        except (TypeError, ValueError, KeyError):
            return None

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(asdict(self))

    @property
    def under_way(self) -> bool:
        """Whether it may still do something."""
        return self.phase in UNDER_WAY or not self.since

    def decided(self, phase: str, reason: str, step: int | None = None) -> Canary:
        """The state that a decision asks for. `step`: unset, the same; an ended rollout has no part any more."""
        index = self.step if step is None else step
        percent = self.plan.steps[index] if phase in UNDER_WAY and 0 <= index < len(self.plan.steps) else 0.0
        revision = self.revision + 1
        return replace(self, revision=revision, phase=phase, reason=reason, step=index, percent=percent, since=0)

    def acted(self, at: int) -> Canary:
        """The state once the routing gives what was decided."""
        first = self.traffic or (at if self.phase == "judging" else 0)
        return replace(self, revision=self.revision + 1, since=at, traffic=first)


def read(store: Redis, model: str) -> Canary | None:
    """A model's last rollout. Raises redis.RedisError or OSError, as the others do."""
    return Canary.of(store.hget(keys.CANARIES, model))


def all_of(store: Redis) -> list[Canary]:
    """The last rollout of each model, by name."""
    states = (Canary.of(raw) for _, raw in sorted(store.hgetall(keys.CANARIES).items()))
    return [state for state in states if state is not None]


def now_ms(store: Redis) -> int:
    """The store's clock."""
    whole, micro = store.time()
    return int(whole) * 1000 + int(micro) // 1000


def begin(store: Redis, new: Canary, raw: str, by: str) -> bool:
    """Write a new rollout in place of the one that was read as `raw` ('': none). False if another did meanwhile."""
    return bool(run(store, _swap(keys.CANARIES, new.model, raw, new.to_json(), _row(new, "start", by))))


def change(store: Redis, old: Canary, new: Canary, what: str, by: str, **details: Any) -> bool:
    """Replace a state, and append the row of what was decided or done. False if it was changed meanwhile.

    `what`: start, raise, promote, roll_back, abort, fail, pause, resume, or acted. `details`: more of the row.
    """
    raw: Any = store.hget(keys.CANARIES, old.model)
    if Canary.of(raw) != old:
        return False
    row = _row(new, what, by, **details)  # another release may write the same state with fewer fields
    return bool(run(store, _swap(keys.CANARIES, old.model, text(raw), new.to_json(), row)))


def read_evidence(store: Redis, model: str) -> str:
    """What was compared, as it is stored; '' for none."""
    return text(store.hget(keys.CANARY_EVIDENCE, model) or "")


def write_evidence(store: Redis, model: str, old: str, new: str, row: Mapping[str, Any] | None) -> bool:
    """Replace what was compared, and append a row of it. False if another process did meanwhile."""
    return bool(run(store, _swap(keys.CANARY_EVIDENCE, model, old, new, "" if row is None else json.dumps(row))))


def rows(store: Redis, model: str, rollout: str | None = None) -> list[dict[str, Any]]:
    """The kept rows of a model, or of one rollout, the oldest first; each has its time `at` (unix ms)."""
    entries: Any = store.xrange(keys.canary_log(model))
    parsed = [{"at": int(text(entry).partition("-")[0]), **json.loads(fields[b"e"])} for entry, fields in entries]
    return [row for row in parsed if rollout in (None, row["rollout"])]


def forget(store: Redis, model: str) -> None:
    """Remove all of a model that is gone."""
    store.hdel(keys.CANARIES, model)
    store.hdel(keys.CANARY_EVIDENCE, model)
    store.delete(keys.canary_log(model))


def _row(state: Canary, what: str, by: str, **details: Any) -> str:
    names = ("phase", "step", "percent", "reason")
    return json.dumps({"rollout": state.id, "what": what, "by": by, **{n: getattr(state, n) for n in names}, **details})


def _swap(name: str, model: str, old: str, new: str, row: str) -> Call:
    """SWAP, with the model's log in place of the audit log."""
    arguments = (model, old, new, 0, row, KEPT, "", "", keys.canary_log(model), 0)
    return Call(script(PACKAGE, "swap"), (name,), arguments)
