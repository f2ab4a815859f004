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

#: Figures of the kept profile that each worker's measurements move.
BLENDED: Final = ("knee", "tokens_per_s", "tokens_per_task")
#: Figures that are measured together.
OF_THE_KNEE: Final = ("knee", "tokens_per_s")
#: Relative difference up to which a kept figure stays.
MATERIAL: Final = 0.05


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
    cold_start: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Self:
        """A profile from any parsed JSON, without unusable figures."""
        if not isinstance(value, dict):
            return cls()
        phases = value.get("cold_start")
        starts = phases if isinstance(phases, dict) else {}
        figures = {entry.name: sane(value.get(entry.name)) for entry in fields(cls) if entry.name != "cold_start"}
        return cls(**figures, cold_start={str(name): s for name, raw in starts.items() if (s := sane(raw)) is not None})

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
