"""Celery's consumer on the way back to a server that was away."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection
from kombu.utils import functional

from producers.connection import log_throttle
from tests.processes import free_port
from workers.pool.consumer import Consumer


class EnoughSeen(Exception):
    """Ends the tries."""


def test_tries_to_connect_come_a_second_after_the_last_at_most_and_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long the server has been away: stock waits up to half a minute then."""
    consumer: Any = object.__new__(Consumer)
    consumer.app = SimpleNamespace(conf=SimpleNamespace(broker_connection_max_retries=None))
    consumer.broker_connection_retry_attempt = 0
    waits: dict[int, float] = {}

    def sleep(seconds: float) -> None:
        attempt = consumer.broker_connection_retry_attempt
        if attempt > 30:
            raise EnoughSeen
        waits[attempt] = waits.get(attempt, 0.0) + seconds

    monkeypatch.setattr(functional, "sleep", sleep)
    monkeypatch.setattr(log_throttle, "EVERY_S", 1e6)
    with (
        Connection(f"redis://127.0.0.1:{free_port()}") as connection,
        caplog.at_level(logging.WARNING),
        pytest.raises(EnoughSeen),
    ):
        consumer.ensure_connected(connection)
    assert len(waits) == 30
    assert 0 < min(waits.values()) <= max(waits.values()) <= 1.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot connect" in line
