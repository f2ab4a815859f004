"""Tokens that are sent as they come, past the tasks of their stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis import Redis

from producers.contract.stream import Token
from producers.gateway.fair_share import SHARE, FairShare
from producers.gateway.http import sse
from producers.gateway.http.sse import Direct, Feed
from tests.producers.conftest import subscribers
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, until

TOKEN = Token(0, 0, 0, 7, "a")
ENDPOINTS = {
    "/v1/tasks": {"prompt": [5], "max_tokens": 500},
    "/v1/completions": {"prompt": [5], "stream": True, "max_tokens": 500},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 500},
    "/v1/responses": {"input": "Hi", "stream": True, "max_output_tokens": 500},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 500},
}


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[Token]:
    """The tokens that went past their streams' tasks."""
    tokens: list[Token] = []
    send = Direct.send

    def noted(self: Direct, fresh: list[Token]) -> None:
        tokens.extend(fresh)
        send(self, fresh)

    monkeypatch.setattr(Direct, "send", noted)
    return tokens


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in each line of a stream that has some."""
    for line in lines:
        if line.startswith("data: {"):
            data = json.loads(line.removeprefix("data: "))
            if data.get("type", "content_block_delta") not in ("response.output_text.delta", "content_block_delta"):
                continue
            if isinstance(data.get("delta"), dict):  # Anthropic's
                data = data["delta"]
            choice = (data.get("choices") or [{}])[0]
            yield data.get("text") or data.get("delta") or choice.get("text") or choice.get("delta", {}).get("content")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_waiting_streams_tokens_go_past_its_tasks_in_order(
    door: Door, model: str, valkey: Redis, worker: FakeWorker, passed: list[Token], path: str
) -> None:
    body: dict[str, Any] = {"model": model, **ENDPOINTS[path]}
    method, url = ("POST", path)
    if path == "/v1/tasks":
        method, url, body = "GET", f"{path}/{door.http.post(path, json=body).json()['id']}/events", {}
    with door.http.stream(method, url, json=body or None) as answer:
        texts = filter(None, pieces(answer.iter_lines()))
        task_id = worker.take(QUEUE, 60)
        assert task_id is not None
        until(lambda: subscribers(valkey, task_id))
        worker.claim(task_id)
        count = 0
        # One that comes while the reader is still busy with the one before goes the other way.
        while len(passed) < 3:
            piece = f'{count}"é\n'
            worker.append(task_id, count, [piece])
            assert next(texts) == piece
            count += 1
            assert count < 400
        worker.append(task_id, count, ["x", "y"])
        worker.append(task_id, count + 2, ["z"], finish_reason="stop")
        worker.finish(task_id, [count + 3])
        assert "".join(texts) == "xyz"


@dataclass
class Body:
    """An answer's body that can be written to, or not."""

    writable: bool = True
    parts: list[bytes] = field(default_factory=list)

    def write(self, part: bytes) -> None:
        self.parts.append(part)


@dataclass
class Waiting:
    """A stream that waits for its next chunk."""

    direct: Direct
    body: Body
    feed: Feed
    stop: asyncio.Future[None]
    fair: FairShare
    next: asyncio.Task[bytes | None]


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Waiting]:
    fair, body, stop = FairShare(), Body(), asyncio.get_running_loop().create_future()
    SHARE.set(fair.of("caller"))
    monkeypatch.setattr(sse, "live_body", lambda scope: body)

    async def chunks() -> AsyncGenerator[bytes]:
        await asyncio.Event().wait()
        yield b""

    direct, feed = Direct(lambda tokens: b"".join(token.text.encode() for token in tokens)), Feed(chunks(), stop, 60)
    assert not direct.free
    direct.begin({}, feed)
    assert not direct.free  # the answer's head is still on its way
    ahead = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    yield Waiting(direct, body, feed, stop, fair, ahead)
    ahead.cancel()
    await feed.close()


async def test_a_token_wakes_nobody_and_is_charged_to_its_streams_caller(waiting: Waiting) -> None:
    assert waiting.direct.free
    waiting.direct.send([TOKEN, TOKEN])
    await asyncio.sleep(0)
    assert waiting.body.parts == [b"aa"]
    assert not waiting.next.done()
    assert waiting.fair.of("caller").used > 0


async def test_nothing_passes_while_something_else_is_to_be_sent_or_nobody_takes_it(waiting: Waiting) -> None:
    waiting.body.writable = False
    assert not waiting.direct.free
    waiting.body.writable, waiting.fair.cap = True, 0.5  # callers wait for their turns
    assert not waiting.direct.free
    waiting.fair.cap = None
    assert waiting.direct.free
    waiting.stop.set_result(None)
    assert not waiting.direct.free
    assert await waiting.next is None


async def test_a_heartbeat_that_is_due_goes_first(waiting: Waiting) -> None:
    waiting.feed._last_read_at = float("-inf")
    waiting.feed._beat()
    assert not waiting.direct.free
    assert await waiting.next == sse.HEARTBEAT


async def test_a_token_makes_a_heartbeat_wait_again(waiting: Waiting) -> None:
    waiting.feed._last_read_at = float("-inf")
    waiting.direct.send([TOKEN])
    waiting.feed._beat()
    assert waiting.direct.free


async def test_a_token_that_cannot_be_encoded_ends_its_own_stream(waiting: Waiting) -> None:
    waiting.direct._encode = lambda tokens: bytes(tokens[0].token_id // 0)
    waiting.direct.send([TOKEN])
    assert not waiting.direct.free
    with pytest.raises(ZeroDivisionError):
        await waiting.next
