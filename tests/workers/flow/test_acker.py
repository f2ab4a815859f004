"""ACK and BACK reach the broker in the end, in order, each to its effect once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from redis import Redis

from producers.broker.connect import connect_consumer
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from tests.producers.proxy import Proxy
from tests.waiting import PATIENCE_S
from workers.flow.deliveries import Acker
from workers.state.delivery import Incarnation

QUEUE = "penstock:queue:x"


@pytest.fixture
def life(valkey: Redis) -> Incarnation:
    life = Incarnation("w")
    valkey.set(keys.lease(life.id), "{}")
    return life


@pytest.fixture
def acker(proxy: Proxy) -> Iterator[Acker]:
    acker = Acker(connect_consumer(proxy.url, [QUEUE], proxy.url), proxy.url)
    acker.start()
    yield acker
    acker.stop(60)
    acker.join(PATIENCE_S)
    assert not acker.is_alive()


def fetch(valkey: Redis, life: Incarnation, count: int) -> list[str]:
    """Messages 0, 1, ... in flight, each under its number as UUID."""
    for number in range(count):
        valkey.lpush(QUEUE, Message(f"task-{number}", QUEUE, "default", 1, 1).envelope())
    names = [str(number) for number in range(count)]
    room = broker.Credit((count,) * 4, (count,) * 4)
    call = broker.fetch(
        life.id,
        [QUEUE],
        names,
        room,
        capacity=(count, count),
        plain_tokens=1,
        ageing_ms=10**9,
        max_redeliveries=5,
        sort_limit=count,
    )
    fetched = broker.read_fetch(run(valkey, call), broker.places([QUEUE]))
    assert fetched is not None
    assert [one.uuid for one in fetched] == names
    return names


def waiting(valkey: Redis) -> list[str]:
    """Ids in the queue, the next one first."""
    return [json.loads(raw)["headers"]["id"] for raw in valkey.lrange(QUEUE, 0, -1)][::-1]


def test_acknowledged_messages_are_gone(valkey: Redis, life: Incarnation, acker: Acker) -> None:
    for name in fetch(valkey, life, 600):
        acker.ack(life, name)
    assert acker.flush(60)
    assert valkey.hlen(broker_keys.inflight(life.id)) == 0
    assert waiting(valkey) == []
    assert valkey.llen(broker_keys.DEAD) == 0


def test_given_back_they_stand_in_front_delayed_ones_elsewhere_and_with_a_reason_they_are_kept(
    valkey: Redis, life: Incarnation, acker: Acker
) -> None:
    fetch(valkey, life, 3)
    valkey.lpush(QUEUE, Message("later", QUEUE, "default", 1, 1).envelope())
    acker.back(life, "0")
    acker.back(life, "1", 60.0)
    acker.ack(life, "2", "nobody can read it")
    assert acker.flush(60)
    assert waiting(valkey) == ["task-0", "later"]
    assert valkey.zcard(broker_keys.delayed(QUEUE)) == 1
    assert valkey.hlen(broker_keys.inflight(life.id)) == 0
    (letter,) = (json.loads(raw) for raw in valkey.lrange(broker_keys.DEAD, 0, -1))
    assert (letter["reason"], letter["list"]) == ("nobody can read it", QUEUE)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_reply_is_asked_for_again(
    valkey: Redis, life: Incarnation, acker: Acker, proxy: Proxy, when: str
) -> None:
    fetch(valkey, life, 3)
    acker.ack(life, "2")  # loads the scripts
    acker.back(life, "1")
    assert acker.flush(60)
    fault = proxy.fail(b"EVALSHA", when, times=3)  # type: ignore[arg-type]
    acker.back(life, "0")
    assert acker.flush(60)
    assert fault.hits >= 1
    assert waiting(valkey) == ["task-0", "task-1"], "returned once"


def test_what_belongs_to_a_life_that_is_over_is_dropped(valkey: Redis, life: Incarnation, acker: Acker) -> None:
    fetch(valkey, life, 1)
    life.over = True
    acker.ack(life, "0")
    assert acker.flush(60)
    assert valkey.hlen(broker_keys.inflight(life.id)) == 1, "it returns by REAP"


def test_its_end_tells_when_the_broker_is_away() -> None:
    away = "redis://127.0.0.1:1/0"
    acker = Acker(connect_consumer(away, [QUEUE], away), away)
    acker.start()
    acker.ack(Incarnation("w"), "0")
    assert not acker.stop(0.5)
    acker.join(PATIENCE_S)
    assert not acker.is_alive()
