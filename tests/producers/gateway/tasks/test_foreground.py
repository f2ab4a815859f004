"""Requests that wait: they hold a reader lease, and who leaves takes their tasks along."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, Open, until

PATHS = ["/v1/chat/completions", "/v1/completions"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    ask = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    return {"model": "tiny", **ask, **fields}


def held(valkey: Redis) -> int:
    return int(valkey.zcard(keys.READERS))


def status(valkey: Redis, task_id: str) -> str:
    return (valkey.hget(keys.task(task_id), "status") or b"").decode()


def leave(door: Door, path: str, **fields: Any) -> socket.socket:
    """A request whose answer nobody has read."""
    data = json.dumps(body(path, **fields)).encode()
    client = socket.create_connection(("127.0.0.1", door.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def taken(valkey: Redis, worker: FakeWorker) -> str:
    task_id: str = until(lambda: worker.take(QUEUE))
    assert worker.claim(task_id).answer == "go"
    return task_id


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_lease_is_there_before_the_task_and_gone_after_it(
    door: Door, http: httpx.Client, valkey: Redis, worker: FakeWorker, path: str, stream: bool
) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(http.post(path, json=body(path, stream=stream))))
    asking.start()
    task_id = until(lambda: worker.take(QUEUE))
    assert valkey.zscore(keys.READERS, task_id) is not None
    worker.serve(task_id)
    asking.join(60)
    assert answers[0].status_code == 200
    until(lambda: held(valkey) == 0)
    assert status(valkey, task_id) == "completed"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_cancels(door: Door, valkey: Redis, worker: FakeWorker, path: str, stream: bool) -> None:
    client = leave(door, path, stream=stream)
    task_id = taken(valkey, worker)
    worker.append(task_id, 0, ["a"])
    client.close()
    until(lambda: valkey.hexists(keys.task(task_id), "cancel"))
    assert worker.append(task_id, 1, ["b"])[0] == "cancel"
    until(lambda: held(valkey) == 0)


def test_who_leaves_cancels_every_task_of_the_request(door: Door, valkey: Redis, model: str) -> None:
    client = leave(door, "/v1/completions", prompt=["a", "b", "c"])
    until(lambda: valkey.llen(broker_keys.tier_list(QUEUE, "default")) == 3)
    client.close()
    names = [name.decode() for name in valkey.keys(keys.task("*"))]
    until(lambda: all(valkey.hget(name, "status") == b"cancelled" for name in names))
    until(lambda: held(valkey) == 0)


@pytest.mark.parametrize("path", PATHS)
def test_a_gateway_that_stops_says_so_to_those_who_wait(
    open_door: Open, model: str, valkey: Redis, worker: FakeWorker, path: str
) -> None:
    door, answers = open_door(), list[httpx.Response]()

    def ask(stream: bool) -> None:
        answers.append(httpx.post(door.url + path, json=body(path, stream=stream), timeout=60))

    waiting = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for one in waiting:
        one.start()
    ids = [taken(valkey, worker) for _ in waiting]
    until(lambda: len(door.app.state.streams) == 2)
    door.end_streams()
    for one in waiting:
        one.join(60)
    one_piece, streamed = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
    assert (one_piece.status_code, one_piece.headers["retry-after"]) == (503, "1")
    assert one_piece.json()["error"]["code"] == "stopping"
    (said,) = (line for line in streamed.text.splitlines() if line.startswith("data: "))
    assert json.loads(said.removeprefix("data: "))["error"]["code"] == "stopping"
    for task_id in ids:
        until(lambda task_id=task_id: valkey.hexists(keys.task(task_id), "cancel"))


def test_a_task_that_cannot_be_queued_leaves_none_behind(open_door: Open, valkey: Redis, model: str) -> None:
    door = open_door(broker="redis://127.0.0.1:1", patience=0.2)
    answer = httpx.post(f"{door.url}/v1/completions", json=body("/v1/completions", prompt=["a", "b"]), timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "submit_failed")
    assert "retry-after" in answer.headers
    names = [name.decode() for name in valkey.keys(keys.task("*"))]
    assert [valkey.hexists(name, "cancel") for name in names] == [True] * len(names)
    assert held(valkey) == 0


def test_a_lapsed_lease_is_swept_by_the_gateway(open_door: Open, valkey: Redis, model: str) -> None:
    open_door(sweep=True, reader_lease=0.3)
    door = open_door(reader_lease=3600.0)
    client = leave(door, "/v1/completions")
    (name,) = until(lambda: valkey.keys(keys.task("*")))
    task_id = name.decode().removeprefix(keys.task(""))
    until(lambda: status(valkey, task_id) == "queued")
    valkey.zadd(keys.READERS, {task_id: 1})
    until(lambda: status(valkey, task_id) == "cancelled")
    client.close()
    until(lambda: held(valkey) == 0)
