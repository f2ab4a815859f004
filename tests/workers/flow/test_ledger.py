"""The ledger: credit is the free room plus what lower tiers hold."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.histories import histories
from workers.flow.deliveries import NO_CREDIT, Ledger, Size

SEQS, TOKENS = 8, 1000


def test_an_empty_ledger_has_room_for_all() -> None:
    credit = Ledger((SEQS, TOKENS)).credit()
    assert credit.seqs == (SEQS,) * 4
    assert credit.tokens == (TOKENS,) * 4


def test_a_tier_may_take_what_lower_ones_hold() -> None:
    ledger = Ledger((SEQS, TOKENS))
    ledger.hold("a", Size(rank=2, seqs=6, tokens=900))
    assert ledger.credit().seqs == (8, 8, 2, 2)
    assert ledger.credit().tokens == (1000, 1000, 100, 100)
    ledger.hold("b", Size(rank=0, seqs=5, tokens=500))
    assert ledger.credit().seqs == (3, 3, 0, 0)
    ledger.release("a")
    assert ledger.credit().seqs == (3, 3, 3, 3)


def test_there_is_no_credit_while_frozen() -> None:
    ledger = Ledger((SEQS, TOKENS))
    ledger.freeze(True)
    assert ledger.credit() == NO_CREDIT
    ledger.freeze(False)
    assert ledger.credit().seqs == (SEQS,) * 4


def test_room_is_announced_when_something_was_put_down() -> None:
    rooms: list[int] = []
    ledger = Ledger((SEQS, TOKENS), lambda: rooms.append(1))
    ledger.hold("a", Size(1, 1, 1))
    assert not rooms
    ledger.release("a")
    assert len(rooms) == 1
    ledger.release("a")
    assert len(rooms) == 1, "it was put down before"
    ledger.clear()
    ledger.freeze(False)
    assert len(rooms) == 3


class Histories(RuleBasedStateMachine):
    """Whatever is held and released in whatever order: the sums stay those of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger((SEQS, TOKENS))
        self.held: dict[str, Size] = {}

    @rule(name=st.uuids().map(str), rank=st.integers(0, 3), seqs=st.integers(0, SEQS), tokens=st.integers(0, TOKENS))
    def hold(self, name: str, rank: int, seqs: int, tokens: int) -> None:
        self.ledger.hold(name, Size(rank, seqs, tokens))
        self.held[name] = Size(rank, seqs, tokens)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.held, "unknown"]))
        self.ledger.release(name)
        self.held.pop(name, None)

    @rule()
    def clear(self) -> None:
        self.ledger.clear()
        self.held.clear()

    @invariant()
    def credit_is_what_is_not_held_by_this_tier_or_better(self) -> None:
        credit = self.ledger.credit()
        for rank in range(4):
            seqs = sum(size.seqs for size in self.held.values() if size.rank <= rank)
            tokens = sum(size.tokens for size in self.held.values() if size.rank <= rank)
            assert credit.seqs[rank] == max(0, SEQS - seqs)
            assert credit.tokens[rank] == max(0, TOKENS - tokens)
        assert self.ledger.count == len(self.held)


TestHistories = Histories.TestCase
TestHistories.settings = histories(60, 20)
