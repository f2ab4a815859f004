"""What the waker listens to, and that it tells of every change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis

from producers.broker.redis.broker import TrackingWaker, shortest_prefixes
from tests.waiting import PATIENCE_S


@contextmanager
def waking(url: str, *queues: str) -> Iterator[tuple[TrackingWaker, threading.Event]]:
    """A waker that runs, and what it sets."""
    poked = threading.Event()
    waker = TrackingWaker(url, queues, poked.set)
    waker.start()
    try:
        yield waker, poked
    finally:
        waker.stop()
        waker.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("queues", "prefixes"),
    [
        (["a"], ["a"]),
        (["b", "a"], ["a", "b"]),
        (["q:model@v1.x", "q:model"], ["q:model"]),
        (["q:model", "q:model", "q:mode"], ["q:mode"]),
        (["q:a@1", "q:b@1", "q:a"], ["q:a", "q:b@1"]),
    ],
)
def test_prefixes_do_not_overlap(queues: list[str], prefixes: list[str]) -> None:
    assert shortest_prefixes(queues) == prefixes


def test_it_tells_of_every_change_of_a_list_and_of_no_other(valkey: Redis, valkey_url: str) -> None:
    with waking(valkey_url, "queue:x", "queue:x@1") as (waker, poked):
        assert poked.wait(PATIENCE_S), "once when it begins, for what came before"
        for change in (
            lambda: valkey.lpush("queue:x", "1"),
            lambda: valkey.rpush("queue:x@1:3", "1"),
            lambda: valkey.lpush("queue:x\x06\x169", "1"),
            lambda: valkey.rpop("queue:x"),
            lambda: valkey.delete("queue:x@1:3"),
            valkey.flushall,
        ):
            poked.clear()
            change()
            assert poked.wait(PATIENCE_S)
        poked.clear()
        valkey.lpush("other", "1")
        assert not poked.wait(0.3)
    assert not waker.is_alive()


def test_it_connects_again(valkey: Redis, valkey_url: str) -> None:
    with waking(valkey_url, "queue:x") as (_, poked):
        assert poked.wait(PATIENCE_S)
        poked.clear()
        valkey.client_kill_filter(_type="normal", skipme=True)
        assert poked.wait(PATIENCE_S), "something may have come while it was away"
        poked.clear()
        valkey.lpush("queue:x", "1")
        assert poked.wait(PATIENCE_S)


def test_where_the_server_offers_no_tracking_it_looks_often(valkey: Redis, valkey_url: str) -> None:
    valkey.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-client|tracking"])
    try:
        with waking(valkey_url.replace("redis://", "redis://limited:x@"), "queue:x") as (_, poked):
            for _ in range(3):
                assert poked.wait(PATIENCE_S)
                poked.clear()
    finally:
        valkey.acl_deluser("limited")
