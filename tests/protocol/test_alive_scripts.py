"""LOOK, END and RETRACT on one server: who is silent, as far as the looker itself is heard there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import ConnectionPool, Redis

from producers.connection.script import run
from producers.contract import keys
from producers.contract.leases import Liveness, end, join, look, observe, read_look, read_retract, retract
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


def seen(server: Server, *others: str, since: int = 0) -> dict[str, Liveness] | None:
    return read_look(run(server.redis, look("me", others, since)), others)


def renew(server: Server, *incs: str) -> None:
    for inc in incs:
        run(server.redis, protocol.lease(inc, POOL, '{"worker": "w"}', 60_000, take=False))


def test_silent_is_who_said_that_it_listens_and_does_not(server: Server) -> None:
    found = seen(server, "dead", "well", "old", "gone")
    assert found == {"dead": Liveness.SILENT, "well": Liveness.LIVES, "old": Liveness.LIVES, "gone": Liveness.GONE}


def test_a_looker_that_is_not_heard_sees_nobody(server: Server) -> None:
    server.hear("me", False)
    assert seen(server, "dead") is None
    assert run(server.redis, end("dead", "me")) == 0
    assert server.redis.exists(keys.lease("dead"))


def test_a_renewal_tells_what_the_server_hears_then(server: Server) -> None:
    """It has lost its connection, and lives; then it listens again."""
    run(server.redis, protocol.lease("dead", POOL, '{"worker": "w"}', 60_000, take=False))
    assert seen(server, "dead") == {"dead": Liveness.LIVES}
    server.hear("dead", True)
    run(server.redis, protocol.lease("dead", POOL, '{"worker": "w"}', 60_000, take=False))
    server.hear("dead", False)
    assert seen(server, "dead") == {"dead": Liveness.SILENT}


def test_end_takes_the_silent_alone_and_its_worker_can_tell(server: Server) -> None:
    for inc, ended in (("dead", 1), ("well", 0), ("old", 0), ("dead", 1), ("gone", 1)):
        assert run(server.redis, end(inc, "me")) == ended
        assert server.redis.exists(keys.lease(inc)) == (not ended)
    assert read_retract(run(server.redis, retract("dead"))) == []
    assert read_retract(run(server.redis, retract("gone"))) is None
    assert 0 < server.redis.pttl("penstock:taken:dead") <= 3_600_000


def test_who_has_joined_judges_what_leases_say_since_then(server: Server) -> None:
    """The two that are dead now were heard when they renewed: one before the join, one since."""
    server.hear("dead", True)
    renew(server, "dead")
    since = run(server.redis, join("me"))
    renew(server, "well")
    for inc in ("dead", "well"):
        server.hear(inc, False)
    assert seen(server, "dead", "well", since=since) == {"dead": Liveness.LIVES, "well": Liveness.SILENT}
    assert seen(server, "dead", "well") == {"dead": Liveness.SILENT, "well": Liveness.SILENT}
    assert run(server.redis, end("dead", "me", since)) == 0
    assert run(server.redis, end("well", "me", since)) == 1
    assert run(server.redis, end("dead", "me")) == 1


def test_a_lease_of_a_release_that_counts_no_joins_says_nothing_to_the_young(server: Server) -> None:
    since = run(server.redis, join("me"))
    server.redis.set(keys.lease("dead"), '{"worker": "w","listens":true}')
    assert seen(server, "dead", since=since) == {"dead": Liveness.LIVES}
    assert seen(server, "dead") == {"dead": Liveness.SILENT}


def test_each_join_is_above_those_before_and_nobody_joins_unheard(server: Server) -> None:
    first, second = (run(server.redis, join(inc)) for inc in ("me", "well"))
    assert second == first + 1
    assert run(server.redis, join("dead")) == 0
    assert int(server.redis.get(keys.JOINS)) == second
    found = observe(server.redis, "me", ["well"])
    assert found is not None
    assert (found.joins, found.others) == (second, {"well": Liveness.LIVES})


def test_a_count_that_was_lost_alone_goes_on_above_what_leases_say(server: Server) -> None:
    before = [run(server.redis, join("me")) for _ in range(3)]
    renew(server, "well")
    server.redis.delete(keys.JOINS)
    while server.now() < before[-1]:  # three joins in a millisecond
        pass
    since = run(server.redis, join("me"))
    server.hear("well", False)
    assert seen(server, "well", since=since) == {"well": Liveness.LIVES}


def test_a_user_who_may_not_ask_is_never_heard(server: Server) -> None:
    server.redis.execute_command("ACL", "SETUSER", "mute", "on", "nopass", "~*", "&*", "+@all", "-pubsub")
    settings = server.redis.connection_pool.connection_kwargs | {"username": "mute", "password": ""}
    with Redis(connection_pool=ConnectionPool(**settings)) as mute:
        assert run(mute, look("me", ["dead"])) == [0]
        assert run(mute, join("me")) == 0
        assert observe(mute, "me", ["dead"]) is None
        run(mute, protocol.lease("well", POOL, '{"worker": "w"}', 60_000, take=False))
    assert server.redis.get(keys.lease("well")) == b'{"worker": "w"}'
