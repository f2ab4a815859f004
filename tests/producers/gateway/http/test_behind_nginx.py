"""A gateway behind nginx with the settings of docs/run/gateway.md: both read the same requests in what comes."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from websockets.sync.client import connect

from producers.contract import keys
from producers.gateway.http.connection import Connection
from producers.gateway.http.errors import Problem
from tests.processes import free_port
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make, until
from tests.producers.gateway.http import test_head
from tests.producers.gateway.tasks.test_websocket import read
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.waiting import PATIENCE_S

PAGE = Path(__file__).parents[4] / "docs" / "run" / "gateway.md"
#: The whole of nginx' settings beside the page's. One process, of whoever runs the tests.
CONFIG = """
daemon off; master_process off; pid nginx.pid; error_log error.log;
events {{ }}
http {{
    log_format upstream "$upstream_status $status $request_id";
    access_log access.log upstream;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    {block}
}}
"""
#: A request that ends its connection.
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Front:
    """An nginx. `port`: where it listens; `log`: has a line for each request that it has read."""

    port: int
    log: Path

    def forwarded(self) -> int:
        """Requests that it has passed on to the gateway."""
        return sum(not line.startswith("- ") for line in self.log.read_text().splitlines())

    def send(self, data: bytes) -> bytes:
        """All that is answered to it and to LAST, until the connection ends."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(data + LAST)
            answers = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(1 << 16):
                    answers += part
        return answers


@pytest.fixture(scope="module")
def shared_settings() -> dict[str, Any]:
    return {"auth": "keys", "proxy_headers": ("127.0.0.1",)}


@pytest.fixture(scope="module")
def front(shared_door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("no nginx on this machine (Debian: apt install nginx-light)")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    blocks = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    block = blocks[0]
    for shown, here in (("127.0.0.1:8000", f"127.0.0.1:{shared_door.port}"), ("443 ssl;", f"127.0.0.1:{port};")):
        assert block.count(shown) == 1
        block = block.replace(shown, here)
    (folder / "nginx.conf").write_text(CONFIG.format(block=block))
    running = subprocess.Popen([nginx, "-p", folder, "-c", "nginx.conf", "-e", "error.log"])
    try:
        until(lambda: running.poll() is not None or _listens(port))
        assert running.poll() is None, (folder / "error.log").read_text()
        yield Front(port, folder / "access.log")
    finally:
        running.terminate()
        running.wait(PATIENCE_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answered(door: Door) -> int:
    """Requests that the gateway has answered."""
    families = text_string_to_metric_families(generate_latest(door.app.state.metrics.registry).decode())
    return sum(
        int(sample.value)
        for family in families
        for sample in family.samples
        if sample.name == "penstock_gateway_requests_total"
    )


#: Bytes that a proxy and a server may take for one request or for two; INNER is the other one.
SMUGGLED = {
    **{
        f"{offer}, {framing}": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\n" + headers + body(test_head.INNER)
        for offer, headers in test_head.OFFERS.items()
        for framing, body in test_head.FRAMINGS.items()
    },
    **{kind: data + test_head.INNER for kind, data in test_head.DOUBTFUL.items()},
    **{
        f"chunks: {kind}": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + test_head.INNER
        for kind, chunks in test_head.DOUBTFUL_CHUNKS.items()
    },
    "a handshake with a body": test_head.HANDSHAKE % (b"Content-Length: %d\r\n" % len(test_head.INNER))
    + test_head.INNER,
    "a handshake elsewhere": test_head.HANDSHAKE % b"" + test_head.INNER,
    "a handshake where it is taken": test_head.HANDSHAKE.replace(b"/a ", b"/v1/tasks/x/events ") % b""
    + test_head.INNER,
    "a length in a header with _": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent_Length: 5\r\n\r\n" + test_head.INNER,
    "a GET with a body": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(test_head.INNER)
    + test_head.INNER,
    "a body that is shorter": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n" + test_head.INNER,
    "Expect": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    % len(test_head.INNER)
    + test_head.INNER,
    "Connection names a length": b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nConnection: content-length\r\n"
    b"Content-Length: %d\r\n\r\n" % len(test_head.INNER) + test_head.INNER,
}


@pytest.fixture
def refused(shared_door: Door, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gateway refuses as no request, from now on."""
    problems: list[Any] = []
    refuse = Connection._refuse

    def refuse_and_tell(connection: Connection, problem: Problem) -> None:
        problems.append(problem)
        refuse(connection, problem)

    monkeypatch.setattr(Connection, "_refuse", refuse_and_tell)
    return problems


@pytest.mark.parametrize("kind", SMUGGLED)
def test_nginx_and_the_gateway_count_the_same_requests(front: Front, door: Door, refused: list[Any], kind: str) -> None:
    forwarded, run = front.forwarded(), answered(door)
    front.send(SMUGGLED[kind])
    front.send(b"")  # perhaps on the same connection to the gateway
    until(lambda: front.forwarded() - forwarded == answered(door) - run + len(refused))
    until(lambda: door.run(_idle(door)))
    assert front.forwarded() - forwarded == answered(door) - run + len(refused)


async def _idle(door: Door) -> bool:
    """Whether no connection of the gateway has a request under way."""
    return len(door.peers) == len(door.peers._idle)


@pytest.mark.parametrize(
    "forged",
    [
        b"X-Forwarded-For: 203.0.113.9\r\n",
        b"X-Forwarded-For: 203.0.113.9, 127.0.0.1\r\nx-forwarded-for: 203.0.113.8\r\nX_Forwarded_For: 203.0.113.7\r\n",
        b"Connection: X-Forwarded-For\r\nX-Forwarded-For: 203.0.113.9\r\n",
        b"Forwarded: for=203.0.113.9\r\nX-Real-IP: 203.0.113.9\r\nX-Forwarded-For:\r\n",
    ],
)
def test_callers_cannot_forge_their_address(front: Front, door: Door, make: Make, forged: bytes) -> None:
    """The audit log has the one that nginx sees, which it also tells the gateway."""
    admin = make(scopes=("admin",))
    body = b'{"tenant": "acme", "name": "forged", "scopes": ["read"]}'
    head = b"POST /v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % admin.encode()
    head += b"Content-Type: application/json\r\n" + forged
    answer = front.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert re.findall(test_head.STATUS, answer) == [b"200", b"200"], answer
    audit = httpx.get(f"http://127.0.0.1:{front.port}/v1/audit", headers=as_caller(admin), timeout=PATIENCE_S).json()[
        "data"
    ]
    assert [entry.get("address") for entry in audit if entry["by"] != "test"] == ["127.0.0.1"]


@pytest.mark.parametrize("offer", test_head.OFFERS)
def test_a_task_whose_client_offers_another_protocol_is_taken(
    front: Front, door: Door, valkey: Redis, make: Make, model: str, offer: str
) -> None:
    body = b'{"model": "%s", "prompt": "def f"}' % model.encode()
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % make().encode()
    head += b"Content-Type: application/json\r\n" + test_head.OFFERS[offer]
    answers = front.send(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert re.findall(test_head.STATUS, answers) == [b"202", b"200"]
    assert len(list(valkey.scan_iter(keys.task("*")))) == 1


def test_a_websocket_passes_and_only_to_events(front: Front, make: Make, model: str, worker: FakeWorker) -> None:
    token = make()
    url = f"http://127.0.0.1:{front.port}/v1/tasks"
    answer = httpx.post(url, json={"model": model, "prompt": "x"}, headers=as_caller(token), timeout=PATIENCE_S)
    task_id = answer.json()["id"]
    address = f"ws://127.0.0.1:{front.port}/v1/tasks/{task_id}/events"
    with connect(address, open_timeout=PATIENCE_S, proxy=None, additional_headers=as_caller(token)) as websocket:
        worker.serve(task_id, ["a", "b"])
        messages, code = read(websocket)
    assert ([message["event"] for message in messages], code) == (["token", "token", "end"], 1000)
    answers = front.send(test_head.HANDSHAKE.replace(b"/a ", b"/livez ") % b"")
    assert re.findall(test_head.STATUS, answers) == [b"200", b"200"]
