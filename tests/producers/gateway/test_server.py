"""The gateway as a process: how it starts, and how it stops."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import httpx
import pytest
from redis import Redis

from producers.gateway import GatewaySettings
from tests.producers.conftest import subscribers
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.http.test_sse import follow
from tests.waiting import PATIENCE_S, until
from tests.warm import warm_gateway
from workers.cli.exits import Failure
from workers.cli.servers import open_port


@contextmanager
def gateway(url: str, drain: float) -> Iterator[tuple[str, BaseProcess]]:
    """A gateway process and its URL."""
    listener = open_port("127.0.0.1", 0)
    settings = GatewaySettings(url, url, drain=drain)
    process = warm_gateway(settings, listener)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    try:
        yield address, process
    finally:
        process.kill()
        process.join()


def refuses(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was about to be accepted as the door was closed
        return False
    return False


def test_sigterm_stops_listening_lets_streams_finish_and_exits_0(
    valkey_url: str, valkey: Redis, model: str, worker: FakeWorker
) -> None:
    with (
        gateway(valkey_url, drain=60) as (address, process),
        httpx.Client(base_url=address, timeout=PATIENCE_S) as http,
    ):
        task_id = http.post("/v1/tasks", json={"model": model, "prompt": "x"}).json()["id"]
        worker.claim(task_id)
        with follow(http, task_id) as events:
            until(lambda: subscribers(valkey, task_id))
            process.terminate()
            until(lambda: refuses(address))
            worker.append(task_id, 0, ["a"])
            worker.finish(task_id, [1])
            assert [event["event"] for event in events] == ["token", "end"]
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def test_a_request_that_has_begun_to_come_in_is_answered_after_sigterm(valkey_url: str) -> None:
    with gateway(valkey_url, drain=60) as (address, process):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as caller:
            caller.sendall(b"GET /livez HTTP/1.1\r\n")
            with httpx.Client(base_url=address) as http:  # so that the gateway has seen the first
                assert http.get("/livez").status_code == 200
            process.terminate()
            until(lambda: refuses(address))
            caller.sendall(b"host: x\r\n\r\n")
            answer = caller.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
        assert b"\r\nconnection: close\r\n" in answer.lower()
        process.join(PATIENCE_S)
        assert process.exitcode == 0


@pytest.mark.parametrize("drain", [0.2, 60])
def test_streams_are_ended_after_the_drain_time_or_at_a_second_signal(
    valkey_url: str, valkey: Redis, model: str, drain: float
) -> None:
    with gateway(valkey_url, drain) as (address, process), httpx.Client(base_url=address, timeout=PATIENCE_S) as http:
        task_id = http.post("/v1/tasks", json={"model": model, "prompt": "x"}).json()["id"]
        with follow(http, task_id) as events:
            until(lambda: subscribers(valkey, task_id))
            process.terminate()
            until(lambda: refuses(address))
            if drain == 60:
                process.terminate()
            assert list(events) == []
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def test_a_port_that_is_taken_is_an_error_of_listen() -> None:
    with open_port("127.0.0.1", 0) as taken, pytest.raises(Failure, match="in use"):
        open_port("127.0.0.1", taken.getsockname()[1])


def test_ipv6_is_listened_on_where_asked_for() -> None:
    with open_port("::1", 0) as listener:
        assert listener.family == socket.AF_INET6
