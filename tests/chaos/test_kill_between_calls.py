"""Wherever a worker dies between two calls, or loses an answer, its tasks end as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.chaos.kill_between_calls import Pairs, strike


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_of_adjacent_calls_can_be_parted() -> None:
    pairs, ways = Pairs(), set()
    for drained in (False, True):
        tally = strike(pairs.aims(), lanes=3, drained=drained)
        assert not tally.faults
        ways |= set(tally.struck)
        # What the protocol knows, whatever threads make of its order.
        kinds = {kind for pair in tally.pairs for kind in pair}
        assert kinds >= ({"RELEASE", "BACK"} if drained else {"FETCH", "CLAIM", "APPEND", "FINISH", "SETTLE", "ACK"})
    assert ways == {"before", "after", "drop"}
