"""One model's work does not hold up another's, nor the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from producers.gateway.text.lane import Lane, LaneBusy
from tests.producers.gateway.conftest import until


async def test_work_is_done_in_turn_and_its_answer_or_error_comes_back() -> None:
    lane = Lane("test")
    seen: list[int] = []
    answers = await asyncio.gather(*(lane.run(lambda k=k: seen.append(k) or k) for k in range(5)))
    assert (seen, list(answers)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 / 0)
    assert await lane.run(threading.get_ident) != threading.get_ident()
    lane.close()


async def test_what_runs_takes_room_when_its_caller_has_given_up_and_what_only_waited_takes_none() -> None:
    lane, go = Lane("test"), threading.Event()
    with pytest.raises(TimeoutError):
        await lane.run(go.wait, limit=0.01)
    seen: list[str] = []
    leaving = asyncio.create_task(lane.run(lambda: seen.append("left")))
    await asyncio.sleep(0)
    assert lane.waiting == 2
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert lane.waiting == 1
    go.set()
    assert await lane.run(lambda: "done") == "done"
    await asyncio.to_thread(until, lambda: lane.waiting == 0)
    assert seen == []
    lane.close()


async def test_the_time_in_the_queue_is_not_the_works_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, go = Lane("test"), threading.Event()
    first = asyncio.create_task(lane.run(go.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(lane.run(lambda: "done", limit=60))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 3600)  # an hour in the queue
    await asyncio.sleep(0.05)
    go.set()
    assert await second == "done"
    await first
    lane.close()


async def test_what_waits_for_too_long_is_not_begun() -> None:
    lane, go = Lane("test"), threading.Event()
    first = asyncio.create_task(lane.run(go.wait))
    await asyncio.sleep(0)
    seen: list[str] = []
    with pytest.raises(LaneBusy):
        await lane.run(lambda: seen.append("late"), patience=0.02, limit=10.0)
    go.set()
    await first
    assert await lane.run(lambda: "next") == "next"
    assert seen == []
    lane.close()


async def test_closing_does_the_last_thing_last() -> None:
    lane, told = Lane("test", threads=1), threading.Event()
    seen: list[str] = []
    work = asyncio.create_task(lane.run(lambda: seen.append("work")))
    await asyncio.sleep(0)
    lane.close(lambda: (seen.append("last"), told.set()))
    await work
    assert await asyncio.to_thread(told.wait, 60)
    assert seen == ["work", "last"]


def test_work_that_never_ends_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\nfrom producers.gateway.text.lane import Lane\n"
        "async def main():\n    try:\n        await Lane('x').run(threading.Event().wait, limit=0.01)\n"
        "    except TimeoutError:\n        print('gave up')\nasyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr
