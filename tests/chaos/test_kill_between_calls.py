"""Wherever a worker dies between two calls, or loses an answer, its tasks end as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from producers.connection.script import Call
from producers.contract import leases
from tests.chaos.calls import kind
from tests.chaos.kill_between_calls import Pairs, strike
from tests.chaos.tap import MODES, Aim

#: Calls of the protocol: of a worker that serves, and of one that is drained.
SERVING, DRAINED = ("FETCH", "CLAIM", "APPEND", "FINISH", "SETTLE", "ACK"), ("RELEASE", "BACK")


def once(kinds: tuple[str, ...]) -> Iterator[Aim]:
    """Strikes at each of these kinds of calls once, in each way by turns."""
    left = dict(zip(kinds, itertools.cycle(MODES)))
    return itertools.repeat(lambda previous, call: left.pop(call.kind, None))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("drained", "kinds"), [(False, SERVING), (True, DRAINED)], ids=["serving", "drained"])
def test_each_kind_of_call_can_be_struck(drained: bool, kinds: tuple[str, ...]) -> None:
    tally = strike(once(kinds), lanes=3, drained=drained)
    assert not tally.faults
    assert {second for _, second in tally.pairs} == {*kinds}
    assert {*tally.struck} == {*MODES[: len(kinds)]}


@pytest.mark.exhaustive
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
        assert kinds >= {*(DRAINED if drained else SERVING)}
    assert ways == {"before", "after", "drop"}


@pytest.mark.parametrize(
    ("call", "name"), [(leases.join("first.1"), "JOIN"), (leases.look("first.1", ["second.1"]), "LOOK")]
)
def test_a_kind_of_call_names_no_worker(call: Call, name: str) -> None:
    """Else each run would have pairs that none had before, and runs would never end."""
    assert kind([[str(word).encode() for word in call.command]]) == name
