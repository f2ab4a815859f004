"""A worker that answers in the background as it is told, and requests to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.broker.redis.keys import tier_list
from producers.contract import keys
from producers.contract.record import Record
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Ask
from tests.waiting import PATIENCE_S

Script = Callable[[FakeWorker, Record], None]
MESSAGES = [{"role": "user", "content": "Write f."}]


def says(*pieces: str, reason: str = "stop", n: int = 1, **options: Any) -> Script:
    """Every choice says the same pieces, a step each. `options` go to `FakeWorker.append`."""

    def play(worker: FakeWorker, record: Record) -> None:
        for at, piece in enumerate(pieces):
            last = at == len(pieces) - 1
            for choice in range(n):
                worker.append(record.id, at, [piece], choice=choice, finish_reason=reason if last else None, **options)
        worker.finish(record.id, [len(pieces)] * n, reasons=[reason] * n, prompt_tokens=7)

    return play


class Answering:
    """Takes each task and plays the next of `scripts`, the last one for ever. `records`: what was taken."""

    def __init__(self, valkey: Redis) -> None:
        self.scripts: list[Script] = [says("Hello", ",", " world")]
        self.records: list[Record] = []
        self.worker = FakeWorker(valkey)
        self.queue = QUEUE
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            task_id = self.worker.take(self.queue, 0.05)
            if task_id is None or self._stop.is_set():
                continue
            answer = self.worker.claim(task_id)
            if answer.record is None or answer.answer != "go":
                continue
            self.records.append(answer.record)
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            script(self.worker, answer.record)

    def close(self) -> None:
        self._stop.set()
        self.worker.redis.lpush(tier_list(self.queue, "default"), '{"headers": {"id": "wakes the thread"}}')
        self._thread.join(PATIENCE_S)


@pytest.fixture
def answering(valkey: Redis, model: str) -> Iterator[Answering]:
    made = Answering(valkey)
    yield made
    made.close()


def send(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """In ASCII, so that a lone surrogate can be sent."""
    return http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.fixture
def chat(http: httpx.Client, model: str) -> Ask:
    """Asks for a chat completion."""
    return lambda **fields: send(http, "/v1/chat/completions", {"model": model, "messages": MESSAGES, **fields})


@pytest.fixture
def complete(http: httpx.Client, model: str) -> Ask:
    """Asks for a completion."""
    return lambda **fields: send(http, "/v1/completions", {"model": model, "prompt": "def f", **fields})


def chunks(answer: httpx.Response) -> list[Any]:
    """A whole stream's chunks as JSON, each of its lines looked at; [DONE] as it is."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found: list[Any] = []
    for line in answer.text.split("\n"):
        if line.startswith("data: "):
            said = line.removeprefix("data: ")
            found.append(said if said == "[DONE]" else json.loads(said))
        else:
            assert line == "" or line.startswith(": "), line
    return found


def nothing_written(valkey: Redis) -> bool:
    return not [name for name in valkey.keys("penstock:*") if _of_a_task(name.decode())]


def _of_a_task(name: str) -> bool:
    return name.startswith((keys.task(""), keys.stream(""), "penstock:queue:", keys.SUBMITTING))


def ends(**how: Any) -> Script:
    """A worker's part: the task ends without a token."""
    return lambda worker, record: worker.finish(record.id, [0], **how) and None
