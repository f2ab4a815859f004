"""One model's work does not hold up another's, nor the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from producers.gateway.executor import CallerLeft, Executor, ExecutorBusy, ExecutorFull
from tests.waiting import PATIENCE_S, auntil, until


async def test_work_is_done_in_turn_and_its_answer_or_error_comes_back() -> None:
    executor = Executor("test")
    seen: list[int] = []
    answers = await asyncio.gather(*(executor.run(lambda k=k: seen.append(k) or k) for k in range(5)))
    assert (seen, list(answers)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 / 0)
    assert await executor.run(threading.get_ident) != threading.get_ident()
    executor.close()


async def test_what_runs_takes_room_when_its_caller_has_given_up_and_what_only_waited_takes_none() -> None:
    executor, go = Executor("test"), threading.Event()
    with pytest.raises(TimeoutError):
        await executor.run(go.wait, limit=0.01)
    seen: list[str] = []
    leaving = asyncio.create_task(executor.run(lambda: seen.append("left")))
    await asyncio.sleep(0)
    assert executor.waiting == 2
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert executor.waiting == 1
    go.set()
    assert await executor.run(lambda: "done") == "done"
    await asyncio.to_thread(until, lambda: executor.waiting == 0)
    assert seen == []
    executor.close()


async def test_the_time_in_the_queue_is_not_the_works_own(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, go = Executor("test"), threading.Event()
    first = asyncio.create_task(executor.run(go.wait))
    await asyncio.sleep(0)
    second = asyncio.create_task(executor.run(lambda: "done", limit=60))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 3600)  # an hour in the queue
    await asyncio.sleep(0.05)
    go.set()
    assert await second == "done"
    await first
    executor.close()


async def test_what_waits_for_too_long_is_not_begun() -> None:
    executor, go = Executor("test"), threading.Event()
    first = asyncio.create_task(executor.run(go.wait))
    await asyncio.sleep(0)
    seen: list[str] = []
    with pytest.raises(ExecutorBusy):
        await executor.run(lambda: seen.append("late"), patience=0.02, limit=10.0)
    go.set()
    await first
    assert await executor.run(lambda: "next") == "next"
    assert seen == []
    executor.close()


async def test_tenants_take_turns_however_much_one_of_them_asks_for() -> None:
    executor, go = Executor("test"), threading.Event()
    seen: list[str] = []
    held = asyncio.create_task(executor.run(go.wait, tenant="greedy"))
    await asyncio.sleep(0)
    asked = [("greedy", 4), ("acme", 2), ("other", 1)]
    waiting = [
        asyncio.create_task(executor.run(lambda name=f"{tenant} {k}": seen.append(name), tenant=tenant))
        for tenant, count in asked
        for k in range(count)
    ]
    await asyncio.sleep(0)
    assert executor.waiting == 8
    go.set()
    await asyncio.gather(held, *waiting)
    assert seen == ["greedy 0", "acme 0", "other 0", "greedy 1", "acme 1", "greedy 2", "greedy 3"]
    assert executor.waiting == 0
    executor.close()


async def test_no_tenant_has_a_second_thread_while_another_waits() -> None:
    executor, go, seen = Executor("test", 2), [threading.Event() for _ in range(3)], list[str]()

    def work(k: int, name: str) -> None:
        seen.append(name)
        go[k].wait()

    greedy = [asyncio.create_task(executor.run(lambda k=k: work(k, "greedy"), tenant="greedy")) for k in range(2)]
    await asyncio.to_thread(until, lambda: len(seen) == 2)  # nobody else waits: it has both
    more = [asyncio.create_task(executor.run(lambda: work(2, "greedy"), tenant="greedy")) for _ in range(2)]
    await asyncio.sleep(0)
    acme = asyncio.create_task(executor.run(lambda: seen.append("acme"), tenant="acme"))
    await asyncio.sleep(0)
    go[0].set()
    await acme
    assert seen[2] == "acme"
    for event in go:
        event.set()
    await asyncio.gather(*greedy, *more)
    executor.close()


async def test_where_too_much_waits_whoever_has_most_of_it_is_refused() -> None:
    executor, go = Executor("test"), threading.Event()
    seen: list[str] = []

    def ask(tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(executor.run(lambda: seen.append(tenant), tenant=tenant, max_jobs=5))

    held = asyncio.create_task(executor.run(go.wait, tenant="greedy", max_jobs=5))
    await asyncio.sleep(0)
    greedy = [ask("greedy") for _ in range(6)]
    await asyncio.sleep(0)
    assert [type(one.exception()) for one in greedy if one.done()] == [ExecutorFull] * 2
    acme = [ask("acme") for _ in range(4)]
    await auntil(lambda: sum(one.done() for one in [*greedy, *acme]) == 6)
    assert [one.done() for one in greedy] == [False, False, True, True, True, True], "the last ones made room"
    assert [one.done() for one in acme] == [False, False, True, True], "up to an equal share"
    assert executor.waiting == 5
    go.set()
    done = await asyncio.gather(held, *greedy, *acme, return_exceptions=True)
    assert seen == ["greedy", "acme", "greedy", "acme"]
    assert sum(isinstance(one, ExecutorFull) for one in done) == 6
    executor.close()


@pytest.mark.parametrize("how", ["leaves", "is cancelled", "stays"])
async def test_work_is_ended_when_its_caller_leaves_and_no_other_work_is(how: str) -> None:
    executor, killed, began = Executor("test"), threading.Event(), threading.Event()
    gone = asyncio.get_running_loop().create_future()

    def work() -> str:
        began.set()
        return "ended" if how == "stays" or killed.wait(PATIENCE_S) else "went on"

    running = asyncio.create_task(executor.run_killable(work, killed.set, lambda: gone, tenant="acme"))
    behind = asyncio.create_task(executor.run_killable(lambda: "next", killed.set, asyncio.Event().wait))
    await asyncio.to_thread(began.wait, 60)
    if how == "leaves":
        gone.set_result(None)
        with pytest.raises(CallerLeft):
            await running
    elif how == "is cancelled":
        running.cancel()
        await asyncio.wait((running,))
    else:
        assert await running == "ended"
    assert await behind == "next"
    assert killed.is_set() == (how != "stays")
    executor.close()


async def test_work_whose_caller_leaves_before_it_began_ends_nothing() -> None:
    executor, go, killed = Executor("test"), threading.Event(), threading.Event()
    held = asyncio.create_task(executor.run(go.wait))
    await asyncio.sleep(0)
    gone = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(executor.run_killable(lambda: None, killed.set, lambda: gone))
    await asyncio.sleep(0)
    gone.set_result(None)
    with pytest.raises(CallerLeft):
        await waiting
    assert not killed.is_set()
    go.set()
    await held
    executor.close()


async def test_closing_does_the_last_thing_last() -> None:
    executor, told = Executor("test", threads=1), threading.Event()
    seen: list[str] = []
    work = asyncio.create_task(executor.run(lambda: seen.append("work")))
    await asyncio.sleep(0)
    executor.close(lambda: (seen.append("last"), told.set()))
    await work
    assert await asyncio.to_thread(told.wait, 60)
    assert seen == ["work", "last"]


def test_work_that_never_ends_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\nfrom producers.gateway.executor import Executor\n"
        "async def main():\n    try:\n        await Executor('x').run(threading.Event().wait, limit=0.01)\n"
        "    except TimeoutError:\n        print('gave up')\nasyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr
