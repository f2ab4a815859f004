"""A worker's measurements stand in its lease, and stay with the version when it is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.contract import keys
from producers.contract.profile import Profile
from tests.workers.rig import TIMES, Rig

FIELD = "stub@v1"
#: Whatever somebody has left where profiles are kept.
FOREIGN = ["no JSON", '{"knee": NaN, "tokens_per_s": -1, "cold_start": [1]}', "[]"]


def kept(rig: Rig) -> Profile:
    return Profile.from_json(rig.store.hget(keys.PROFILES, FIELD))


def test_a_worker_tells_what_it_measured_and_leaves_it_behind(rig: Rig) -> None:
    worker = rig.worker(times=TIMES | {"workers.leases.housekeeper:KEEP_S": 0.5}, STUB_STEP_S=0.001)

    def knows() -> bool:
        """Steps of one load may take too irregular a time, where others have the processors."""
        rig.until_settled(rig.fill(60, max_tokens=40))
        return rig.leases()[0]["profile"].get("knee") is not None

    rig.until(knows)
    said = rig.leases()[0]["profile"]
    assert 1 <= said["knee"] <= 64
    assert said["tokens_per_s"] > 0
    assert 40 <= said["tokens_per_task"] <= 60
    assert said["ttft_p95"] > 0
    assert 0 <= said["duty"] <= 1
    assert said["kv_capacity"] == 1 << 20
    assert said["cold_start"].keys() >= {"weights", "warm_up", "connect", "total", "first_token"}
    assert worker.stop() == 0
    left = kept(rig)
    assert left.knee
    assert left.cold_start["total"] == pytest.approx(said["cold_start"]["total"])
    assert (left.ttft_p95, left.duty) == (None, None)
    assert rig.worker().stop() == 0
    assert kept(rig).knee == left.knee, "a worker without load knows no better"


def test_what_workers_measured_stays_when_they_are_gone(rig: Rig) -> None:
    """Two workers, one after the other, add to the same counters; a killed one loses a second at most."""

    def field(name: str) -> int:
        return int(rig.store.hget(keys.metrics("stub"), name) or 0)

    assert rig.leases() == []
    worker = rig.worker(STUB_STEP_S=0.001)
    rig.until_settled(rig.fill(20, max_tokens=10))
    rig.until(lambda: field("model_generated_tokens all n") == 200)
    worker.process.kill()
    gaps = sum(int(n) for name, n in _fields(rig) if name.startswith("inter_token") and not name.endswith("sum"))
    assert 0 < gaps <= 180, "a publisher that is behind takes some steps together"
    assert 0 < field("step_sequences all sum") <= 64 * 200
    assert field("model_starts process n") == 1
    assert field("model_start_us connect n") > 0
    second = rig.worker(STUB_STEP_S=0.001)
    rig.until_settled(rig.fill(5, max_tokens=10))
    assert second.stop() == 0
    assert field("model_starts process n") == 2
    assert field("model_generated_tokens all n") == 250, "what came since the last second is sent at the end"


def _fields(rig: Rig) -> list[tuple[str, int]]:
    return [(name, int(n)) for name, n in rig.store.hgetall(keys.metrics("stub")).items()]


@pytest.mark.parametrize("value", FOREIGN)
def test_a_foreign_value_is_replaced(rig: Rig, value: str) -> None:
    rig.store.hset(keys.PROFILES, FIELD, value)
    assert rig.worker().stop() == 0
    assert kept(rig).kv_capacity == 1 << 20


def test_a_foreign_key_is_left_and_the_worker_serves(rig: Rig) -> None:
    rig.store.set(keys.PROFILES, "somebody's")
    worker = rig.worker()
    ids = rig.fill(3)
    rig.check(ids)
    rig.until(lambda: "is not kept" in worker.log.read_text())
    assert worker.stop() == 0
    assert rig.store.get(keys.PROFILES) == "somebody's"


def test_a_worker_names_the_tasks_whose_sequences_run(rig: Rig, tmp_path: Path) -> None:
    rig.worker(STUB_SEQS=1, STUB_HOLD_AT=5, STUB_GO=tmp_path / "go")
    ids = rig.fill(2, max_tokens=20)
    rig.until(lambda: [row[0] for row in rig.leases()[0]["sequences"]] == [next(filter(rig.tokens, ids), None)])
    (tmp_path / "go").touch()
    rig.check(ids)
    rig.until(lambda: rig.leases()[0]["sequences"] == [])
