"""While a gateway's loop is behind, its busiest callers wait, and nobody else does."""

from __future__ import annotations

from producers.gateway.http.fair_share import FREE, LONGEST_S, WINDOW, FairShare


def looked(share: FairShare, late: float, load: float, times: int = 40) -> FairShare:
    """The same after some looks at a loop that comes so late (s), with this part of the time computing."""
    for _ in range(times):
        share.look(late, load)
    return share


def test_nobody_is_counted_while_the_loop_keeps_up() -> None:
    assert not looked(FairShare(), late=0.002, load=0.9).behind


def test_the_busiest_caller_waits_while_the_loop_is_behind_and_others_do_not() -> None:
    share = looked(FairShare(), late=0.05, load=0.9)
    assert share.behind
    pauses = {caller: [share.pause(caller) for _ in range(count)] for caller, count in (("many", 500), ("few", FREE))}
    assert pauses["few"] == [0.0] * FREE
    assert pauses["many"][-1] == 0.0  # it was alone
    assert share.pause("many") == LONGEST_S
    looked(share, late=0.05, load=0.9, times=WINDOW)
    assert share.pause("many") == 0.0  # what is long ago is forgotten


def test_a_caller_who_is_alone_never_waits() -> None:
    share = looked(FairShare(), late=0.05, load=0.9)
    assert {share.pause("alone") for _ in range(1000)} == {0.0}


def test_nobody_waits_where_others_have_the_processor() -> None:
    share = looked(FairShare(), late=0.5, load=0.1)
    for caller in ("few", "many"):
        assert {share.pause(caller) for _ in range(1 if caller == "few" else 500)} == {0.0}


def test_pauses_end_when_the_loop_keeps_up_again() -> None:
    share = looked(FairShare(), late=0.05, load=0.9)
    assert not looked(share, late=0.0, load=0.5).behind
