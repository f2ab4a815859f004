"""What is under way when its key ends: it ends, too, and says why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from producers.store.access.api_keys import Key
from tests.producers.gateway.conftest import Door, Make, until
from tests.producers.gateway.test_keys import as_caller, change
from tests.waiting import PATIENCE_S

ENDS: dict[str, Callable[[Key], Key]] = {
    "revoked": lambda key: replace(key, revoked_at=int(time.time())),
    "disabled": lambda key: replace(key, disabled_at=int(time.time())),
    "expired": lambda key: replace(key, expires_at=int(time.time())),
    "rotated away": lambda key: replace(key, digest="0" * 64),
}
#: Chat has a template of its own model's, so the plain endpoint stands for OpenAI's.
ASK = {"model": "tiny", "prompt": "def f"}


def said(text: str) -> str:
    """The code of the last error in a stream, or in a body."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "error" in line and "{" in line]
    return str(json.loads(lines[-1])["error"]["code"])


class Callers:
    """Answers that are waited for, each on a thread of its own, with one key."""

    def __init__(self, door: Door, token: str, pool: ThreadPoolExecutor) -> None:
        self._door, self._pool, self._headers = door, pool, as_caller(token)
        self._http = httpx.Client(base_url=door.url, timeout=PATIENCE_S, headers=self._headers)
        self.task = self._http.post("/v1/tasks", json=ASK).json()["id"]

    def get(self, path: str, **headers: str) -> Future[tuple[int, str]]:
        return self._later("GET", path, headers=headers)

    def post(self, **more: Any) -> Future[tuple[int, str]]:
        return self._later("POST", "/v1/completions", json=ASK | more)

    def socket(self) -> Future[tuple[int, str]]:
        """The close code, and the last message."""
        return self._pool.submit(self._socket)

    def _later(self, method: str, path: str, **more: Any) -> Future[tuple[int, str]]:
        def ask() -> tuple[int, str]:
            answer = self._http.request(method, path, **more)
            return answer.status_code, answer.text

        return self._pool.submit(ask)

    def _socket(self) -> tuple[int, str]:
        last = ""
        url = f"ws://127.0.0.1:{self._door.port}/v1/tasks/{self.task}/events"
        with connect(url, open_timeout=PATIENCE_S, additional_headers=self._headers) as stream:
            try:
                while True:
                    last = json.dumps(json.loads(stream.recv(timeout=60))["data"])
            except ConnectionClosed as closed:
                return (closed.rcvd.code if closed.rcvd else 0), last


@contextmanager
def open_streams(door: Door, count: int) -> Iterator[None]:
    """Wait for so many more."""
    before = len(door.app.state.streams)
    yield
    until(lambda: len(door.app.state.streams) == before + count)


@pytest.mark.parametrize("how", ENDS)
def test_a_stream_ends_with_its_key_and_others_go_on(
    door: Door, make: Make, valkey: Redis, model: str, how: str
) -> None:
    ends, stays = make(), make()
    with ThreadPoolExecutor(4) as pool:
        ending, staying = Callers(door, ends, pool), Callers(door, stays, pool)
        with open_streams(door, 2):
            events = ending.get(f"/v1/tasks/{ending.task}/events")
            others = staying.get(f"/v1/tasks/{staying.task}/events")
        change(valkey, ends, ENDS[how])
        status, text = events.result(PATIENCE_S)
        assert (status, said(text)) == (200, "invalid_api_key")
        assert not others.done()
        httpx.post(f"{door.url}/v1/tasks/{staying.task}/cancel", headers=as_caller(stays))
        assert "event: end" in others.result(PATIENCE_S)[1]


def test_whatever_waits_ends_with_its_key(door: Door, make: Make, valkey: Redis, model: str) -> None:
    token = make()
    with ThreadPoolExecutor(8) as pool:
        caller = Callers(door, token, pool)
        with open_streams(door, 5):
            whole, chunks = caller.post(), caller.post(stream=True)
            waits = caller.get(f"/v1/tasks/{caller.task}", prefer="wait=60")
            events, socket = caller.get(f"/v1/tasks/{caller.task}/events"), caller.socket()
        change(valkey, token, ENDS["revoked"])
        found = {one: one.result(PATIENCE_S) for one in (whole, chunks, waits, events, socket)}
    assert [found[one][0] for one in (whole, chunks, waits, events, socket)] == [401, 200, 401, 200, 1008]
    assert {said(text) for _, text in found.values()} == {"invalid_api_key"}
    assert valkey.hget(f"penstock:task:{caller.task}", "status") == b"queued", "a task goes on"
