"""Signals that tests show to the policy, and a pool that does as it says."""

from __future__ import annotations

from typing import Any

from producers.contract import keys
from producers.contract.profile import Profile
from workers.autoscaler.policy import Decision, Memory, Rules, Signals, TierQueue, decide

RULES = Rules(max=100)
#: A worker does a task in one second, has a knee of 10 (8 with headroom), and starts in 20 s.
PROFILE = Profile(knee=10, tokens_per_s=100, tokens_per_task=100, cold_start={"total": 20.0})


def seen(at: float = 0.0, /, profile: Profile = PROFILE, **said: Any) -> Signals:
    """Signals; waiting tasks by tier as (number, oldest) or a number."""
    tiers = {}
    for tier in keys.TIERS:
        waiting = said.pop(tier, 0)
        number, oldest = waiting if isinstance(waiting, tuple) else (waiting, 0.0 if waiting else None)
        tiers[tier] = TierQueue(number, oldest)
    return Signals(at, tiers, profile=profile, **said)


def raw(signals: Signals, rules: Rules = RULES, memory: Memory | None = None) -> dict[str, int]:
    return decide(rules, signals, memory or Memory())[0].raw


class Pool:
    """A pool under the policy, looked at every five seconds."""

    def __init__(self, rules: Rules = RULES, memory: Memory | None = None, at: float = 0.0) -> None:
        self.rules, self.memory, self.at = rules, memory or Memory(), at
        self.last = Decision(0, "", {})

    def see(self, seconds: float, profile: Profile = PROFILE, **said: Any) -> int:
        """Show it the same signals for so long. Returns the number at the end."""
        end = self.at + seconds
        while True:
            self.last, self.memory = decide(self.rules, seen(self.at, profile, **said), self.memory)
            if self.at >= end:
                return self.last.target
            self.at = min(end, self.at + 5)
