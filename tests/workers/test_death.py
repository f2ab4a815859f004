"""kill -9: others go on from the next token, and what kills its workers is given up, alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from producers import Client
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.exhaustive import few
from tests.processes import Worker
from tests.stub_engine import DEADLY, STALLED
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig

ORDINARY = "tests.workers.plugins:ordinary_tasks"
FRAGILE = "tests.workers.plugins:dies_before_claim"


def test_another_worker_goes_on_where_the_stream_ends(rig: Rig) -> None:
    first = rig.worker(STUB_HOLD_AT=20)
    ids = rig.begun(6, more_than=5, max_tokens=60, n=2)
    rig.kill(first)
    made = [rig.tokens(task_id) for task_id in ids]
    assert max(made) < 120
    rig.worker()
    rig.check(ids)
    assert {(rig.record(task_id)["deaths"], rig.record(task_id)["claims"]) for task_id in ids} == {("1", "2")}
    rig.until(lambda: rig.redis.keys(broker_keys.inflight("*")) == [])
    rig.check_nothing_left()
    assert rig.redis.hgetall(broker_keys.REAPED) == {}
    assert rig.redis.hlen(broker_keys.INCARNATIONS) == 1


def test_a_beam_search_begins_anew(rig: Rig) -> None:
    """Nothing of it was published, so nothing binds the next worker, which counts the death of the one before."""
    first = rig.worker(STUB_HOLD_AT=20)
    (task_id,) = rig.fill(1, max_tokens=60, beam_width=2, n=2)
    rig.until(lambda: rig.status(task_id) == "in_progress")
    assert rig.tokens(task_id) == 0
    rig.kill(first)
    rig.worker()
    (other,) = rig.fill(1, max_tokens=60, beam_width=2, n=2)
    rig.until_settled([task_id, other])
    assert rig.entries(task_id)[:-1] == rig.entries(other)[:-1]
    assert {*map(len, ([e for e in rig.entries(task_id)[:-1] if e[0] == c] for c in (0, 1)))} == {60}
    assert [rig.record(each)["deaths"] for each in (task_id, other)] == ["1", "0"]
    rig.check_nothing_left()


def test_a_text_is_counted_though_its_worker_dies_before_the_first_token(rig: Rig) -> None:
    worker = rig.worker(STUB_HANG_AFTER=0)
    (task_id,) = rig.fill(1, prompt="three words long")
    rig.until(lambda: "prompt_tokens" in rig.record(task_id))
    assert rig.tokens(task_id) == 0
    rig.kill(worker)
    assert rig.cancel(task_id) == [1, "cancelled"]
    record = rig.record(task_id)
    assert json.loads(record["usage"])["prompt_tokens"] == int(record["prompt_tokens"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("pause", "deaths"), few([(0.0, 4), (0.003, 4), (0.003, 2)], (0.003, 2)))
def test_killed_again_and_again_no_token_is_lost_or_doubled(rig: Rig, pause: float, deaths: int) -> None:
    """No task is given up, or made to wait and run alone: each got on under each of its workers."""
    ids = rig.fill(40, max_tokens=60)
    for at in (8, 20, 32, 44)[-deaths:]:
        worker = rig.worker(STUB_STEP_S=pause, max_deaths=4)
        rig.until(lambda at=at: sum(rig.tokens(task_id) for task_id in ids) > at * 40)
        rig.kill(worker)
    rig.worker(max_deaths=4)
    rig.check(ids)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", few(["", "tests.workers.plugins:claims_one_by_one"], ""))
def test_a_task_that_kills_its_workers_is_given_up_and_its_neighbours_are_not(rig: Rig, plugins: str) -> None:
    (killer,) = rig.fill(1, prompt=[DEADLY])
    innocent = rig.fill(6, max_tokens=30)
    workers = 0
    while not rig.settled([killer]):
        workers += 1
        assert workers <= 6, rig.logs()
        worker = rig.begin_worker(STUB_STEP_S=0.01, WORKER_PLUGINS=plugins if workers == 3 else "")
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.settled([killer, *innocent]))
        if worker.process.poll() is not None:
            rig.lapse(worker)
    rig.check([killer], "failed")
    rig.check(innocent)
    assert workers == 4, "three that it killed, and the one that gave it up"
    assert "dead_lettered" in rig.record(killer)["error"]
    assert rig.record(killer)["deaths"] == "3"
    (letter,) = rig.dead()
    assert killer in letter["message"]
    late = rig.fill(3)  # the suspect had its turn alone: now there is room again
    rig.check(late)
    rig.until(lambda: rig.redis.keys(broker_keys.inflight("*")) == [])
    rig.check_nothing_left()
    assert rig.redis.hgetall(broker_keys.REAPED) == {}


def test_tasks_that_got_on_are_no_suspects(rig: Rig) -> None:
    """A message that came back so often would be handed out alone: one after the other, each to its end."""
    first = rig.worker(STUB_HOLD_AT=20)
    ids = rig.begun(6, more_than=5, max_tokens=60)
    rig.kill(first)
    second = rig.worker(STUB_HOLD_AT=40, max_redeliveries=2)
    rig.until(lambda: all(rig.tokens(task_id) > 20 for task_id in ids))
    rig.until(lambda: rig.redis.hgetall(broker_keys.REAPED) == {})
    rig.kill(second)
    rig.worker(max_redeliveries=2)
    rig.check(ids)
    assert {rig.record(task_id)["claims"] for task_id in ids} == {"3"}
    rig.until(lambda: rig.store.hget(keys.metrics("stub"), "model_lost_us recomputation n"))


def test_a_suspect_that_is_innocent_runs_alone_and_ends_well(rig: Rig) -> None:
    """Afterwards the worker fetches again."""
    ids = rig.fill(4, max_tokens=60)
    for _ in range(2):
        worker = rig.worker(STUB_STEP_S=0.01, STUB_STALLED=1)
        rig.until(lambda worker=worker: all(rig.record(task_id).get("owner") in worker.incarnations for task_id in ids))
        rig.kill(worker)
    rig.worker(STUB_STEP_S=0.002)
    rig.until(lambda: all(rig.record(task_id)["deaths"] == "2" for task_id in ids))
    late = rig.fill(5)
    rig.check([*ids, *late])
    begun = min(int(rig.record(task_id)["started"]) for task_id in late)
    assert begun >= max(int(rig.record(task_id)["finished"]) for task_id in ids), "not while a suspect ran"


def waits(rig: Rig, ids: list[str]) -> bool:
    """None of them is claimed: put down again, or not even taken up since another one has its turn."""
    return all(rig.status(i) == "queued" and "claim" not in rig.record(i) for i in ids)


def test_suspects_that_wait_do_not_die_with_the_one_that_runs(rig: Rig) -> None:
    (guilty,) = rig.fill(1, prompt=[STALLED])
    ids = rig.fill(4)
    for task_id in (guilty, *ids):
        rig.store.hset(keys.task(task_id), "stuck", 2)
    first = rig.worker()
    # A suspect is claimed, put down, and claimed again when its turn comes.
    rig.until(lambda: rig.leases()[0]["running"] == 1 and waits(rig, ids))
    rig.kill(first)
    rig.worker()
    rig.check([guilty], "failed")
    rig.check(ids)
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"0"}


def test_a_waiting_suspect_can_be_cancelled_revoked_and_handed_back(rig: Rig) -> None:
    app = rig.sender()
    (running,) = rig.fill(1, prompt=[STALLED])
    cancelled, revoked, kept = ids = rig.fill(3)
    for task_id in ids:
        rig.store.hset(keys.task(task_id), "stuck", 2)
    worker = rig.worker(STUB_STEP_S=0.01, drain=0.0)
    rig.until(lambda: rig.status(running) == "in_progress" and waits(rig, ids))
    assert rig.cancel(cancelled) == [1, "cancelled"]
    app.control.revoke(revoked, terminate=True)
    assert rig.cancel(running)[0] == 1
    rig.check([cancelled, revoked, running], "cancelled")
    rig.check([kept])
    assert worker.stop() == 0
    rig.check_nothing_left()


@pytest.mark.slow
def test_a_message_that_kills_before_its_claim_is_condemned(rig: Rig) -> None:
    rig.publish_card()
    with Client(rig.url) as client:
        deadly = client.submit(model="stub", prompt=[1, 2], max_tokens=4, seed=0, task_id="deadly-1").id
    ids = rig.fill(2)
    dead = 0
    while not rig.settled([deadly, *ids]):
        worker = rig.begin_worker(WORKER_PLUGINS=FRAGILE, max_redeliveries=2)
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.settled([deadly, *ids]))
        if worker.process.poll() is not None:
            dead += 1
            rig.lapse(worker)
        assert dead <= 3, rig.logs()
    rig.check([deadly], "failed")
    rig.check(ids)
    assert dead == 2
    assert "dead_lettered" in rig.record(deadly)["error"]
    assert "claims" not in rig.record(deadly)
    (letter,) = rig.dead()
    assert deadly in letter["message"]
    assert rig.redis.hgetall(broker_keys.REAPED) == {}


def test_a_plain_message_that_kills_before_its_claim_is_condemned(rig: Rig) -> None:
    result = rig.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1]}, task_id="deadly-2")
    _until_condemned(rig, result.id, max_redeliveries=2)
    rig.check([result.id], "failed")
    assert result.state == "FAILURE"
    with pytest.raises(Exception, match="Given up"):
        result.get(timeout=PATIENCE_S)


def test_a_condemned_message_of_a_completed_task_is_only_settled(rig: Rig) -> None:
    """Whatever killed those who held it: one of them had completed it, and its sender must hear that."""
    sent = rig.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 3}, task_id="done-before")
    queue = keys.model_queue("stub")
    (message,) = rig.redis.lrange(queue, 0, -1)
    first = rig.worker()
    assert sent.get(timeout=PATIENCE_S)["status"] == "completed"
    rig.until_settled([sent.id])
    assert first.stop() == 0
    rig.redis.hdel(keys.task(sent.id), "settled")
    rig.redis.delete(f"celery-task-meta-{sent.id}")
    rig.redis.hset(broker_keys.REAPED, sent.id, 2)
    rig.redis.rpush(queue, message)
    rig.worker(max_redeliveries=2)
    rig.until_settled([sent.id])
    assert rig.sender().AsyncResult(sent.id).get(timeout=PATIENCE_S)["status"] == "completed"
    rig.check_nothing_left()


def test_a_condemned_message_of_a_task_cancelled_before_its_claim_is_a_revoked_one(rig: Rig) -> None:
    """It is not decoded, and nobody gave it up: who waits at Celery's backend hears what its client asked for."""
    rig.publish_card()
    (cancelled,) = rig.submit(1)
    assert rig.cancel(cancelled) == [1, "cancelled"]
    rig.redis.hset(broker_keys.REAPED, cancelled, 2)
    rig.worker(max_redeliveries=2)
    rig.check([cancelled], "cancelled")
    assert "claims" not in rig.record(cancelled)
    result = rig.sender().AsyncResult(cancelled)
    rig.until(result.ready)
    assert result.state == "REVOKED"
    rig.check_nothing_left()
    assert rig.dead() == []


@pytest.mark.slow
def test_an_ordinary_task_that_kills_its_workers_is_dead_lettered(rig: Rig) -> None:
    rig.sender().send_task("app.deadly")
    dead = 0
    while not rig.redis.llen(broker_keys.DEAD):
        worker = rig.begin_worker(WORKER_PLUGINS=ORDINARY, max_redeliveries=2)
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.redis.llen(broker_keys.DEAD))
        if worker.process.poll() is not None:
            dead += 1
            rig.lapse(worker)
        assert dead <= 2, rig.logs()
    assert dead == 2
    assert "app.deadly" in rig.dead()[0]["message"]
    rig.until(lambda: rig.redis.keys(broker_keys.inflight("*")) == [])
    rig.check_nothing_left()


def test_an_ordinary_task_survives_its_worker(rig: Rig, tmp_path: Path) -> None:
    app = rig.sender()
    first = rig.worker(WORKER_PLUGINS=ORDINARY)
    go = tmp_path / "go"
    result = app.send_task("app.note", ("survivor",), {"go": str(go)})
    rig.until(lambda: rig.redis.llen("seen:survivor") == 1)
    rig.kill(first)
    go.touch()
    rig.worker(WORKER_PLUGINS=ORDINARY)
    assert result.get(timeout=PATIENCE_S) is None
    assert rig.redis.lrange("seen:survivor", 0, -1) == ["begun", "begun", "done"]


def _until_condemned(rig: Rig, task_id: str, **fields: int) -> None:
    for _ in range(5):
        worker: Worker = rig.begin_worker(WORKER_PLUGINS=FRAGILE, **fields)
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.settled([task_id]))
        if rig.settled([task_id]):
            return
        rig.lapse(worker)
    raise AssertionError(rig.logs())
