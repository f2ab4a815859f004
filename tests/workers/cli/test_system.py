"""Signals end the use of a system in good order, except those that whoever started us wants ignored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from workers.cli.exits import Failure
from workers.cli.system import Plan, System, conduct, tell_who_follows
from workers.library import ResolvedModel
from workers.runtime import signals


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


class Slow(Empty):
    """Its workers drain for as long as nobody hastens them, or for the time of their `patience`, s."""

    def __init__(self, stubborn: bool, tmp_path: Path, patience: float | None = None) -> None:
        super().__init__(Plan((), tmp_path), lambda name, line: None)
        self.told: list[str] = []
        self._stubborn = stubborn
        self._patience = patience
        self._hastened = asyncio.Event()

    async def stop(self) -> None:
        self.told.append("stop")
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._hastened.wait()

    def hasten(self) -> None:
        self.told.append("hasten")
        if self._stubborn:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._hastened.set()

    async def kill(self) -> None:
        self.told.append("kill")


async def test_a_port_that_is_taken_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        system = System(Plan((), tmp_path / "data", port=port), lambda name, line: None)
        with pytest.raises(Failure, match=f"cannot listen on 127.0.0.1 port {port}") as failure:
            await system.start()
    assert failure.value.status == 2
    assert not (tmp_path / "data").exists()


async def _until_told(system: System) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


def test_a_second_signal_hastens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    system = Slow(False, tmp_path)
    assert asyncio.run(conduct(system, _until_told)) is False
    assert system.told == ["stop", "hasten"]


def test_one_that_was_sent_twice_at_once_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 60.0)
    system = Slow(False, tmp_path, patience=0.2)
    assert asyncio.run(conduct(system, _until_told)) is False
    assert system.told == ["stop"]


def test_a_third_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    system = Slow(True, tmp_path)
    with pytest.raises(Failure, match="stopped at once"):
        asyncio.run(conduct(system, _until_told))
    assert system.told == ["stop", "hasten", "kill"]


@pytest.mark.parametrize(("disposition", "finished"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)])
def test_a_hangup_is_nothing_under_nohup(disposition: signal.Handlers, finished: bool, tmp_path: Path) -> None:
    async def use(system: System) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1 if finished else 60)

    signal.signal(signal.SIGHUP, disposition)
    system = Empty(Plan((), tmp_path), lambda name, line: None)
    assert asyncio.run(conduct(system, use)) is finished


@pytest.mark.parametrize(("leads", "trouble", "told"), [(False, [], 1), (True, [], 0), (False, ["no answer"], 0)])
async def test_an_up_beside_another_says_that_it_scales_nothing(leads: bool, trouble: list[str], told: int) -> None:
    said: list[str] = []
    scaler: Any = SimpleNamespace(leads=leads, unready=lambda: trouble)
    await tell_who_follows(scaler, lambda name, line: said.append(line), after_s=0)
    assert len(said) == told


def test_a_start_says_what_its_workers_are_at(tmp_path: Path) -> None:
    model = ResolvedModel("large", tmp_path)
    system = System(Plan((model,), tmp_path), lambda name, line: None)
    assert system.awaited() == "waiting for the server"
    worker = SimpleNamespace(program=SimpleNamespace(name="worker"), serves=False, starting="")
    system._services, system._pools = cast(Any, {"gateway": None}), cast(Any, SimpleNamespace(children=[worker]))
    assert system.awaited() == "waiting for 1 worker(s), which load large"
    worker.starting = "reading weights [##] 10%"
    assert system.awaited() == "waiting for 1 worker(s), which load large; worker: reading weights [##] 10%"
    worker.serves = True
    assert system.awaited() == "waiting for the gateway, which loads the tokenizers"
