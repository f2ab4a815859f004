"""A profile: what workers of a model version measured of themselves. It is kept, and known at zero workers.

Format, one JSON object in the lease's `profile`, and in the hash `penstock:profiles` under `model@version`. Each key
may be missing as long as nothing was measured; readers treat a value that is no finite number above 0 as missing.

    knee             sequences at once from which on more of them raise throughput little (requests in flight)
    tokens_per_s     tokens (computed prompt tokens and generated ones) a second that one worker makes at its knee
    tokens_per_task  mean of the same tokens over tasks that ended
    ttft_p95         95th percentile of the time to the first token (s) of the last minutes, measured from the claim
    duty             share (0 to 1) of the last 10 s in which the engine computed
    kv_capacity      tokens of the longest sequence that the KV cache holds
    cold_start       {"process", "imports", "weights", "compile", "warm_up", "connect", "total"} (s) of the last start
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Profile:
    """See the module's head. None: not measured."""

    knee: float | None = None
    tokens_per_s: float | None = None
    tokens_per_task: float | None = None
    ttft_p95: float | None = None
    duty: float | None = None
    kv_capacity: float | None = None
    cold_start: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Any) -> Self:
        """A profile from parsed JSON of whatever kind; what is no sane figure is left out."""
        if not isinstance(said, dict):
            return cls()
        phases = said.get("cold_start")
        starts = phases if isinstance(phases, dict) else {}
        figures = {entry.name: sane(said.get(entry.name)) for entry in fields(cls) if entry.name != "cold_start"}
        return cls(**figures, cold_start={str(name): s for name, raw in starts.items() if (s := sane(raw)) is not None})

    @classmethod
    def from_json(cls, text: str | bytes | None) -> Self:
        """The same from JSON; an empty profile from no JSON."""
        try:
            return cls.of(json.loads(text or "{}"))
        except (ValueError, RecursionError):
            return cls()

    def to_json(self) -> str:
        """One line, without what was not measured."""
        return json.dumps({name: value for name, value in asdict(self).items() if value})


def sane(said: Any) -> float | None:
    """A finite number from 0 on; None for anything else: NaN, infinity, a negative number, a text."""
    if isinstance(said, bool) or not isinstance(said, int | float):
        return None
    return float(said) if math.isfinite(said) and said >= 0 else None
