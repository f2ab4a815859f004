"""Workers are judged by what they say once there is nothing to do, not by what a lease said before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from redis import Redis

from producers.connection.connect import connect
from producers.contract import keys
from workers.trials.chaos.checker.rest import LOOKS, at_rest, held_by
from workers.trials.chaos.checker.store import Stores

IDLE, BUSY = 0, 3


class Worker:
    """Renews its lease each time that somebody pauses; says what it is told to, the last of it for ever."""

    def __init__(self, server: Redis, blocks: Iterable[int]) -> None:
        self._server, self._blocks = server, list(blocks)
        self._renewals = 0
        self.renew()

    def renew(self, _: float = 0.0) -> None:
        self._renewals += 1
        held = self._blocks.pop(0) if len(self._blocks) > 1 else self._blocks[0]
        about = {"worker": "w", "tasks": 0, "running": 0, "waiting": 0, "kv_blocks_used": held}
        self._server.set(keys.lease("w.1"), json.dumps(about), px=60_000 + 10_000 * self._renewals)

    def judged(self, looks: int = LOOKS) -> list[int]:
        return [about["kv_blocks_used"] for about in at_rest(self._server, looks=looks, pause=self.renew)]


def test_a_lease_that_was_renewed_under_load_is_not_judged(valkey_url: str) -> None:
    """Nor the next one, which may have begun before; and what is put down a moment later is waited for."""
    with connect(valkey_url, decode=True) as server:
        assert Worker(server, [BUSY, IDLE]).judged() == [0]
        assert Worker(server, [BUSY, BUSY, IDLE]).judged() == [0]
        assert Worker(server, [BUSY] * 6 + [IDLE]).judged() == [0]


def test_what_was_idle_once_and_holds_something_for_ever_is_seen(valkey_url: str) -> None:
    with connect(valkey_url, decode=True) as server:
        assert Worker(server, [IDLE, IDLE, BUSY]).judged(looks=20) == [3]
        assert Worker(server, [BUSY]).judged(looks=20) == [3]


def test_who_has_said_nothing_since_is_not_judged(valkey_url: str) -> None:
    with connect(valkey_url, decode=True) as server:
        Worker(server, [BUSY])
        assert at_rest(server, looks=5, pause=lambda _: None) == []


def test_a_worker_that_dies_is_not_waited_for(valkey_url: str) -> None:
    with connect(valkey_url, decode=True) as server:
        Worker(server, [BUSY])
        assert at_rest(server, pause=lambda _: server.delete(keys.lease("w.1"))) == []


def test_the_checker_judges_workers_at_rest(valkey_url: str) -> None:
    with connect(valkey_url, decode=True) as server:
        worker, over = Worker(server, [BUSY, BUSY, BUSY, IDLE]), threading.Event()

        def renew() -> None:
            while not over.wait(0.01):
                worker.renew()

        with ThreadPoolExecutor(1) as renewing:
            renewing.submit(renew)
            try:
                found = Stores.read(server, server, links="links")
            finally:
                over.set()
    assert [held_by(about) for about in found.workers] == [{}]
