"""Queues whose pool has no worker left: of the same model version they are taken over, of another they are told of."""

from __future__ import annotations

import json

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.processes import fill
from tests.workers.rig import Rig


def _pool(rig: Rig, version: str, fingerprint: str) -> str:
    queue = keys.pool_queue("stub", version, fingerprint)
    about = {"model": "stub", "version": version, "fingerprint": fingerprint}
    rig.store.hset(keys.POOLS, queue, json.dumps(about))
    return queue


def test_only_tasks_of_the_same_version_go_to_another_engine(rig: Rig) -> None:
    adopted = fill(rig.redis, _pool(rig, "v1", "older-torch"), 3)
    stranded = fill(rig.redis, other := _pool(rig, "v0", "stub"), 2)
    worker = rig.worker()
    rig.until_settled(adopted)
    rig.check(adopted)
    rig.until(lambda: "2 tasks wait for version v0 of model stub" in worker.log.read_text())
    assert {rig.status(task_id) for task_id in stranded} == {"queued"}
    assert rig.redis.llen(broker_keys.tier_list(other, "default")) == 2
    assert [rig.cancel(task_id) for task_id in stranded] == [[1, "cancelled"]] * 2
    assert worker.log.read_text().count("tasks wait for version") == 1
