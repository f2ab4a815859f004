"""Signals: what the policy sees of one pool at one moment.

A value that is missing, negative, NaN or too old is None, and `missing` says which. The policy never takes a missing
number for zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import with_config

from producers.contract import keys
from producers.contract.profile import Profile
from workers.autoscaler.policy.memory import STRICT


@dataclass(frozen=True, slots=True)
class TierQueue:
    """One tier's waiting tasks. `oldest_s`: seconds since the longest waiting task was submitted, where known."""

    waiting: int = 0
    oldest_s: float | None = None


@dataclass(frozen=True, slots=True)
class LevelQueue:
    """The waiting tasks that need a level of their worker's release, or a higher one (`producers.contract.levels`)."""

    level: int
    waiting: dict[str, int]
    """By tier."""
    below: int
    """Ready workers of earlier releases, which take none of them."""
    able: int
    """The other ready workers."""
    in_flight: int
    """Hurried tasks that those have."""


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Signals:
    """`at`: the store's clock (unix s). `ready`: workers with a live lease that take tasks."""

    at: float
    tiers: dict[str, TierQueue] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, TierQueue()))
    in_flight: int = 0
    patient: int = 0
    """Flex and batch tasks among those in flight (the sum of `patient` in the workers' leases)."""
    ready: int = 0
    running: int = 0
    """Sequences that the ready workers are generating."""
    kv_used: float | None = None
    """Share of the KV blocks of all ready workers that sequences hold (0 to 1)."""
    profile: Profile = field(default_factory=Profile)
    """The kept profile, with the p95 TTFT and duty cycle of the ready workers (the worst and the mean of them)."""
    levels: tuple[LevelQueue, ...] = ()
    """Of each level above 0 that tasks wait for, as far as workers of the autoscaler's own release can do them."""
    aside: int = 0
    """What waits for a release after the autoscaler's own: messages of unknown kinds. It is in no other number."""
    missing: tuple[str, ...] = ()
    """Names of the numbers that could not be read or make no sense."""

    @property
    def queued(self) -> int:
        return sum(tier.waiting for tier in self.tiers.values())
