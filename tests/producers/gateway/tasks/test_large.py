"""Large results: few in memory at once, and each reader's time with one is bounded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from producers.connection.turns import PROCESS
from producers.errors import TaskNotFound
from producers.gateway import app
from producers.gateway.http.connection import CUT
from producers.gateway.tasks import large
from producers.gateway.tasks.outcome import Outcome
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Open, Submit, until
from tests.waiting import PATIENCE_S


@pytest.fixture
def door(open_door: Open, model: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Door:
    """One large result at a time. Readers are given as long as is said, or all of a test's time."""
    monkeypatch.setattr(large, "LARGE", 1000)
    monkeypatch.setattr(large, "SLOWEST", 8 << 20 if hasattr(request, "param") else 1 << 10)
    monkeypatch.setattr(app, "LARGE_RESULTS", (1, 1))
    return open_door(patience=0.2, stall=getattr(request, "param", 100))


@pytest.fixture
def small(submit: Submit, worker: FakeWorker) -> str:
    task_id = submit(prompt=[5])
    worker.serve(task_id)
    return task_id


@pytest.fixture
def huge(submit: Submit, worker: FakeWorker) -> str:
    """More (16 MB) than sockets hold."""
    task_id = submit(prompt=[5])
    worker.serve(task_id, ["x" * 100_000] * 160)
    return task_id


@pytest.fixture
def reader(door: Door, huge: str) -> Iterator[socket.socket]:
    """Has asked for `huge`, and taken nothing but the first line."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(("127.0.0.1", door.port))
        client.sendall(f"GET /v1/tasks/{huge} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        yield client


def test_few_are_in_memory_at_once(http: httpx.Client, small: str, huge: str, reader: socket.socket) -> None:
    answer = http.get(f"/v1/tasks/{huge}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_large_results")
    assert "retry-after" in answer.headers
    assert http.get(f"/v1/tasks/{small}").status_code == 200
    reader.close()  # which makes room
    assert len(until(lambda: http.get(f"/v1/tasks/{huge}").json().get("choices"))[0]["text"]) == 16_000_000


@pytest.mark.parametrize("door", [0.5], indirect=True)
def test_who_takes_nothing_is_cut_off_and_makes_room(door: Door, reader: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        until(lambda: not reader.send(b" "))
    until(lambda: door.app.state.gateway.large.free)


@pytest.mark.parametrize("door", [4], indirect=True)
def test_a_reader_that_is_too_slow_on_the_whole_is_cut_off(door: Door, reader: socket.socket) -> None:
    """It takes something every now and then, and so it never takes nothing for long."""
    taken = 0

    def cut_off() -> bool:
        nonlocal taken
        try:
            piece = len(reader.recv(1 << 14))
        except ConnectionResetError:
            return True
        taken += piece
        assert piece, "closed, not cut off"
        time.sleep(0.02)
        return False

    reader.settimeout(PATIENCE_S)
    until(cut_off)
    assert 0 < taken < 16_000_000
    until(lambda: door.app.state.gateway.large.free)


def test_text_alone_may_be_large(door: Door, http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
    for text in ("", "x" * 1000):  # many tokens, or few of much text
        task_id = submit(prompt=[5])
        worker.serve(task_id, [text] * (10 if text else 400))
        assert door.app.state.gateway.large.take(PROCESS)
        assert http.get(f"/v1/tasks/{task_id}").status_code == 503
        door.app.state.gateway.large.give(PROCESS)
        assert http.get(f"/v1/tasks/{task_id}").status_code == 200


def test_a_turn_is_over_when_its_answer_cannot_be_made(
    http: httpx.Client, submit: Submit, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = submit(prompt=[5], logprobs=0)
    worker.claim(task_id)
    worker.append(task_id, 0, ["x"] * 100, logprobs=[(-0.5, ())] * 100)
    worker.finish(task_id, [100])
    with monkeypatch.context() as patched:

        def broken(self: Outcome) -> Iterator[bytes]:
            raise RuntimeError

        patched.setattr(Outcome, "pieces", broken)
        assert http.get(f"/v1/tasks/{task_id}").status_code == 500
    assert http.get(f"/v1/tasks/{task_id}").status_code == 200


class TestStreamed:
    """An answer whose pieces are read from the store while it is sent."""

    @staticmethod
    async def run(pieces: AsyncGenerator[bytes], sent: list[bytes], *, stalls: bool = False) -> list[str]:
        """Send an answer; returns what became of its connection and of its permit."""
        over: list[str] = []

        async def send(message: Any) -> None:
            if stalls and sent:
                await asyncio.Event().wait()
            if message.get("body"):
                sent.append(message["body"])

        async def receive() -> Any:
            raise AssertionError("nothing is asked of the caller")

        scope = {"extensions": {CUT: lambda: over.append("cut")}}
        await large.Streamed(pieces, 0.01 if stalls else 60, lambda: over.append("released"))(scope, receive, send)
        return over

    async def test_no_piece_is_read_before_the_one_before_it_is_sent(self) -> None:
        sent: list[bytes] = []
        sizes = []

        async def pieces() -> AsyncGenerator[bytes]:
            for _ in range(3):
                sizes.append(sum(map(len, sent)))
                yield b"x" * 200_000

        assert await self.run(pieces(), sent) == ["released"]
        assert sizes == [0, 200_000, 400_000]
        assert max(map(len, sent)) == large.CHUNK

    async def test_a_reader_is_cut_off_if_a_piece_is_gone(self) -> None:
        async def pieces() -> AsyncGenerator[bytes]:
            yield b"["
            raise TaskNotFound("it is gone")

        assert await self.run(pieces(), []) == ["cut", "released"]

    async def test_a_reader_that_takes_nothing_is_cut_off(self) -> None:
        async def pieces() -> AsyncGenerator[bytes]:
            yield b"x" * 200_000

        assert await self.run(pieces(), [], stalls=True) == ["cut", "released"]
