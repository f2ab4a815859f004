"""The pools that an autoscaler scales: their settings, and where they come from.

A pool is `MODEL`, all versions of a model together, or `MODEL@VERSION`, one version alone. `Pools` is asked at each
tick, with the fleet as it was just read: pools may come (a new version is being rolled out) and go (an old one is
empty). `fixed` is for those that a command line or a file names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.admin.fleet import Fleet
from workers.autoscaler.actuators.base import Actuator
from workers.autoscaler.policy.rules import Rules


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of one pool. Times are seconds."""

    model: str
    version: str | None = None
    """None: all versions of the model."""
    rules: Rules = field(default_factory=Rules)
    actuator: str = "export"
    """Its URL; see `workers.autoscaler.actuators`."""
    tries: int = 5
    """Starts in a row that may fail. After that no worker is started until `penstock scale retry`, or a long pause."""
    start_limit: float | None = None
    """Longest start of a worker; a longer one has failed. None: 120 s, or four measured cold starts if longer."""
    reference: str | None = None
    """The model as workers are told it; None: its name."""

    @property
    def name(self) -> str:
        return self.model if self.version is None else f"{self.model}@{self.version}"


class Scaled(NamedTuple):
    """A pool, and what starts and ends its workers. None: another program follows the exported number.

    The actuator must be the same object at each tick. Whoever made it closes it, once the pool is gone.
    """

    settings: PoolSettings
    actuator: Actuator | None


#: Gives the pools of this moment, for the fleet as it was just read. It must not wait.
Pools = Callable[[Fleet], Sequence[Scaled]]


def fixed(pools: Sequence[Scaled]) -> Pools:
    """Always the same pools."""
    return lambda fleet: pools
