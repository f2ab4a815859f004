"""How long streams stood still is told of each kind by itself, and of none too little."""

from __future__ import annotations

from typing import Any

import pytest

from workers.trials.chaos.checker.case import Case, History
from workers.trials.chaos.checker.report import LONG_S, Gaps
from workers.trials.chaos.checker.store import Stores

ROLE = {"role": "worker"}


def _kill(at: float, process: str, *stopped: str) -> dict[str, Any]:
    told = {"stood": at - 0.1, "stopped": dict.fromkeys(stopped, 1), "lease_left": 8.0}
    return {"t": at, "e": "fault", "kind": "kill", "target": "w", "process": process, **ROLE, **told}


def _serves(at: float, process: str) -> dict[str, Any]:
    return {"t": at, "e": "serves", "process": process, **ROLE}


def _resumed(at: float, name: str) -> dict[str, Any]:
    return {"t": at, "e": "resumed", "id": name, "length": 1}


def _gaps(*lines: dict[str, Any], ends: str = "completed") -> Gaps:
    history = History()
    history.extend([_serves(0.0, "a1"), _serves(0.0, "b1"), *lines])
    stream: list[tuple[str, Any]] = [("1-0", [0, 0, 7, "x"]), ("2-0", [0, 1, 8, "y"]), ("3-0", {"end": "completed"})]
    ended = [stream[0], ("2-0", {"end": ends})]
    return Gaps.of(Case(history, Stores(), {"s": stream, "t": stream, "e": ended}))


def test_the_last_kill_begins_the_clock() -> None:
    gaps = _gaps(_kill(10.0, "a1", "s", "t"), _serves(14.0, "a2"), _kill(17.0, "b1", "s"), *_went(s=27.0, t=19.0))
    assert gaps.struck_again == 1
    assert sorted(gaps.served) == pytest.approx([9.1, 10.1])
    assert not gaps.unserved


def _went(**at: float) -> list[dict[str, Any]]:
    return [_resumed(when, name) for name, when in at.items()]


def test_what_waited_for_a_worker_to_start_is_told_apart() -> None:
    both = (_kill(10.0, "a1", "s"), _kill(11.0, "b1", "t"))
    # Nobody is there at 18.0, when the lease of a1 ends; at 19.0, that of b1, somebody is.
    gaps = _gaps(*both, _serves(18.5, "a2"), *_went(s=18.6, t=19.2))
    assert (gaps.unserved, gaps.served) == ([pytest.approx(8.7)], [pytest.approx(8.3)])


def test_a_worker_that_ended_unasked_is_none() -> None:
    exits = {"t": 12.0, "e": "exit", "process": "b1", "code": 1, "asked": False, "served": True, **ROLE}
    gaps = _gaps(_kill(10.0, "a1", "s"), exits, _serves(40.0, "b2"), *_went(s=41.0))
    assert (len(gaps.unserved), len(gaps.served)) == (1, 0)


def test_what_never_went_on_is_not_left_out() -> None:
    assert _gaps(_kill(10.0, "a1", "s")).served == [LONG_S]


@pytest.mark.parametrize(("ends", "counted"), [("cancelled", 0), ("incomplete", 0), ("failed", 0), ("completed", 1)])
def test_an_end_that_nobody_had_to_make_is_no_token(ends: str, counted: int) -> None:
    assert len(_gaps(_kill(10.0, "a1", "e"), *_went(e=12.0), ends=ends).served) == counted
