"""The local actuator with real processes: how many run, who ends first, and what is told of those that do not start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.infra.deploy.code import parsed
from tests.waiting import auntil as until
from workers.autoscaler.actuators import Actual, ActuatorError, open_actuator
from workers.autoscaler.actuators import local as local_actuator
from workers.autoscaler.actuators.local import Local, Slots
from workers.autoscaler.pools import opened, parse
from workers.processes import supervisor
from workers.processes.supervisor import STAYS_STOPPED, Child, Program

#: Serves until SIGTERM comes, as a worker does.
SERVES = """
import os, signal, socket, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", "\\0" + os.environ["NOTIFY_SOCKET"][1:])
while True:
    time.sleep(0.02)
"""
#: Is told to drain, and does so for long.
BUSY = SERVES.replace("os._exit(0)", "print('drains', flush=True)")
#: Starts for long.
SLOW = "import time; time.sleep(600)"

Make = Callable[..., Local]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes actuators whose workers run Python source; what is left of them is killed."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    made: list[Local] = []

    def actuator(*sources: str, most: int | None = None, **options: Any) -> Local:
        def program(place: int) -> Program:
            source = sources[min(place, len(sources)) - 1]
            argv = (sys.executable, "-I", "-S", "-c", source, f"host.w{place}")
            return Program(f"w{place}", argv, notifies=True)

        made.append(Local("tiny", Slots(most), program, lambda name, line: None, **options))
        return made[-1]

    yield actuator
    for one in made:
        await one.kill()


def names(local: Local) -> list[str]:
    return [child.program.name for child in local.children]


def serving(local: Local) -> list[str]:
    return [child.program.name for child in local.children if child.serves]


async def test_as_many_run_as_it_was_told_and_the_first_to_go_are_those_named(make: Make) -> None:
    local = make(SERVES)
    assert await local.actual() == Actual(0, 0)
    await local.scale(3)
    await local.scale(3)
    await until(lambda: serving(local) == ["w1", "w2", "w3"])
    assert await local.actual() == Actual(3, 3)
    await local.scale(1, ["elsewhere.w9", "host.w2", "host.w1", "host.w3"])
    assert (await local.actual()).up == 1
    await until(lambda: names(local) == ["w3"])
    await local.scale(2)  # in the place that is free now
    assert names(local) == ["w3", "w1"]
    await local.scale(0)
    await until(lambda: not local.children)


async def test_it_tells_whether_a_standby_waits(make: Make) -> None:
    standby = SimpleNamespace(ready=False)
    local = make(SERVES, standby=standby)
    assert (await local.actual()).standbys == 0
    standby.ready = True
    assert (await local.actual()).standbys == 1


async def test_one_that_does_not_serve_yet_ends_before_any_that_works(make: Make) -> None:
    local = make(SERVES, SLOW)
    await local.scale(2)
    await until(lambda: serving(local) == ["w1"])
    await local.scale(1, ["host.w1"])
    await until(lambda: names(local) == ["w1"])


async def test_one_that_drains_keeps_its_place_until_it_is_killed(make: Make) -> None:
    local = make(BUSY, SERVES, most=2, drain=600.0)
    await local.scale(2)
    await until(lambda: len(serving(local)) == 2)
    await local.scale(1, ["host.w1"])
    draining = local.children[0]
    await until(lambda: "drains" in draining.lines)
    assert (await local.actual()).up == 1
    with pytest.raises(ActuatorError, match="no GPU is free for another worker of tiny"):
        await local.scale(2)
    assert draining.pid is not None
    os.kill(draining.pid, signal.SIGKILL)
    await until(lambda: names(local) == ["w2"])
    await local.scale(2)
    assert names(local) == ["w2", "w1"]


async def test_after_the_drain_time_it_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.autoscaler.actuators.local.HAND_BACK_S", 0.05)
    local = make(BUSY, drain=0.05)
    await local.scale(1)
    await until(lambda: serving(local))
    await local.aclose()
    assert local.children == []


async def test_one_that_dies_runs_again_and_is_no_failed_start(make: Make) -> None:
    local = make(SERVES)
    await local.scale(1)
    (child,) = local.children
    await until(lambda: child.serves)
    before = child.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: child.serves and child.pid not in (None, before))
    assert await local.actual() == Actual(1, 1)


async def test_starts_that_fail_are_counted_and_their_last_words_told_until_one_serves(
    make: Make, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    fails = f"import os\nif not os.path.exists({str(ready)!r}): raise SystemExit('no weights')\n{SERVES}"
    local = make(fails)
    await local.scale(1)
    await until(lambda: local._failures >= 2 and local._failing() == "w1 exited with status 1: no weights")
    assert (await local.actual()).up == 1
    ready.touch()
    await until(lambda: serving(local))
    assert await local.actual() == Actual(1, 1)


async def test_a_start_that_fails_without_a_word_has_not_the_words_of_the_process_before(
    make: Make, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    local = make(
        f"import os\nif os.path.exists({str(again)!r}): raise SystemExit(1)\nprint('well', flush=True)\n{SERVES}"
    )
    await local.scale(1)
    (child,) = local.children
    await until(lambda: child.serves and "well" in child.lines)
    again.touch()
    os.kill(child.pid or 0, signal.SIGKILL)
    await until(lambda: local._failures >= 2)
    assert local._failing() == "w1 exited with status 1"


async def test_one_that_was_refused_is_tried_again_when_it_is_asked_for_again(make: Make) -> None:
    local = make("print('bad dtype'); raise SystemExit(2)")
    for failures in (1, 2):
        await local.scale(1)
        (child,) = local.children
        await until(lambda: child.keeper and child.keeper.done())  # noqa: B023 - called at once
        await until(lambda: "bad dtype" in child.lines)  # noqa: B023 - called at once
        failing = "w1 exited with status 2: bad dtype"
        assert await local.actual() == Actual(1, 0, failing, failures)


async def test_one_that_was_told_to_drain_stays_down_until_the_number_changes(make: Make) -> None:
    local = make(SERVES)
    await local.scale(1)
    (child,) = local.children
    await until(lambda: child.serves and child.pid)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGTERM)
    await until(lambda: child.keeper and child.keeper.done())
    await local.scale(1)
    assert await local.actual() == Actual(1, 0)
    assert local.stopped_by_others
    await local.scale(2)
    assert await local.actual() == Actual(2, 2)


async def test_what_cannot_be_started_at_all_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    local = make(SERVES)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ActuatorError, match="cannot start w1: No such file"):
        await local.scale(1)
    assert await local.actual() == Actual(1, 0)


async def test_by_url_it_starts_workers_with_these_options() -> None:
    local = open_actuator(
        "local:?max-num-seqs=8&dtype=float32", model="two=tiny", broker="redis://b/0", store="redis://s/0"
    )
    assert isinstance(local, Local)
    program = local.program(2)
    assert local.name == "local two"
    assert program.env == {"BROKER_URL": "redis://b/0", "STORE_URL": "redis://s/0"}
    assert [*program.argv[4:-2]] == ["worker", "--model", "two=tiny", "--max-num-seqs", "8", "--dtype", "float32"]
    assert program.argv[-1].endswith(f"{os.getpid()}.worker.two.2")


async def test_pools_of_one_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_actuator, "threads_of_each", lambda processes: 100 // processes)
    tables = [
        ("a", 3, "local"),
        ("b", 1, "local:?threads=7"),
        ("c", 6, "export"),
        ("d", 9, "ecs://main/d?region=x-y-1"),
    ]
    pools = [parse({"model": model, "max": most, "actuator": url}) for model, most, url in tables]
    told = {}
    for one in opened(pools, "redis://b/0", "redis://s/0"):
        if isinstance(one.actuator, Local):
            told[one.settings.model] = parsed(one.actuator.program(1).argv[4:])["threads"]
    assert told == {"a": 25, "b": 7}


async def test_a_start_that_is_broken_off_keeps_no_place(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead may be lost meanwhile: then the call is cancelled."""
    local = make(SERVES, most=1)
    begun = asyncio.Event()

    async def never(child: Child) -> None:
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Child, "start", never)
        call = asyncio.create_task(local.scale(1))
        await begun.wait()
        call.cancel()
        await asyncio.wait((call,))
    await local.scale(1)
    assert names(local) == ["w1"]


async def test_one_that_ends_by_itself_while_it_is_told_to_gives_its_place_back_once(make: Make) -> None:
    local = make(SERVES, most=2)
    await local.scale(2)
    await until(lambda: len(serving(local)) == 2)
    await local.scale(1, ["host.w1"])
    draining = local._workers[0]  # it was told to stop by another process in the same moment
    draining.down = STAYS_STOPPED
    await local.aclose()
    assert draining.draining is not None
    await draining.draining
    assert local.children == []
    assert [local.slots.take(), local.slots.take(), local.slots.take()] == [1, 2, None]
