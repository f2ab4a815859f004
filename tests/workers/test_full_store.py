"""A store that is full: worse tiers stop first, nothing that was accepted is lost, and streams go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from producers import Client, SubmitFailed
from producers.contract import keys
from tests.processes import Worker
from tests.waiting import PATIENCE_S
from tests.workers.rig import TIMES, Rig
from tests.workers.rig import rig as own_rig

pytestmark = pytest.mark.slow


def fill(rig: Rig, share: float) -> None:
    """So much of the server's memory is in use, as all see from now on."""
    used = int(rig.redis.info("memory")["used_memory"])
    rig.redis.config_set("maxmemory", int(used / share))
    rig.redis.delete(keys.WAITING_MEMORY)  # the last look counts for a while


def half_made(rig: Rig, go: Path, **fields: Any) -> dict[str, str]:
    """Tier -> a task of it that a worker has begun; it goes on once the file `go` is there."""
    rig.worker(STUB_STEP_S=0.01, STUB_HOLD_AT=40, STUB_GO=go)
    with Client(rig.url) as client:
        ids = {
            tier: client.submit(model="stub", prompt=[1], seed=rank, max_tokens=150, tier=tier, **fields).id
            for tier, (rank, _) in keys.TIERS.items()
        }
    rig.until(lambda: all(rig.tokens(task_id) == 40 for task_id in ids.values()))
    return ids


@pytest.mark.parametrize(
    ("share", "going"), [(1.03, {"priority", "default", "flex"}), (1.05, {"priority", "default"}), (1.08, {"priority"})]
)
def test_tokens_of_better_tiers_are_the_last_to_stop_and_all_end_once_there_is_room(
    rig: Rig, tmp_path: Path, share: float, going: set[str]
) -> None:
    ids = half_made(rig, tmp_path / "go")
    ballast(rig)
    fill(rig, share)
    (tmp_path / "go").touch()
    rig.until_settled([ids[tier] for tier in going])
    assert {tier for tier, task_id in ids.items() if rig.tokens(task_id) == 40} == ids.keys() - going
    rig.redis.config_set("maxmemory", 0)
    rig.check(list(ids.values()))
    assert "Prompts and tokens wait in this worker: the store is full" in rig.logs()


def ballast(rig: Rig, count: int = 1) -> None:
    """Others' data, beside which a test's own is little. Each call is one that a busy server answers in time."""
    for number in range(count):
        rig.redis.setrange(f"ballast {number}", 60_000_000, "x")


@contextmanager
def held_still(worker: Worker) -> Iterator[None]:
    """It does nothing meanwhile."""
    worker.suspend()
    yield
    worker.resume()


def test_a_prompt_waits_for_room_before_its_tokens(rig: Rig) -> None:
    worker = rig.worker(times={**TIMES, "workers.flow.intake:STARTED": [9, 9, 9, 9]})
    ballast(rig)
    with held_still(worker):
        ids = {tier: rig.submit(1, prompt_logprobs=1, tier=tier)[0] for tier in ("default", "flex")}
        fill(rig, 1.05)
    rig.until_settled([ids["default"]])
    rig.until(lambda: "Prompts and tokens wait in this worker: the store is full" in rig.logs())
    assert not rig.tokens(ids["flex"])
    rig.redis.config_set("maxmemory", 0)
    rig.until_settled([ids["flex"]])
    whole, waited = ([entry for entry in rig.entries(task_id) if "end" not in entry] for task_id in ids.values())
    assert waited == whole, "the prompt's entries come first, and nothing comes twice"
    assert "prompt" in waited[0]


def test_no_more_tasks_are_started_in_a_full_store_worse_tiers_first(rig: Rig) -> None:
    rig.publish_card()
    ballast(rig, 5)
    ids = {tier: rig.submit(1, tier=tier)[0] for tier in keys.TIERS}
    fill(rig, 1.02)
    rig.worker()
    rig.until_settled([ids["priority"], ids["default"]])
    rig.until(lambda: "which is too much for flex, batch" in rig.logs())
    assert {rig.status(ids["flex"]), rig.status(ids["batch"])} == {"queued"}
    rig.redis.config_set("maxmemory", 0)
    rig.check(list(ids.values()))
    rig.check_nothing_left()


def test_a_worker_that_starts_in_a_full_store_goes_on_with_what_waits(rig: Rig) -> None:
    """And the one before it had died there, with a task half made."""
    first = rig.worker(STUB_STEP_S=0.01, STUB_HOLD_AT=5, STUB_GO="/nowhere")
    ids = rig.submit(3, max_tokens=20)
    rig.until(lambda: all(rig.tokens(task_id) == 5 for task_id in ids))
    ballast(rig)
    fill(rig, 1.01)
    rig.kill(first)
    rig.worker(STUB_STEP_S=0.01)
    rig.check(ids)
    assert rig.redis.info("memory")["used_memory"] > int(rig.redis.config_get("maxmemory")["maxmemory"])


@pytest.fixture
def small() -> Iterator[Rig]:
    """A store of 20 MB."""
    with own_rig(maxmemory="20mb", **{"maxmemory-policy": "noeviction"}) as made:
        yield made


def flood(rig: Rig, tier: str, accepted: list[str], refused: list[SubmitFailed], stop: threading.Event) -> None:
    """Batch work with long prompts, from one sender, until it has been refused a hundred times."""
    with Client(rig.url, patience=0.3) as client:
        while len(refused) < 100 and not stop.is_set():
            try:
                accepted.append(client.submit(model="stub", prompt=[999] * 3000, tier=tier, max_tokens=16).id)
            except SubmitFailed as error:
                refused.append(error)


def test_a_flood_of_batch_work_keeps_no_stream_from_going_on(small: Rig) -> None:
    """Default-tier tasks are taken while batch work is refused, and end before it; all that was accepted ends."""
    small.worker(STUB_STEP_S=0.005, STUB_SEQS=4)
    accepted: list[str] = []
    refused: list[SubmitFailed] = []
    stop = threading.Event()
    sender = threading.Thread(target=flood, args=(small, "batch", accepted, refused, stop))
    sender.start()
    try:
        small.until(lambda: refused)
        before = list(accepted)
        streams = small.submit(20, max_tokens=100)
        small.until_settled(streams)
        assert not small.settled(before), "batch work that was there before them still waits"
        sender.join(PATIENCE_S)
    finally:
        stop.set()
        sender.join()
    assert {error.code for error in refused} == {"storage_full"}
    assert all("the tier batch" in str(error) for error in refused), "the script refuses, not the server at its bound"
    small.check(streams)
    small.until_settled(accepted)
    assert {small.status(task_id) for task_id in accepted} == {"completed"}
    assert len(accepted) > 100
    assert small.redis.info("memory")["used_memory"] < 20_000_000
    small.check_nothing_left()


def celery_flood(app: Celery, sent: list[AsyncResult]) -> None:
    """Send until the server refuses it."""
    while True:
        kwargs = {"model": "stub", "prompt": [999] * 3000, "seed": len(sent), "max_tokens": 16, "tier": "batch"}
        sent.append(app.send_task("penstock.generate", kwargs=kwargs, priority=9))


def test_a_flood_by_plain_celery_senders_stops_no_stream_and_loses_nothing(small: Rig, tmp_path: Path) -> None:
    """They are refused by the server alone, once it is full. What runs goes on, and what they sent waits for room."""
    small.redis.config_set("maxmemory", "12mb")
    ids = half_made(small, tmp_path / "go")
    app = small.sender(broker_transport_options={"max_retries": 0}, task_publish_retry=False)
    sent: list[AsyncResult] = []
    with pytest.raises(OperationalError, match="maxmemory"):
        celery_flood(app, sent)
    (tmp_path / "go").touch()
    small.check([ids["priority"], ids["default"]])  # how far beyond the bound it is by now differs
    with Client(small.url, patience=0.3) as client, pytest.raises(SubmitFailed) as refused:
        client.submit(model="stub", prompt=[1])
    assert refused.value.code == "storage_full"
    small.redis.config_set("maxmemory", "400mb")
    small.check(list(ids.values()))
    assert [result.get(timeout=PATIENCE_S)["status"] for result in sent] == ["completed"] * len(sent)
    small.check_nothing_left()
    app.close()
