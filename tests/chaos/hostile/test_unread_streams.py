"""A tenant opens streams of a long result and takes nothing: others, readiness and revocation do not wait for it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.chaos.hostile.stage import TENANT, Stage, stage, status_of
from tests.waiting import until

#: Streams that are opened, of which the gateway takes some.
STREAMS, MOST = 150, 100
#: A result's tokens and their alternatives: a replay has some 20 MB.
TOKENS, TOP = 20_000, 20
#: Most bytes of a stream's past that the gateway may read before its reader takes something: what sockets and buffers
#: hold, and a slice.
AHEAD = 1 << 19


@pytest.fixture(scope="module")
def hostile() -> Iterator[Stage]:
    with stage("--max-streams-per-tenant", str(MOST)) as found:
        yield found


def test_unread_streams_are_refused_beyond_a_number_and_delay_nobody(hostile: Stage) -> None:
    task_id = hostile.finished("attacker", tokens=TOKENS, logprobs=TOP)
    hostile.redis.config_resetstat()
    links = [hostile.unread("attacker", f"/v1/tasks/{task_id}/events") for _ in range(STREAMS)]
    for _ in range(10):
        assert hostile.http(None, "GET", "/readyz").status_code == 200
        assert hostile.http("victim", "GET", "/v1/tasks").status_code == 200
        assert hostile.http("victim", "POST", "/v1/tasks", json={"model": "tiny", "prompt": [1]}).status_code == 202
    assert sorted(map(status_of, links)) == [200] * MOST + [429] * (STREAMS - MOST)
    until(lambda: _open(hostile) == MOST)
    assert hostile.redis.info("stats")["total_net_output_bytes"] < MOST * AHEAD
    assert "WARNING producers.gateway" not in hostile.log.read_text()
    hostile.revoke("attacker")
    until(lambda: _open(hostile) == 0)
    until(lambda: hostile.http("attacker", "GET", "/v1/tasks").status_code == 401)


def test_a_result_is_read_whole_beside_unread_streams(hostile: Stage) -> None:
    """By another tenant, whose turn to read comes as often as the attacker's."""
    hostile.key("reader", scopes=TENANT)
    task_id = hostile.finished("reader", tokens=TOKENS, logprobs=TOP)
    own = hostile.finished("victim", tokens=3000)
    links = [hostile.unread("reader", f"/v1/tasks/{task_id}/events") for _ in range(MOST)]
    events = hostile.http("victim", "GET", f"/v1/tasks/{own}/events").text
    assert events.count("event: token\n") == 3000
    assert events.count("event: end\n") == 1
    assert len(hostile.http("victim", "GET", f"/v1/tasks/{own}").json()["choices"][0]["token_ids"]) == 3000
    for link in links:
        link.close()
    until(lambda: _open(hostile) == 0)


def test_a_reader_that_comes_back_to_its_stream_finds_it_whole(hostile: Stage) -> None:
    """What was not taken was not lost: it is read when it is wanted."""
    task_id = hostile.finished("victim", tokens=2000, logprobs=TOP)
    link = hostile.unread("victim", f"/v1/tasks/{task_id}/events")
    assert hostile.http("victim", "GET", "/v1/tasks").status_code == 200
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    received = b""
    while not received.endswith(b"\r\n0\r\n\r\n"):
        some = link.recv(1 << 16)
        assert some, "closed before its end"
        received += some
    assert received.count(b"event: token\n") == 2000


def _open(hostile: Stage) -> int:
    """How many streams the gateway says it has open."""
    figures = hostile.http("admin", "GET", "/metrics").text.splitlines()
    lines = [line for line in figures if line.startswith("penstock_gateway_open_streams{")]
    return sum(int(json.loads(line.rpartition(" ")[2].partition(".")[0])) for line in lines)
