"""Steps are repeated while a connection fails, for as long as the caller is patient."""

from __future__ import annotations

import time

import pytest

from producers.client.steps import Pause, Read, persistently
from producers.connection.connect import Silent


def test_patience_counts_from_when_the_server_fell_silent() -> None:
    steps = persistently(Read(()), 60.0)
    next(steps)
    assert isinstance(steps.throw(Silent(time.monotonic())), Pause)
    next(steps)
    with pytest.raises(Silent):
        steps.throw(Silent(time.monotonic() - 61.0))
