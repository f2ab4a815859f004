"""Signals end the use of a system in good order, except those that whoever started us wants ignored."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.cli.system import Plan, System, conduct


class Empty(System):
    """Starts and stops nothing."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _hangup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("disposition", "finished"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)])
def test_a_hangup_is_nothing_under_nohup(disposition: signal.Handlers, finished: bool, tmp_path: Path) -> None:
    async def use(system: System) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)

    signal.signal(signal.SIGHUP, disposition)
    system = Empty(Plan((), tmp_path), lambda name, line: None)
    assert asyncio.run(conduct(system, use)) is finished
