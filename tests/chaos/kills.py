"""Plans of kills for a few workers, one of which is always spared: whoever is left has to see that the others died.

blows(seed, ...) -> Blow, ... -> test_kills (stub engine, counts), tests.bench.failover --within (times)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

#: Share of instants at which all but one are killed.
TOGETHER: Final = 0.25


@dataclass(frozen=True, slots=True)
class Blow:
    """`at`: seconds after the first could come. `victims`: places of workers that are killed then; each is replaced, in
    its place. The oldest is hit as often as any."""

    at: float
    victims: tuple[int, ...]


def blows(seed: int, *, workers: int, kills: int, seconds: float) -> list[Blow]:
    """So many kills within so many seconds, a function of the seed. Two instants are at least half as far apart as they
    are on average: who is to replace the dead has to start."""
    rng = random.Random(f"{seed} kills")
    found: list[tuple[int, ...]] = []
    while (left := kills - sum(map(len, found))) > 0:
        count = workers - 1 if rng.random() < TOGETHER else 1
        found.append(tuple(sorted(rng.sample(range(workers), min(count, left)))))
    pause = seconds / len(found)
    return [Blow(round((k + rng.uniform(0.0, 0.5)) * pause, 3), victims) for k, victims in enumerate(found)]
