"""What a gateway says of callers who leave while the store cannot cancel for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from producers.connection import log_throttle
from producers.gateway.tasks.foreground import Foreground


async def test_callers_who_leave_a_full_store_make_one_line_and_their_leases_lapse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_throttle, "EVERY_S", 1e6)
    lapsed: list[str] = []

    async def cancel() -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    async def leave(held: list[str], *, lapse: set[str]) -> None:
        lapsed.extend(sorted(lapse))

    client = SimpleNamespace(get=lambda name: SimpleNamespace(cancel=cancel))
    gateway: Any = SimpleNamespace(client=client, readers=SimpleNamespace(leave=leave))
    with caplog.at_level(logging.WARNING):
        for caller in range(50):
            work: Any = object.__new__(Foreground)
            work._gateway, work._entry, work._readers = gateway, None, {}
            work._open, work._leased = {f"t{caller:02}"}, [f"t{caller:02}"]
            await work.close()
    assert lapsed == [f"t{caller:02}" for caller in range(50)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not cancelled yet" in line
