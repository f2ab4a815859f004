"""LEASE on the store, where CLAIM asks for it: what lapsed is not brought back by who did not notice."""

from __future__ import annotations

from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol

POOL = keys.pool_queue("m", "1", "x")


def test_a_lease_is_renewed_only_while_it_stands(valkey: Redis) -> None:
    assert run(valkey, protocol.lease("w.1", POOL, "a", 60_000, take=False)) == 0
    assert run(valkey, protocol.lease("w.1", POOL, "a", 60_000, take=True)) == 1
    assert run(valkey, protocol.lease("w.1", POOL, "b", 90_000, take=False)) == 1
    assert valkey.get(keys.lease("w.1")) == b"b"
    assert 60_000 < valkey.pttl(keys.lease("w.1")) <= 90_000
    valkey.delete(keys.lease("w.1"))
    assert run(valkey, protocol.lease("w.1", POOL, "b", 60_000, take=False)) == 0
    assert not valkey.exists(keys.lease("w.1"))


def test_a_pools_workers_are_those_that_live_and_do_not_drain(valkey: Redis) -> None:
    """Whoever died is forgotten when the next one begins, and all of them once nobody renews."""
    for inc in ("w.1", "w.2", "w.3"):
        run(valkey, protocol.lease(inc, POOL, "a", 60_000, take=True))
    run(valkey, protocol.lease("w.1", POOL, "a", 90_000, take=False, serves=False))
    run(valkey, protocol.lease("w.2", POOL, "a", 5_000, take=False))
    assert valkey.smembers(keys.workers(POOL)) == {b"w.2", b"w.3"}
    assert 60_000 < valkey.pttl(keys.workers(POOL)) <= 90_000
    valkey.delete(keys.lease("w.2"))
    run(valkey, protocol.lease("w.4", POOL, "a", 60_000, take=True))
    assert valkey.smembers(keys.workers(POOL)) == {b"w.3", b"w.4"}
