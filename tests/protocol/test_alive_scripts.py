"""LOOK, END and RETRACT on one server: who is silent, as far as the looker itself is heard there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import ConnectionPool, Redis

from producers.connection.alive import Seen, end, look, read_look, read_retract, retract
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from tests.protocol.server import Server

POOL = keys.pool_queue("m", "1", "x")


@pytest.fixture
def server(valkey: Redis) -> Iterator[Server]:
    """With three incarnations that listen: `me`, `dead`, which then listens no more, and `well`; `old` never did."""
    made = Server(valkey)
    for inc in ("me", "dead", "well", "old"):
        made.hear(inc, inc != "old")
        run(valkey, protocol.lease(inc, POOL, '{"worker": "w"}', 60_000, take=True))
    made.hear("dead", False)
    yield made
    made.close()


def seen(server: Server, *others: str) -> dict[str, Seen] | None:
    return read_look(run(server.redis, look("me", others)), others)


def test_silent_is_who_said_that_it_listens_and_does_not(server: Server) -> None:
    found = seen(server, "dead", "well", "old", "gone")
    assert found == {"dead": Seen.SILENT, "well": Seen.LIVES, "old": Seen.LIVES, "gone": Seen.GONE}


def test_a_looker_that_is_not_heard_sees_nobody(server: Server) -> None:
    server.hear("me", False)
    assert seen(server, "dead") is None
    assert run(server.redis, end("dead", "me")) == 0
    assert server.redis.exists(keys.lease("dead"))


def test_a_renewal_tells_what_the_server_hears_then(server: Server) -> None:
    """It has lost its connection, and lives; then it listens again."""
    run(server.redis, protocol.lease("dead", POOL, '{"worker": "w"}', 60_000, take=False))
    assert seen(server, "dead") == {"dead": Seen.LIVES}
    server.hear("dead", True)
    run(server.redis, protocol.lease("dead", POOL, '{"worker": "w"}', 60_000, take=False))
    server.hear("dead", False)
    assert seen(server, "dead") == {"dead": Seen.SILENT}


def test_end_takes_the_silent_alone_and_its_worker_can_tell(server: Server) -> None:
    for inc, ended in (("dead", 1), ("well", 0), ("old", 0), ("dead", 1), ("gone", 1)):
        assert run(server.redis, end(inc, "me")) == ended
        assert server.redis.exists(keys.lease(inc)) == (not ended)
    assert read_retract(run(server.redis, retract("dead"))) == []
    assert read_retract(run(server.redis, retract("gone"))) is None
    assert 0 < server.redis.pttl("penstock:taken:dead") <= 3_600_000


def test_a_user_who_may_not_ask_is_never_heard(server: Server) -> None:
    server.redis.execute_command("ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-pubsub")
    settings = server.redis.connection_pool.connection_kwargs | {"username": "mute", "password": ""}
    with Redis(connection_pool=ConnectionPool(**settings)) as mute:
        assert run(mute, look("me", ["dead"])) == [0]
        run(mute, protocol.lease("well", POOL, '{"worker": "w"}', 60_000, take=False))
    assert server.redis.get(keys.lease("well")) == b'{"worker": "w"}'
