from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from producers import PenstockError
from producers.client.blocking import Expired, Portal
from tests.waiting import PATIENCE_S, until


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_a_coroutines_result_and_error_come_back() -> None:
    portal = Portal()

    async def broken() -> None:
        raise LookupError("no")

    assert portal.call(answer(5)) == 5
    with pytest.raises(LookupError, match="no"):
        portal.call(broken())
    portal.close()
    portal.close()  # twice is once
    portal.soon(lambda: pytest.fail("called on a loop that is gone"))
    assert not portal.usable
    with pytest.raises(PenstockError, match="closed"):
        portal.call(answer(5))


async def others() -> int:
    """How much else runs on the loop."""
    return len(asyncio.all_tasks()) - 1


def test_what_takes_too_long_is_cancelled() -> None:
    portal = Portal()
    with pytest.raises(Expired):
        portal.call(asyncio.Event().wait(), timeout=0.01)
    until(lambda: portal.call(others()) == 0)
    assert portal.call(answer(1), timeout=60) == 1
    portal.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_it_has_no_loop() -> None:
    portal = Portal()
    child = os.fork()
    if child == 0:
        try:
            portal.call(answer(1))
        except PenstockError as error:
            os._exit("before a fork" not in str(error))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    portal.close()


def test_a_timeout_of_the_coroutines_own_is_not_taken_for_ours() -> None:
    portal = Portal()

    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        portal.call(late(), timeout=60)
    portal.close()


def test_closing_ends_the_calls_of_other_threads() -> None:
    portal = Portal()
    started = threading.Event()
    errors: list[Exception] = []

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            portal.call(endless())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert started.wait(PATIENCE_S)
    portal.close()
    thread.join(PATIENCE_S)
    assert [type(error) for error in errors] == [PenstockError]


def test_a_call_that_comes_while_it_closes_is_told_so() -> None:
    """And is not left on a loop that has made its last round."""
    portal = Portal()
    started, closing, go = threading.Event(), threading.Event(), threading.Event()

    async def slow_to_end() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            go.wait(PATIENCE_S)

    def call() -> None:
        with suppress(PenstockError):
            portal.call(slow_to_end())

    calls = [threading.Thread(target=call), threading.Thread(target=portal.close)]
    calls[0].start()
    assert started.wait(PATIENCE_S)
    calls[1].start()
    assert closing.wait(PATIENCE_S)
    with pytest.raises(PenstockError, match="closed"):
        portal.call(answer(1), timeout=60)
    portal.soon(lambda: pytest.fail("called on a loop that ends"))
    go.set()
    for one in calls:
        one.join(PATIENCE_S)
        assert not one.is_alive()


def test_a_stream_may_be_collected_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the garbage collector, which comes whenever something is allocated."""
    portal, collected = Portal(), threading.Event()
    run = asyncio.run_coroutine_threadsafe

    def collecting(coroutine: Coroutine[Any, Any, int], loop: asyncio.AbstractEventLoop) -> Future[int]:
        portal.soon(collected.set)
        return run(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", collecting)
    assert portal.call(answer(1)) == 1
    assert collected.wait(PATIENCE_S)
    portal.close()
