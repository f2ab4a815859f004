"""Decides whether a worker's figures are far off its peers'. Pure.

Two reasons, as in Envoy's outlier detection and gRPC's (gRFC A50), each with a least number of peers and of cases:

Failures: the share of tasks that its engine failed is larger than all peers' together, by FAILURES at least and by more
than chance gives (DEVIATIONS standard deviations). Bad requests reach all workers of a pool alike.

Slowness: its decode steps take FACTOR times as long as the middle peer's of the same size, and EXCESS_S longer. A slow
worker has more sequences at once than its peers. So where they lack a size, the bound is what they take for a larger
one, or for a smaller one times the difference. A step's time is linear in its size, so that on equal machines this is
off by less than 2, and no load makes a slow worker. Peers on other kinds of machines, and sizes that fewer than PEERS
peers have, are not compared.

A pool that is slow or fails as a whole has no outlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Final

from workers.breaker.figures import Figures, Key

#: Peers with whom a comparison is one.
PEERS: Final = 2
#: Ended tasks from which on a share of failures is one: a worker's own, and its peers' together.
ENDED: Final = 10
FAILURES: Final = 0.3
DEVIATIONS: Final = 4.0
FACTOR: Final = 3.0
EXCESS_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Slowness:
    """Mean seconds of this worker's comparable steps, and of its peers' for the same steps."""

    mine: float
    peers: float

    @property
    def ratio(self) -> float:
        return self.mine / self.peers

    @property
    def far(self) -> bool:
        return self.ratio >= FACTOR and self.mine - self.peers >= EXCESS_S


def judge(mine: Figures, peers: Sequence[Figures]) -> str:
    """Why this worker is an outlier among its peers; empty where it is none."""
    if reason := failures(mine, peers):
        return reason
    slow = slowness(mine, peers)
    if slow is None or not slow.far:
        return ""
    return f"its decode steps take {slow.ratio:.1f} times as long as its peers' ({1e3 * slow.mine:.1f} ms)"


def failures(mine: Figures, peers: Sequence[Figures]) -> str:
    """Why it fails too many tasks; empty where it does not."""
    measured = [peer for peer in peers if peer.ended]
    ended, failed = sum(peer.ended for peer in measured), sum(peer.failed for peer in measured)
    if len(measured) < PEERS or min(mine.ended, ended) < ENDED:
        return ""
    share, theirs = mine.failed / mine.ended, failed / ended
    both = (mine.failed + failed) / (mine.ended + ended)
    chance = sqrt(both * (1 - both) * (1 / mine.ended + 1 / ended))
    if share - theirs < max(FAILURES, DEVIATIONS * chance):
        return ""
    return f"its engine failed {mine.failed} of {mine.ended} tasks, its peers' {failed} of {ended}"


def slowness(mine: Figures, peers: Sequence[Figures]) -> Slowness | None:
    """The comparison of decode steps; None where nothing can be compared."""
    alike = [peer for peer in peers if peer.machine == mine.machine]
    known = {key: expected for peer in alike for key in peer.steps if (expected := _middle(key, alike)) is not None}
    if not known or not mine.steps:
        return None
    steps = sum(count for count, _ in mine.steps.values())
    own = sum(count * seconds for count, seconds in mine.steps.values())
    theirs = sum(count * _at_most(key, known) for key, (count, _) in mine.steps.items())
    return Slowness(own / steps, theirs / steps) if theirs else None


def _middle(key: Key, peers: Sequence[Figures]) -> float | None:
    """Seconds of the middle peer's steps of this key."""
    found = [peer.steps[key][1] for peer in peers if key in peer.steps]
    return median(found) if len(found) >= PEERS else None


def _at_most(key: Key, known: Mapping[Key, float]) -> float:
    """Seconds that peers would take for a step of this key, or less: a larger step takes no less, and one of twice the
    size at most twice as long."""
    return min(seconds * 2.0 ** max(0, key[0] - k[0], key[1] - k[1]) for k, seconds in known.items())
