"""A task's events over real HTTP: from any position, live, at any pace, until the reader leaves."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from producers.contract import keys
from producers.contract.stream import End, Prompt, Token
from producers.gateway.http.sse import encode
from tests.producers.conftest import subscribers
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Open, Submit, until
from tests.waiting import PATIENCE_S


@contextmanager
def follow(
    http: httpx.Client, task_id: str, start: int | str | None = None, **headers: str
) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream's blocks, parsed as a browser would: fields by name, `data` from JSON."""
    params = {} if start is None else {"from": start}
    with http.stream("GET", f"/v1/tasks/{task_id}/events", params=params, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield blocks(answer.iter_lines())


def blocks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    block: dict[str, Any] = {}
    for line in lines:
        if line == "":
            if "event" in block:
                yield block
            block = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            assert name not in block
            block[name] = json.loads(value) if name == "data" else value


def everything(http: httpx.Client, task_id: str, start: int | str | None = None, **headers: str) -> list[Any]:
    with follow(http, task_id, start, **headers) as events:
        return list(events)


class TestFinishedTask:
    def test_has_a_token_event_for_each_token_then_the_end(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.serve(task_id, ["a\nb", "", "\u2028é🎉"])
        events = everything(http, task_id)
        assert [(event["id"], event["event"]) for event in events] == [
            ("0", "token"),
            ("1", "token"),
            ("2", "token"),
            ("3", "end"),
        ]
        assert events[2]["data"] == {"position": 2, "choice": 0, "index": 2, "token_id": 2, "text": "\u2028é🎉"}
        assert events[3]["data"] == {
            "position": 3,
            "status": "completed",
            "finish_reasons": ["stop"],
            "usage": {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 3},
            "error": None,
        }

    def test_is_resumed_from_every_position(self, http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
        """A browser repeats its URL: what it says in Last-Event-ID goes before that."""
        task_id = submit()
        worker.serve(task_id, [f"<{k}>" for k in range(12)])
        whole = everything(http, task_id)
        for start in range(13):
            assert everything(http, task_id, start) == whole[start:]
            if start:
                for url in (None, 1):
                    assert everything(http, task_id, url, **{"Last-Event-ID": str(start - 1)}) == whole[start:]

    @pytest.mark.parametrize("start", [4, 5, 1000, (1 << 63) - 2])
    def test_tells_a_browser_that_has_all_of_it_not_to_come_back(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker, start: int
    ) -> None:
        task_id = submit()
        worker.serve(task_id)
        answer = http.get(f"/v1/tasks/{task_id}/events", headers={"Last-Event-ID": str(start - 1)})
        assert (answer.status_code, answer.content) == (204, b"")

    def test_says_that_it_was_cancelled(self, http: httpx.Client, submit: Submit) -> None:
        task_id = submit()
        http.post(f"/v1/tasks/{task_id}/cancel")
        (end,) = everything(http, task_id)
        assert (end["event"], end["data"]["status"]) == ("end", "cancelled")

    def test_says_why_it_failed(self, http: httpx.Client, submit: Submit, worker: FakeWorker) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.finish(task_id, [0], status="failed", reasons=[], error={"code": "engine", "message": "It broke."})
        (end,) = everything(http, task_id)
        assert end["data"]["error"] == {"code": "engine", "message": "It broke."}


class TestRunningTask:
    def test_is_followed_token_by_token(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
    ) -> None:
        task_id = submit()
        with follow(http, task_id) as events:
            until(lambda: subscribers(valkey, task_id))
            worker.claim(task_id)
            for index in range(5):
                worker.append(task_id, index, [f"{index} "])
                assert next(events)["data"]["text"] == f"{index} "  # before the next one is made
            worker.finish(task_id, [5])
            assert next(events)["event"] == "end"
            assert list(events) == []

    def test_is_followed_by_many_from_different_positions(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, ["x"] * 10)
        got: dict[int, list[int]] = {}

        def read(start: int) -> None:
            got[start] = [event["data"]["position"] for event in everything(http, task_id, start)]

        readers = [threading.Thread(target=read, args=(start,)) for start in range(0, 20, 2)]
        for reader in readers:
            reader.start()
        for index in range(10, 40):
            worker.append(task_id, index, ["x"])
        worker.finish(task_id, [40])
        for reader in readers:
            reader.join(PATIENCE_S)
        assert got == {start: list(range(start, 41)) for start in range(0, 20, 2)}

    def test_is_waited_for_from_a_position_that_is_still_to_come(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        with follow(http, task_id, 3) as events:
            worker.append(task_id, 0, list("abcde"))
            worker.finish(task_id, [5])
            assert [event["data"].get("text") for event in events] == ["d", "e", None]

    def test_is_kept_alive_while_there_is_nothing_to_say(
        self, open_door: Open, model: str, worker: FakeWorker, valkey: Redis
    ) -> None:
        door = open_door(heartbeat=0.05)
        http = door.http
        task_id = http.post("/v1/tasks", json={"model": model, "prompt": [5]}).json()["id"]
        with http.stream("GET", f"/v1/tasks/{task_id}/events") as answer:
            lines = answer.iter_lines()
            for _ in range(3):
                while not next(lines).startswith(":"):
                    pass
            worker.serve(task_id, ["a"])
            assert [event["event"] for event in blocks(lines)] == ["token", "end"]


class TestReader:
    def test_that_leaves_frees_its_subscription(
        self, door: Door, http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, ["a"])
        with follow(http, task_id) as events:
            next(events)
            until(lambda: subscribers(valkey, task_id) == 1)
            assert len(door.app.state.streams) == 1
        until(lambda: subscribers(valkey, task_id) == 0)
        until(lambda: len(door.app.state.streams) == 0)

    def test_that_is_slow_holds_up_nobody_and_misses_nothing(
        self, door: Door, http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
    ) -> None:
        """It reads nothing while more is appended than all buffers on the way can hold, and the hub's backlog too."""
        task_id = submit()
        worker.claim(task_id)
        piece, count = "x" * 8000, 1200
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.connect(("127.0.0.1", door.port))
            slow.sendall(f"GET /v1/tasks/{task_id}/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            until(lambda: subscribers(valkey, task_id))
            with follow(http, task_id) as events:
                for index in range(count):
                    worker.append(task_id, index, [piece])
                worker.finish(task_id, [count])
                assert [event["data"]["position"] for event in events] == list(range(count + 1))
            # The quick reader has had it all; the gateway still has the slow one, and waits for it.
            until(lambda: len(door.app.state.streams) == 1)
            body = b""
            while chunk := slow.recv(1 << 20):
                body += chunk
        lines = body.partition(b"\r\n\r\n")[2].decode().split("\n")
        assert [int(line[4:]) for line in lines if line.startswith("id: ")] == list(range(count + 1))

    def test_that_takes_nothing_for_long_is_dropped(
        self, open_door: Open, model: str, worker: FakeWorker, valkey: Redis
    ) -> None:
        door = open_door(stall=0.2)
        with httpx.Client(base_url=door.url, timeout=PATIENCE_S) as http, socket.socket() as stalled:
            task_id = http.post("/v1/tasks", json={"model": model, "prompt": [5]}).json()["id"]
            worker.claim(task_id)
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", door.port))
            stalled.sendall(f"GET /v1/tasks/{task_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            until(lambda: subscribers(valkey, task_id))
            for index in range(2000):
                worker.append(task_id, index, ["x" * 4000])
            until(lambda: subscribers(valkey, task_id) == 0)
            until(lambda: len(door.app.state.streams) == 0)
            # At once, and with what it was sent: a socket that is only closed waits for its reader.
            with pytest.raises(ConnectionResetError):
                until(lambda: not stalled.recv(1 << 20))

    def test_is_let_go_when_the_gateway_stops_and_resumes_elsewhere(
        self, open_door: Open, model: str, worker: FakeWorker
    ) -> None:
        first, second = open_door(), open_door()
        one, other = (httpx.Client(base_url=door.url, timeout=PATIENCE_S) for door in (first, second))
        with one as http, other as elsewhere:
            task_id = http.post("/v1/tasks", json={"model": model, "prompt": [5]}).json()["id"]
            worker.claim(task_id)
            worker.append(task_id, 0, ["a"])
            with follow(http, task_id) as events:
                last = next(events)["id"]
                first.end_streams()
                assert list(events) == []  # closed in good order, without an `end`
            worker.append(task_id, 1, ["b"])
            worker.finish(task_id, [2])
            rest = everything(elsewhere, task_id, **{"Last-Event-ID": last})
            assert [event["data"].get("text") for event in rest] == ["b", None]

    def test_is_told_when_the_task_is_gone_from_under_it(
        self, http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        with follow(http, task_id) as events:
            until(lambda: valkey.pubsub_numsub(keys.channel(task_id))[0][1])
            valkey.delete(keys.task(task_id), keys.stream(task_id))
            # A message that does not connect makes the reader look at the stream.
            valkey.publish(keys.channel(task_id), '[5,[0,5,5,"x"]]')
            (last,) = events
        assert last["event"] == "error"
        assert last["data"]["error"]["code"] == "task_not_found"


class TestStart:
    @pytest.mark.parametrize("start", ["-1", "x", "1.5", "", "0x1", "१", str(1 << 63), "9" * 400])
    def test_that_is_no_position_is_refused(self, http: httpx.Client, submit: Submit, start: str) -> None:
        answer = http.get(f"/v1/tasks/{submit()}/events", params={"from": start})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "from")
        assert len(error["message"]) < 200

    def test_that_is_no_last_event_id_is_refused(self, http: httpx.Client, submit: Submit) -> None:
        answer = http.get(f"/v1/tasks/{submit()}/events", headers={"Last-Event-ID": "abc"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")

    def test_is_checked_before_the_task_is_looked_for(self, http: httpx.Client) -> None:
        assert http.get("/v1/tasks/nobody/events", params={"from": "-1"}).status_code == 400

    def test_no_proxy_is_to_keep_or_hold_back_a_stream(self, http: httpx.Client, submit: Submit) -> None:
        with http.stream("GET", f"/v1/tasks/{submit()}/events") as answer:
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-accel-buffering"] == "no"


@given(
    text=st.text(),
    position=st.integers(0, 1 << 62),
    logprobs=st.none() | st.just((-0.5, ((3, -0.5), (4, -1.25)))),
    reason=st.none() | st.just("stop"),
)
def test_a_token_event_is_three_ascii_lines_whose_json_says_it_all(
    text: str, position: int, logprobs: Any, reason: str | None
) -> None:
    lines = encode(Token(position, 1, 2, 3, text, logprobs, reason))
    head, event, data, *blank = lines.split("\n")
    assert (head, event, blank) == (f"id: {position}", "event: token", ["", ""])
    assert lines.isascii()
    assert "\r" not in lines
    said = json.loads(data.removeprefix("data: "))
    assert said.pop("text") == text
    assert said.pop("finish_reason", None) == reason
    if logprobs is not None:
        assert said.pop("logprobs")["top"] == [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.25}]
    assert said == {"position": position, "choice": 1, "index": 2, "token_id": 3}


def test_a_prompt_event_says_how_likely_each_token_was() -> None:
    lines = encode(Prompt(0, 512, (5, 6), (None, (-0.5, ((7, -0.25),)))))
    assert lines.startswith("id: 0\nevent: prompt\ndata: ")
    assert json.loads(lines.split("data: ")[1]) == {
        "position": 0,
        "first": 512,
        "tokens": [
            {"token_id": 5, "logprob": None, "top": []},
            {"token_id": 6, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}]},
        ],
    }


def test_an_end_event_names_the_reason_of_each_choice() -> None:
    lines = encode(End(9, "completed", ("stop", None), {"output_tokens": 9}, None))
    assert lines.startswith("id: 9\nevent: end\ndata: ")
    assert json.loads(lines.split("data: ")[1])["finish_reasons"] == ["stop", None]
