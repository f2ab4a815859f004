"""A consumer holds what it works on, buries what is bad, and gives the rest back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from producers.connection.aws import AwsError
from producers.connection.trouble import Trouble
from producers.errors import SubmitFailed
from producers.sources.inbox import BadMessage, Consumer, Inbox, Received


class Shelf(Inbox):
    """An inbox in memory. `fails`: what its next call raises."""

    hidden_s = 0.02

    def __init__(self, *ids: str) -> None:
        self.waiting = [Received(one, "") for one in ids]
        self.removed: list[str] = []
        self.buried: dict[str, str] = {}
        self.hidden: list[tuple[str, float]] = []
        self.fails: list[Exception] = []
        self.changed = asyncio.Condition()

    async def open(self) -> None:
        """It is there."""

    async def receive(self) -> list[Received]:
        self._fail()
        found, self.waiting = self.waiting, []
        if not found:
            await asyncio.sleep(0.001)
        return found

    async def remove(self, messages: Sequence[Received]) -> None:
        self._fail()
        self.removed += [one.id for one in messages]
        await self._tell()

    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        self.hidden += [(one.id, seconds) for one in messages]
        await self._tell()

    async def bury(self, message: Received, reason: str) -> None:
        self.buried[message.id] = reason
        await self._tell()

    def close(self) -> None:
        """Nothing is open."""

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    def _fail(self) -> None:
        if self.fails:
            raise self.fails.pop(0)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Running:
    def __init__(self, shelf: Shelf, handle: Callable[[Received], Awaitable[None]]) -> None:
        self.consumer = Consumer("orders", shelf, handle)
        self.task = asyncio.create_task(self.consumer.run())

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def fine(_: Received) -> None:
    """It is done."""


async def test_told_to_stop_while_it_ends_by_a_fault_it_gives_back_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the store is full: neither a submit nor a receive succeeds."""
    shelf, gives_back, may = Shelf("a"), asyncio.Event(), asyncio.Event()
    hide = shelf.hide

    async def slowly(messages: Sequence[Received], seconds: float) -> None:
        gives_back.set()
        await may.wait()
        await hide(messages, seconds)

    async def never(_: Received) -> None:
        monkeypatch.setattr(shelf, "hide", slowly)
        shelf.fails.append(SubmitFailed("full", Trouble.FULL))
        await asyncio.Event().wait()

    shelf.hidden_s = 60.0
    running = Running(shelf, never)
    await gives_back.wait()
    running.task.cancel()
    await asyncio.sleep(0)
    may.set()
    with suppress(asyncio.CancelledError):
        await running.task
    assert shelf.hidden == [("a", 0)]


async def test_what_is_done_is_removed_and_what_is_bad_is_buried_with_its_reason() -> None:
    async def handle(message: Received) -> None:
        if message.id == "bad":
            raise BadMessage("it is red")
        if message.id == "bug":
            raise KeyError("ours")

    running = Running(shelf := Shelf("a", "bad", "bug", "b"), handle)
    await shelf.until(lambda: shelf.removed == ["a", "b"])
    assert shelf.buried == {"bad": "it is red", "bug": "KeyError in the sources process"}
    await running.stop()


async def test_what_takes_long_stays_hidden_and_comes_back_when_it_stops() -> None:
    async def hang(_: Received) -> None:
        await asyncio.Event().wait()

    running = Running(shelf := Shelf("a"), hang)
    await shelf.until(lambda: len(shelf.hidden) >= 3)
    assert set(shelf.hidden) == {("a", shelf.hidden_s)}
    await running.stop()
    assert shelf.hidden[-1] == ("a", 0)
    assert shelf.removed == []


@pytest.mark.parametrize("error", [SubmitFailed("full", "storage_full"), ConnectionError("away")])
async def test_while_a_server_is_away_a_message_is_held_and_no_other_is_received(error: Exception) -> None:
    held, free = asyncio.Event(), asyncio.Event()

    async def handle(_: Received) -> None:
        if not free.is_set():
            held.set()
            raise error

    running = Running(shelf := Shelf("a"), handle)
    await held.wait()
    while not running.consumer.trouble:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    assert running.consumer.trouble == str(error)
    shelf.waiting = [Received("b", "")]
    await shelf.until(lambda: ("a", shelf.hidden_s) in shelf.hidden)
    left = list(shelf.waiting)
    free.set()
    await shelf.until(lambda: shelf.removed == ["a", "b"] or shelf.removed == ["b", "a"])
    assert [one.id for one in left] in ([], ["b"])  # a receive that was under way may have brought it
    assert running.consumer.trouble == ""
    await running.stop()


async def test_a_queue_that_is_away_is_asked_again_and_one_that_is_missing_ends_it() -> None:
    shelf = Shelf("a")
    running = Running(shelf, fine)
    shelf.fails = [AwsError("busy", "Throttling", Trouble.AWAY)]
    await shelf.until(lambda: shelf.removed == ["a"])
    shelf.fails = [AwsError("gone", "QueueDoesNotExist", None)]
    with pytest.raises(AwsError, match="gone"):
        await running.task
