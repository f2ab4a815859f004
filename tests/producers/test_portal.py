from __future__ import annotations

import asyncio
import threading

import pytest

from producers import PenstockError
from producers.portal import Expired, Portal


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


def test_what_takes_too_long_is_cancelled() -> None:
    portal = Portal()
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(Expired):
        portal.call(endless(), timeout=0.01)
    assert cancelled.wait(10)
    assert portal.call(answer(1), timeout=10) == 1
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
    started.wait(10)
    portal.close()
    thread.join(10)
    assert [type(error) for error in errors] == [PenstockError]
