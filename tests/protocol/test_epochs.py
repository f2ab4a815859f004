"""LEASE and LEAD on a real server against their model, across restores; and the model's own promises."""

from __future__ import annotations

import random

import pytest
from redis import Redis

from producers.client import leases
from producers.contract import keys
from producers.store import epoch, protocol
from tests.protocol.model import epochs as model
from tests.protocol.server import Mutant, Server

POOL = keys.pool_queue("m", "1", "x")
MS = 60_000


def test_nothing_of_before_the_restore_holds_a_lease_after_it_whoever_dies() -> None:
    said, states = model.check()
    assert not said
    assert states > 100


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    said, _ = model.check(model.ALL - {rule})
    assert said, model.RULES[rule]


def check_epochs(redis: Redis, mutant: Mutant | None = None) -> None:
    """Random calls of three processes in three epochs; raises AssertionError where scripts and model part."""
    server = Server(redis, mutant)
    try:
        for seed in range(20):
            _history(server, random.Random(seed))
    finally:
        server.close()


def _history(server: Server, chance: random.Random) -> None:
    redis, s = server.redis, model.Store()
    redis.delete(keys.EPOCH, keys.SWEEPER, *(keys.lease(f"w.{k}") for k in range(3)))
    for _ in range(60):
        name, own = f"w.{chance.randrange(3)}", chance.choice(["", "a", "b"])
        step = chance.random()
        if step < 0.2:
            s = s._replace(epoch=chance.choice(["a", "b"]), restoring=chance.random() < 0.4)
            redis.hset(keys.EPOCH, mapping={"id": s.epoch, "state": epoch.RESTORING if s.restoring else epoch.OPEN})
        elif step < 0.3:
            s = s._replace(leases=s.leases - {name}, leader="")
            redis.delete(keys.lease(name), keys.SWEEPER)
        elif step < 0.7:
            take = chance.random() < 0.5
            expected, s = model.lease(s, name, own, take=take)
            assert server.run(protocol.lease(name, POOL, "{}", MS, take=take, epoch=own)) == expected
        else:
            expected, s = model.lead(s, name, own)
            answer = server.run(leases.lead(name, MS, epoch=own))
            assert (1 if answer > 0 else answer) == expected
        assert {f"w.{k}" for k in range(3) if redis.exists(keys.lease(f"w.{k}"))} == s.leases
        assert (redis.get(keys.SWEEPER) or b"").decode() == s.leader


def test_the_scripts_answer_as_their_model(valkey: Redis) -> None:
    check_epochs(valkey)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("lease", "if other_epoch(ARGV[6]) then", "if false then"),
        ("lead", "ARGV[3] and other_epoch(ARGV[3])", "false"),
        *((name, "(now[1] or '') ~= own or ", "") for name in ("lease", "lead")),
        *((name, " or now[2] == 'restoring'", "") for name in ("lease", "lead")),
        *((name, "(now[1] or '') ~= own", "now[1] and now[1] ~= own") for name in ("lease", "lead")),
    ],
)
def test_a_broken_script_is_noticed(name: str, old: str, new: str, valkey: Redis) -> None:
    with pytest.raises(AssertionError):
        check_epochs(valkey, Mutant(protocol.PACKAGE, name, old, new))
