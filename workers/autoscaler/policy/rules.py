"""Rules: every constant of the scaling policy, each a setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from producers.contract import keys

#: Longest wait (s) that each tier should have.
TARGET_WAIT_S: Final = dict(zip(keys.TIERS, (2.0, 10.0, 300.0, 3600.0), strict=True))
#: Tiers whose tasks count at once. The others wait until they are worth a start.
HURRIED: Final = ("priority", "default")
_ABOVE_ZERO: Final = (
    *("cool_down", "headroom", "default_knee", "worth", "ttft_objective", "kv_high", "duty_high", "blind"),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Times are seconds."""

    min: int = 0
    """Workers that run at any time."""
    max: int = 1
    """Workers that run at most."""
    cool_down: float = 300.0
    """Time for which fewer workers must have been enough before one ends, and between two ends."""
    headroom: float = 0.8
    """Share of a worker's knee concurrency that it is planned to hold."""
    default_knee: float = 8.0
    """Knee concurrency of a version that no worker has measured yet."""
    growth: float = 2.0
    """Largest factor by which the number grows in one step."""
    step: float = 5.0
    """Shortest time between two steps out. Zero to one needs none."""
    target_wait: dict[str, float] = field(default_factory=lambda: dict(TARGET_WAIT_S))
    """Longest wait that each tier should have."""
    patience: float = 0.5
    """Share of its target wait after which a flex or batch task counts, whatever is queued beside it."""
    worth: float = 2.0
    """Work queued in flex and batch, in cold starts of one worker, from which on their tasks count at once."""
    ttft_objective: float = 1.0
    """p95 of the time to the first token above which a busy pool gets one more worker."""
    kv_high: float = 0.85
    """Share of KV blocks in use above which a busy pool gets one more worker."""
    duty_high: float = 0.7
    """Share of time computing above which a busy pool gets one more worker."""
    duty_for: float = 120.0
    """Time for which the pool must have been that busy."""
    blind: float = 15.0
    """Longest time between two looks at a pool that counts for a cool-down. A longer one counts as not seen."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the setting that makes no sense."""
        if not 0 <= self.min <= self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; they must be 0 <= min <= max")
        if self.max < 1:
            raise ValueError(f"max is {self.max}; it must be at least 1")
        if self.growth <= 1:
            raise ValueError(f"growth is {self.growth:g}; it must be above 1")
        for name in _ABOVE_ZERO:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be above 0")
        for name in ("step", "patience", "duty_for"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be 0 or more")
