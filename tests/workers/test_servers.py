"""What befalls a server under load: all tasks end whole, each once, no death is counted, and the worker lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from producers import Client, SubmitFailed, keys
from tests.chaos.servers import Server
from tests.processes import TESTS, Worker
from tests.workers.rig import Rig

pytestmark = pytest.mark.slow


class Load:
    """A worker, and eight tasks that are half made."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.worker: Worker = rig.worker(STUB_STEP_S=0.01, lease=5.0)
        self.client = Client(rig.url, patience=0.3)
        self.ids = [self.client.submit(model="stub", prompt=[1], seed=k, max_tokens=150).id for k in range(8)]
        rig.until(lambda: all(rig.tokens(task_id) > 20 for task_id in self.ids))

    def refused(self) -> SubmitFailed:
        """What a submit is told."""
        with pytest.raises(SubmitFailed) as refused:
            self.client.submit(model="stub", prompt=[1])
        return refused.value

    def ends_well(self, claims: int = 1) -> None:
        """And more that is submitted then; the worker stops with 0."""
        rig = self.rig
        late = self.client.submit(model="stub", prompt=[1], seed=9, max_tokens=5).id
        rig.until_settled([*self.ids, late])
        rig.check([*self.ids, late])
        assert {rig.record(task_id)["deaths"] for task_id in self.ids} == {"0"}
        assert {int(rig.record(task_id)["claims"]) for task_id in self.ids} <= set(range(1, claims + 1))
        assert self.worker.stop() == 0
        rig.check_nothing_left()
        self.client.close()


def test_memory_that_is_full_for_longer_than_a_lease(rig: Rig) -> None:
    load = Load(rig)
    rig.redis.config_set("maxmemory", "1")
    tokens = [rig.tokens(task_id) for task_id in load.ids]
    assert load.refused().code == "storage_full"
    renewed = time.monotonic() + 2.0
    rig.until(lambda: time.monotonic() > renewed)
    lease = rig.redis.keys(keys.lease("*"))
    assert rig.redis.pttl(lease[0]) > 3000, "renewed all the same"
    assert max(rig.tokens(task_id) - n for task_id, n in zip(load.ids, tokens, strict=True)) < 100
    rig.redis.config_set("maxmemory", "0")
    load.ends_well()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[tuple[Rig, Server]]:
    """On a server whose file has all that it acknowledged."""
    server = Server("server", tmp_path / "server", None)
    rig = Rig(server.url, Redis.from_url(server.url, decode_responses=True, client_name=TESTS))
    yield rig, server
    rig.close()
    server.stop()


def test_a_file_that_cannot_be_written_and_is_healed(durable: tuple[Rig, Server]) -> None:
    rig, server = durable
    load = Load(rig)
    server.fill_disk()
    rig.until(lambda: _misconf(rig))
    assert load.refused().code == "storage_full"
    server.free_disk()
    load.ends_well()


def _misconf(rig: Rig) -> bool:
    try:
        rig.redis.set("probe", 1)
    except RedisError as error:
        return "MISCONF" in str(error) or "AOF" in str(error)
    return False


def test_a_server_that_is_killed_and_started_again(durable: tuple[Rig, Server]) -> None:
    rig, server = durable
    load = Load(rig)
    for _ in range(2):
        server.kill()
        server.start()
        before = sum(rig.tokens(task_id) for task_id in load.ids)
        rig.until(lambda before=before: sum(rig.tokens(task_id) for task_id in load.ids) > before)
    load.ends_well()


def test_no_connection_is_left_and_then_there_is(rig: Rig) -> None:
    load = Load(rig)
    others = [Redis.from_url(rig.url, client_name=TESTS) for _ in range(3)]
    assert all(other.ping() for other in others)
    rig.redis.config_set("maxclients", len(others) + 1)
    for client in rig.redis.client_list():
        if client["name"] != TESTS:
            rig.redis.client_kill_filter(_id=client["id"])
    assert "max number of clients reached" in str(load.refused())
    rig.until(lambda: "max number of clients reached" in rig.logs())
    rig.redis.config_set("maxclients", 1000)
    load.ends_well()
    for other in others:
        other.close()


def test_a_server_that_forgets_its_scripts(rig: Rig) -> None:
    load = Load(rig)
    for _ in range(5):
        rig.redis.script_flush()
        time.sleep(0.1)
    load.ends_well()


def test_a_server_that_is_busy_with_a_script_of_somebody_else(rig: Rig) -> None:
    load = Load(rig)
    rig.redis.config_set("busy-reply-threshold", "100")
    with Redis.from_url(rig.url, client_name=TESTS) as other:
        script = "local t = os.clock() while os.clock() - t < 1 do end"
        busy = threading.Thread(target=other.eval, args=(script, 0))
        busy.start()
        rig.until(lambda: _busy(rig))
        busy.join()
        rig.redis.config_set("busy-reply-threshold", "5000")  # our own scripts may take long on a machine that is busy
    load.ends_well()


def _busy(rig: Rig) -> bool:
    try:
        rig.redis.exists("any")
    except RedisError as error:
        return "BUSY" in str(error)
    return False


def test_after_a_flush_of_everything_the_worker_serves_as_if_it_were_new(rig: Rig) -> None:
    """What was queued and made is gone, as was asked for."""
    load = Load(rig)
    rig.redis.flushall()
    rig.until(lambda: rig.redis.hexists(keys.MODELS, "stub") and rig.leases())
    ids = [load.client.submit(model="stub", prompt=[1], seed=k, max_tokens=5).id for k in range(4)]
    rig.until_settled(ids)
    rig.check(ids)
    assert load.worker.stop() == 0
    assert "announcing it again" in load.worker.log.read_text()
    rig.check_nothing_left()
    load.client.close()
