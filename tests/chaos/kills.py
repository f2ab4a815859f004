"""Plans of kills for a few workers, one of which is always spared: whoever is left has to see that the others died.

blows(seed, ...) -> Blow, ... -> test_kills (stub engine, counts), tests.bench.failover --within (times)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

#: Kills that come one after another, until nobody is left who has stood for a lease.
BURST: Final = 6
#: Share of kills that hit the oldest worker; the others hit any.
OLDEST: Final = 0.8


@dataclass(frozen=True, slots=True)
class Blow:
    """`at`: seconds after the first could come. `victim`: the place of the worker that is killed then; another takes
    that place."""

    at: float
    victim: int


def blows(seed: int, *, workers: int, kills: int, seconds: float) -> list[Blow]:
    """So many kills within so many seconds, in bursts; a function of the seed."""
    rng = random.Random(f"{seed} kills")
    by_age, found = list(range(workers)), list[Blow]()
    span = seconds / -(-kills // BURST)
    for k in range(kills):
        victim = by_age[0] if rng.random() < OLDEST else rng.choice(by_age)
        by_age.remove(victim)
        by_age.append(victim)
        place = (k % BURST + rng.uniform(0.0, 0.5)) / (2 * BURST)  # the second half of its span is quiet
        found.append(Blow(round((k // BURST + place) * span, 3), victim))
    return found
