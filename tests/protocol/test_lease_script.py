"""LEASE on the store, where CLAIM asks for it: what lapsed is not brought back by who did not notice."""

from __future__ import annotations

from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol


def test_a_lease_is_renewed_only_while_it_stands(valkey: Redis) -> None:
    assert run(valkey, protocol.lease("w.1", "a", 60_000, take=False)) == 0
    assert run(valkey, protocol.lease("w.1", "a", 60_000, take=True)) == 1
    assert run(valkey, protocol.lease("w.1", "b", 90_000, take=False)) == 1
    assert valkey.get(keys.lease("w.1")) == b"b"
    assert 60_000 < valkey.pttl(keys.lease("w.1")) <= 90_000
    valkey.delete(keys.lease("w.1"))
    assert run(valkey, protocol.lease("w.1", "b", 60_000, take=False)) == 0
    assert not valkey.exists(keys.lease("w.1"))
