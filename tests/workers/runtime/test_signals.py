"""Which signals count. What they do to a worker is tried in test_drain.py."""

from __future__ import annotations

import signal

import pytest

from workers.runtime import signals as heard
from workers.runtime.signals import Stopping


def _told(*signals: signal.Signals) -> list[tuple[float, str]]:
    said: list[tuple[float, str]] = []
    hears = Stopping()
    hears.serve(lambda *how: said.append(how), 30.0)
    for sig in signals:
        hears._take(sig)
    return said


DRAINS, HURRIES = (30.0, "SIGTERM came"), (0.0, "SIGTERM came")


def test_one_that_was_sent_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` does, and systemd with `--gpus`: the drain must not be over before it began."""
    monkeypatch.setattr(heard, "SAME_S", 60.0)
    assert _told(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM) == [DRAINS]
    assert _told(signal.SIGTERM, signal.SIGTERM, signal.SIGINT) == [DRAINS, (0.0, "SIGINT came")]
    assert _told(signal.SIGTERM, signal.SIGQUIT) == [DRAINS, (0.0, "SIGQUIT came")]


def test_a_later_one_hastens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heard, "SAME_S", 0.0)
    assert _told(signal.SIGTERM, signal.SIGTERM) == [DRAINS, HURRIES]
