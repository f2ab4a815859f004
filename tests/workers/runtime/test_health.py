"""`/livez` and `/readyz` of processes whose work is done by an event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, until
from workers.runtime import health as healths
from workers.runtime.health import EventLoop, Health


class Process:
    """As `Watched`; always well."""

    given_up = ""

    def unready(self) -> list[str]:
        return []


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs in a thread of its own."""
    one = asyncio.new_event_loop()
    thread = threading.Thread(target=one.run_forever)
    thread.start()
    yield one
    one.call_soon_threadsafe(one.stop)
    thread.join()
    one.close()


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_livez_fails_while_the_event_loop_is_stuck(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healths, "STUCK_S", 0.0)
    health = Health(0)
    assert health.port is not None
    assert ask(health.port, "/readyz") == (503, {"status": "not ready", "reasons": ["it starts"]})
    assert ask(health.port, "/livez")[0] == 200, "nothing is known of it yet"
    stuck, go = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (stuck.set(), go.wait(PATIENCE_S)))
    assert stuck.wait(PATIENCE_S)
    health.serve(Process(), loop)
    assert ask(health.port, "/livez")[0] == 200, "it is only asked"
    status, told = ask(health.port, "/livez")
    assert status == 503
    assert told["reasons"][0].startswith("its event loop has run nothing for ")
    assert ask(health.port, "/readyz")[0] == 200, "what its own state says"
    go.set()
    until(lambda: health.answer("/livez")[0] == 200)


def test_a_loop_that_is_slow_but_answers_is_not_stuck(loop: asyncio.AbstractEventLoop) -> None:
    watch = EventLoop(loop)
    stuck, go = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (stuck.set(), go.wait(PATIENCE_S)))
    assert stuck.wait(PATIENCE_S)
    assert watch.waits() == 0.0
    assert 0.0 < watch.waits() < healths.STUCK_S
    go.set()
    until(lambda: watch.waits() == 0.0)


def test_a_loop_that_has_ended_is_not_stuck() -> None:
    loop = asyncio.new_event_loop()
    watch = EventLoop(loop)
    loop.close()
    assert watch.waits() == watch.waits() == 0.0


def test_who_connects_and_says_nothing_takes_few_threads_and_keeps_no_probe_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(healths, "PATIENCE_S", 600.0)
    health = Health(0)
    assert health.port is not None
    before = threading.active_count()
    strangers = [
        socket.create_connection(("127.0.0.1", health.port), timeout=PATIENCE_S) for _ in range(4 * healths.AT_ONCE)
    ]
    assert ask(health.port, "/livez")[0] == 200
    assert [stranger.recv(1) for stranger in strangers[: 3 * healths.AT_ONCE]] == [b""] * (3 * healths.AT_ONCE)
    assert until(lambda: threading.active_count() <= before + healths.AT_ONCE)
    assert ask(health.port, "/livez")[0] == 200
    for stranger in strangers:
        stranger.close()
