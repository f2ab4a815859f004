"""Which worker runs a task: any pool of its version; the pool that began it, while that lives; no other version."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.processes import fill
from tests.workers.rig import MODEL, QUEUE, Rig


def _pool(version: str, fingerprint: str) -> keys.Pool:
    return keys.Pool("stub", version, fingerprint)


def test_an_old_data_directory_is_taken_over(rig: Rig) -> None:
    """Tasks that earlier releases sent to pools: of this version they run; of another they wait, and are told of."""
    for pool in (old := _pool("v1", "older-torch"), other := _pool("v0", "stub")):
        rig.store.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    rig.store.hset(keys.ROUTES, "stub", old.queue)
    adopted = [
        task_id for tier in ("default", "batch") for task_id in fill(rig.redis, old.queue, 3, tier=tier, tenant="a")
    ]
    stranded = fill(rig.redis, other.queue, 2)
    new = rig.fill(1)
    worker = rig.worker(STUB_SEQS=1)
    rig.check([*adopted, *new])
    started = sorted(adopted, key=lambda task_id: int(rig.record(task_id)["started"]))
    assert started == adopted, "tier by tier, in their order"
    rig.until(lambda: "2 tasks wait for version v0 of model stub" in worker.log.read_text())
    assert {rig.status(task_id) for task_id in stranded} == {"queued"}
    assert rig.redis.llen(other.version_queue) == 2
    assert not rig.redis.exists(broker_keys.tier_list(other.queue, "default"), keys.ROUTES)
    assert [rig.cancel(task_id) for task_id in stranded] == [[1, "cancelled"]] * 2
    assert worker.log.read_text().count("tasks wait for version") == 1


def test_all_pools_of_a_version_take_what_nobody_has_begun(rig: Rig) -> None:
    """Each is full with one of them."""
    for fingerprint in "ab":
        rig.worker(STUB_FINGERPRINT=fingerprint, STUB_SEQS=1, STUB_HOLD_AT=5)
    ids = rig.fill(2)
    rig.until(lambda: all(rig.tokens(task_id) == 5 for task_id in ids))
    assert sorted(rig.record(task_id)["fingerprint"] for task_id in ids) == ["a", "b"]


def test_what_a_pool_has_begun_is_left_to_it_while_it_lives_and_goes_on_elsewhere_then(rig: Rig) -> None:
    held = {"STUB_SEQS": 1, "STUB_HOLD_AT": 5, "STUB_FINGERPRINT": "a"}
    full, first = rig.worker(**held), rig.fill(1)
    rig.until(lambda: rig.tokens(first[0]) == 5)
    leaves, second = rig.worker(**held), rig.fill(1)
    rig.until(lambda: rig.tokens(second[0]) == 5)
    rig.worker(STUB_FINGERPRINT="b")
    assert leaves.stop(signal.SIGQUIT) == 0
    rig.until(lambda: rig.waiting(_pool("v1", "a").queue) == 1)
    others = rig.fill(3)
    rig.until_settled(others)
    assert (rig.status(second[0]), rig.tokens(second[0])) == ("queued", 5)
    rig.kill(full)
    rig.check([*first, *second, *others])
    assert {rig.record(task_id)["fingerprint"] for task_id in (*first, *second, *others)} == {"b"}
    assert [rig.record(task_id)["deaths"] for task_id in (*first, *second)] == ["1", "0"]


def test_the_last_worker_of_a_pool_leaves_nothing_in_its_own_queue(rig: Rig) -> None:
    """Whoever starts workers looks at the version's queue alone."""
    held = {"STUB_SEQS": 1, "STUB_HOLD_AT": 5}
    last, first = rig.worker(STUB_FINGERPRINT="a", **held), rig.fill(1)
    rig.until(lambda: rig.tokens(first[0]) == 5)
    leaves, second = rig.worker(STUB_FINGERPRINT="a", **held), rig.fill(1)
    rig.until(lambda: rig.tokens(second[0]) == 5)
    other = rig.worker(STUB_FINGERPRINT="b", **held)
    assert leaves.stop(signal.SIGQUIT) == 0
    rig.until(lambda: rig.waiting(_pool("v1", "a").queue) == 1)
    rig.fill(1)
    assert last.stop(signal.SIGQUIT) == 0
    assert other.stop(signal.SIGQUIT) == 0
    assert rig.redis.llen(QUEUE) == 3
    assert not [name for name in rig.redis.keys(f"*{QUEUE}.*") if not name.startswith("_kombu.")]


def test_what_a_version_has_begun_waits_for_it(rig: Rig) -> None:
    """Of plain Celery's queue, which all versions take from. What nobody has begun is for whoever is there."""
    old = rig.worker(STUB_VERSION="v0", STUB_SEQS=1, STUB_HOLD_AT=5)
    app = rig.sender()
    ids = [app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": k, "max_tokens": 16}).id for k in range(2)]
    rig.until(lambda: rig.tokens(ids[0]) == 5)
    new = rig.worker(STUB_VERSION="v1")
    rig.until_settled(ids[1:])
    (sent,) = rig.submit(1)
    rig.until_settled([sent])
    assert [rig.record(task_id)["version"] for task_id in (ids[1], sent)] == ["v1", "v1"]
    assert old.stop(signal.SIGQUIT) == 0
    rig.until(lambda: rig.waiting(keys.version_queue("stub", "v0")) == 1)
    rig.until(lambda: "1 tasks wait for version v0 of model stub" in new.log.read_text())
    assert (rig.status(ids[0]), rig.tokens(ids[0]), rig.waiting(MODEL)) == ("queued", 5, 0)
    rig.worker(STUB_VERSION="v0")
    rig.until_settled(ids[:1])
    rig.check([*ids, sent])
    assert (rig.record(ids[0])["version"], rig.record(ids[0])["deaths"]) == ("v0", "0")
