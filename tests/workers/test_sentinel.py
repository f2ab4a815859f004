"""A primary that fails over in the middle of streams: they go on, on the new one, by a URL of Sentinels alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from producers import Client
from tests.sentinels import Watched, watched
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig

pytestmark = pytest.mark.slow


class SentinelRig(Rig):
    """Whose eyes look at whichever server is the primary."""

    def __init__(self, servers: Watched) -> None:
        self.servers = servers
        super().__init__(servers.url, servers.redis)

    def look_again(self) -> None:
        self.redis = self.store = self.servers.redis


@contextmanager
def sentinel_rig(**options: Any) -> Iterator[SentinelRig]:
    with watched(password="s3cret", **options) as servers:
        made = SentinelRig(servers)
        yield made
        made.close()


@contextmanager
def streams(rig: SentinelRig, client: Client) -> Iterator[list[str]]:
    """Eight tasks whose streams are being read; at the end each reader has had each token once, and the end."""
    lengths = [60, 100, 130, 160, 250, 250, 250, 250]
    tasks = [client.submit(model="stub", prompt=[1], seed=k, max_tokens=n) for k, n in enumerate(lengths)]
    ids = [task.id for task in tasks]
    with ThreadPoolExecutor(len(tasks)) as readers:
        reading = [readers.submit(lambda task=task: list(task.stream())) for task in tasks]
        rig.until(lambda: all(rig.tokens(task_id) > 40 for task_id in ids))
        yield ids
        for length, events in zip(lengths, (future.result(PATIENCE_S) for future in reading), strict=True):
            assert [event.position for event in events] == list(range(length + 1))


def test_what_the_replica_had_goes_on_though_the_old_primary_lives() -> None:
    """Replaced by an operator, it takes what it is told for ten seconds more: of all that nothing may count."""
    with sentinel_rig() as rig:
        worker = rig.worker(STUB_STEP_S=0.01)
        with Client(rig.url) as client, streams(rig, client) as ids:
            rig.servers.fail_over()
            rig.look_again()
            rig.check(ids)
        assert worker.stop() == 0
        rig.check_nothing_left()


def test_when_the_primary_dies_its_tasks_and_new_ones_go_on() -> None:
    """`min-replicas-to-write 1`, and two of them, so that one is left."""
    with sentinel_rig(replicas=2, min_replicas_to_write=1, min_replicas_max_lag=2) as rig:
        worker = rig.worker(STUB_STEP_S=0.01)
        with Client(rig.url) as client, streams(rig, client) as ids:
            rig.servers.kill_primary()
            late = client.submit(model="stub", prompt=[1], seed=9, max_tokens=5)
            rig.look_again()
            rig.check([*ids, late.id])
        assert worker.stop() == 0
        rig.check_nothing_left()
