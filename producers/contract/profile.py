"""A profile: what workers of a model version measured of themselves. It is kept, and known at zero workers.

Format, one JSON object in the lease's `profile`, and in the hash `penstock:profiles` under `model@version`. Each key
may be missing as long as nothing was measured; readers treat a value that is no finite number from 0 on as missing.

    knee             sequences at once from which on more of them raise throughput little (requests in flight)
    reached          the most sequences at once of which enough steps were measured
    tokens_per_s     tokens (computed prompt tokens and generated ones) a second that one worker makes at its knee
    tokens_per_task  mean of the same tokens over the last tasks that ended
    ttft_p95         95th percentile of the time to the first token (s) of the last minutes, measured from the claim
    duty             share (0 to 1) of the last 10 s in which the engine had work
    kv_capacity      tokens of the longest sequence that the KV cache holds
    task_times       how long the last tasks took in a worker: see `TaskTimes`
    cold_start       {"process", "imports", "weights", "compile", "warm_up", "connect", "total", "first_token"} (s) of
                     the last start, as `workers.runtime.cold_start` explains; without what did not occur

`reached`, `ttft_p95` and `duty` are in leases and are not kept. `Profile.merged` makes the kept profile of several
workers' profiles.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

#: Quantiles of `TaskTimes.shares`: the least, each tenth, the largest.
QUANTILES: Final = 11
#: Figures of the kept profile that each worker's measurements move.
BLENDED: Final = ("knee", "tokens_per_s", "tokens_per_task")
#: Figures that are measured together.
OF_THE_KNEE: Final = ("knee", "tokens_per_s")
#: All figures that are one number.
FIGURES: Final = (*BLENDED, "reached", "ttft_p95", "duty", "kv_capacity")
#: Relative difference up to which a kept figure stays.
MATERIAL: Final = 0.05


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """Times of the last completed tasks, from the claim to the end (s), at the load that there was. A task's need is
    the KV tokens that it may need, as its message says. Times of whole tasks count once for each sequence of theirs."""

    per_output_token: float
    per_prompt_token: float
    """What each token of a choice, and each of the prompt, adds to a task's time: a line of least squares."""
    per_need: float
    """Seconds of a sequence's slot for each token of need."""
    task: float
    """Mean of a task's slot seconds."""
    remaining: float
    """Mean of what remains of a running task's slot seconds, at any moment."""
    need_error: float
    """Relative error (root mean square) of `per_need` as a forecast for the next 8 tasks together."""
    error: float
    """The same of the line, as a forecast for the next task, its output's length being known."""
    running: float
    """Mean of the sequences that the engine computed together when these tasks ended."""
    shares: tuple[float, ...] = ()
    """Quantiles of the share of its allowed output tokens that a task made: the least, each tenth, the largest. Empty
    of a model that generates nothing."""

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """From any parsed JSON; None if a figure is missing or unusable."""
        if not isinstance(value, dict):
            return None
        figures = {entry.name: sane(value.get(entry.name)) for entry in fields(cls) if entry.name != "shares"}
        shares = value.get("shares", [])
        if None in figures.values() or not isinstance(shares, list | tuple) or len(shares) not in (0, QUANTILES):
            return None
        quantiles = [share for raw in shares if (share := sane(raw)) is not None]
        if len(quantiles) != len(shares) or quantiles != sorted(quantiles):
            return None
        return cls(**{name: float(figure or 0.0) for name, figure in figures.items()}, shares=tuple(quantiles))


@dataclass(frozen=True, slots=True)
class Profile:
    """See the module's head. None: not measured."""

    knee: float | None = None
    reached: float | None = None
    tokens_per_s: float | None = None
    tokens_per_task: float | None = None
    ttft_p95: float | None = None
    duty: float | None = None
    kv_capacity: float | None = None
    task_times: TaskTimes | None = None
    cold_start: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Self:
        """A profile from any parsed JSON, without unusable figures."""
        if not isinstance(value, dict):
            return cls()
        phases = value.get("cold_start")
        starts = phases if isinstance(phases, dict) else {}
        figures = {name: sane(value.get(name)) for name in FIGURES}
        return cls(
            **figures,
            task_times=TaskTimes.of(value.get("task_times")),
            cold_start={str(name): s for name, raw in starts.items() if (s := sane(raw)) is not None},
        )

    def merged(self, observed: Profile, *, fresh: bool, started: bool) -> Profile:
        """This kept profile after a worker has measured `observed`. Figures that it lacks stay.

        `fresh`: it has measured since its last report. Then a figure that differs by more than MATERIAL moves half of
        the way, so that workers that differ do not swing it. `started`: the figures of its start are new.

        A knee that is found from low load alone may be too high. So a higher one counts only if that worker has reached
        as many sequences at once as the kept one says.
        """
        higher = self.knee and observed.knee and observed.knee > self.knee
        believed = not higher or (observed.reached or 0.0) >= (self.knee or 0.0)
        moved = {
            name: _moved(getattr(self, name), getattr(observed, name), fresh and (believed or name not in OF_THE_KNEE))
            for name in BLENDED
        }
        return Profile(
            **moved,
            task_times=(observed.task_times if fresh else None) or self.task_times or observed.task_times,
            kv_capacity=observed.kv_capacity if started or self.kv_capacity is None else self.kv_capacity,
            cold_start=(observed.cold_start if started else {}) or self.cold_start or observed.cold_start,
        )

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Self:
        """A profile from JSON; an empty one from a text that is no JSON."""
        try:
            return cls.of(json.loads(text or "{}"))
        except (ValueError, RecursionError):
            return cls()

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}

    def to_json(self) -> str:
        """The profile as one line of JSON."""
        return json.dumps(self.to_dict())


def _moved(kept: float | None, observed: float | None, fresh: bool) -> float | None:
    if not kept or not observed:
        return kept or observed
    return (kept + observed) / 2 if fresh and abs(observed - kept) > MATERIAL * kept else kept


def sane(value: Any) -> float | None:
    """A finite number from 0 on; None for anything else: NaN, infinity, a negative number, a text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) and value >= 0 else None
    except OverflowError:  # an integer beyond all floats
        return None
