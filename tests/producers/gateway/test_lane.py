"""One model's work does not hold up another's, nor the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from producers.gateway.lane import Lane
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


async def test_what_its_caller_gave_up_still_takes_room() -> None:
    lane, go = Lane("test"), threading.Event()
    with pytest.raises(TimeoutError):
        await lane.run(go.wait, 0.01)
    leaving = asyncio.create_task(lane.run(lambda: None))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert lane.waiting == 2
    go.set()
    assert await lane.run(lambda: "done") == "done"
    await asyncio.to_thread(until, lambda: lane.waiting == 0)
    lane.close()


async def test_closing_does_the_last_thing_last() -> None:
    lane, told = Lane("test", threads=1), threading.Event()
    seen: list[str] = []
    work = asyncio.create_task(lane.run(lambda: seen.append("work")))
    await asyncio.sleep(0)
    lane.close(lambda: (seen.append("last"), told.set()))
    await work
    assert await asyncio.to_thread(told.wait, 10)
    assert seen == ["work", "last"]


def test_work_that_never_ends_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\nfrom producers.gateway.lane import Lane\n"
        "async def main():\n    try:\n        await Lane('x').run(threading.Event().wait, 0.01)\n"
        "    except TimeoutError:\n        print('gave up')\nasyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr
