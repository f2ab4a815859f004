"""EJECT on a real server against its model, and the model's own promises."""

from __future__ import annotations

import random

import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from tests.protocol.model import breaker as model

POOL = keys.pool_queue("m", "1", "x")


def test_the_share_holds_whoever_dies() -> None:
    said, states = model.check()
    assert not said
    assert states > 3000


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    said, _ = model.check(frozenset(model.RULES) - {rule})
    assert said, model.RULES[rule]


def test_the_script_answers_as_its_model(valkey: Redis) -> None:
    """With pools of up to nine, so that up to three are held back; leases come and go."""
    for seed in range(40):
        chance = random.Random(seed)
        valkey.flushdb()
        w = model.World((model.Worker(),) * chance.randint(1, 9))
        for k, one in enumerate(w.workers):
            w = _leased(valkey, w, k, one.lease)
        for _ in range(30):
            k = chance.randrange(len(w.workers))
            if chance.random() < 0.3:
                w = _leased(valkey, w, k, chance.random() < 0.7)
            elif w.workers[k].lease:
                own, living = chance.random() < 0.2, sum(one.lease for one in w.workers)
                entered, granted = model.eject(w, k, own)
                w = w._replace(ejected=entered)
                assert run(valkey, protocol.eject(f"w.{k}", POOL, living, alone=own)) == granted
                assert valkey.smembers(keys.ejected(POOL)) == {f"w.{k}".encode() for k in entered}


def _leased(valkey: Redis, w: model.World, k: int, lease: bool) -> model.World:
    if lease:
        run(valkey, protocol.lease(f"w.{k}", POOL, "{}", 60_000, take=True))
    else:
        valkey.delete(keys.lease(f"w.{k}"))
    one = w.workers[k]._replace(lease=lease)
    return w._replace(workers=(*w.workers[:k], one, *w.workers[k + 1 :]))
