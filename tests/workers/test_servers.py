"""What befalls a server under load: all tasks end whole, each once, no death is counted, and the worker lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from producers import Client, SubmitFailed
from producers.contract import keys
from tests.chaos.servers import Server
from tests.processes import TESTS, Worker
from tests.workers.rig import Rig

pytestmark = pytest.mark.slow


class Load:
    """A worker, and eight tasks that are half made: they go on when `go` is called, at the latest when all ends."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.go = (folder / "go").touch
        self.worker: Worker = rig.worker(STUB_STEP_S=0.01, STUB_HOLD_AT=40, STUB_GO=folder / "go")
        self.client = Client(rig.url, patience=0.3)
        self.ids = [self.client.submit(model="stub", prompt=[1], seed=k, max_tokens=150).id for k in range(8)]
        rig.until(lambda: self.made == 8 * 40)

    @property
    def made(self) -> int:
        return sum(self.rig.tokens(task_id) for task_id in self.ids)

    def refused(self) -> SubmitFailed:
        """What a submit is told."""
        with pytest.raises(SubmitFailed) as refused:
            self.client.submit(model="stub", prompt=[1])
        return refused.value

    def ends_well(self, claims: int = 1) -> None:
        """And more that is submitted then; the worker stops with 0."""
        rig = self.rig
        self.go()
        with Client(rig.url) as patient:
            late = patient.submit(model="stub", prompt=[1], seed=9, max_tokens=5).id
        rig.check([*self.ids, late])
        assert {rig.record(task_id)["deaths"] for task_id in self.ids} == {"0"}
        assert {int(rig.record(task_id)["claims"]) for task_id in self.ids} <= set(range(1, claims + 1))
        assert self.worker.stop() == 0
        rig.check_nothing_left()
        self.client.close()


def test_memory_that_is_full_for_longer_than_a_lease(rig: Rig, tmp_path: Path) -> None:
    load = Load(rig, tmp_path)
    rig.redis.config_set("maxmemory", "1")
    rig.redis.delete(keys.WAITING_MEMORY)  # the last look counts for a second
    load.go()
    assert load.refused().code == "storage_full"
    (lease,) = rig.redis.keys(keys.lease("*"))
    for _ in range(3):
        rig.redis.pexpire(lease, 60_000)
        rig.until(lambda: rig.redis.pttl(lease) > 200_000)  # renewed all the same
    assert load.made == 8 * 40
    rig.redis.config_set("maxmemory", "0")
    rig.redis.delete(keys.WAITING_MEMORY)
    load.ends_well()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[tuple[Rig, Server]]:
    """On a server whose file has all that it acknowledged."""
    server = Server("server", tmp_path / "server", None)
    rig = Rig(server.url, Redis.from_url(server.url, decode_responses=True, client_name=TESTS))
    yield rig, server
    rig.close()
    server.stop()


def test_a_file_that_cannot_be_written_and_is_healed(durable: tuple[Rig, Server], tmp_path: Path) -> None:
    rig, server = durable
    load = Load(rig, tmp_path)
    server.fill_disk()
    rig.until(lambda: _misconf(rig))
    load.go()
    assert load.refused().code == "storage_full"
    server.free_disk()
    load.ends_well()


def _misconf(rig: Rig) -> bool:
    try:
        rig.redis.set("probe", 1)
    except RedisError as error:
        return "MISCONF" in str(error) or "AOF" in str(error)
    return False


def test_a_server_that_is_killed_and_started_again(durable: tuple[Rig, Server], tmp_path: Path) -> None:
    rig, server = durable
    load = Load(rig, tmp_path)
    for _ in range(2):
        server.kill()
        load.go()
        server.start()
        rig.until(lambda: load.made > 8 * 40)
    load.ends_well()


def test_no_connection_is_left_and_then_there_is(rig: Rig, tmp_path: Path) -> None:
    load = Load(rig, tmp_path)
    others = [Redis.from_url(rig.url, client_name=TESTS) for _ in range(3)]
    assert all(other.ping() for other in others)
    rig.redis.config_set("maxclients", len(others) + 1)
    for client in rig.redis.client_list():
        if client["name"] != TESTS:
            rig.redis.client_kill_filter(_id=client["id"])
    load.go()
    assert "max number of clients reached" in str(load.refused())
    rig.until(lambda: "max number of clients reached" in rig.logs())
    rig.redis.config_set("maxclients", 1000)
    load.ends_well()
    for other in others:
        other.close()


def test_a_server_that_forgets_its_scripts(rig: Rig, tmp_path: Path) -> None:
    load = Load(rig, tmp_path)
    load.go()
    for _ in range(5):
        rig.redis.script_flush()
        time.sleep(0.1)
    load.ends_well()


def test_a_server_that_is_busy_with_a_script_of_somebody_else(rig: Rig, tmp_path: Path) -> None:
    load = Load(rig, tmp_path)
    rig.redis.config_set("busy-reply-threshold", "100")
    load.go()
    with Redis.from_url(rig.url, client_name=TESTS) as other:
        busy = threading.Thread(target=_for_ever, args=(other,))
        busy.start()
        rig.until(lambda: _busy(rig))
        time.sleep(1)
        rig.redis.script_kill()
        busy.join()
        rig.until(lambda: _patient(rig))
    load.ends_well()


def _for_ever(server: Redis) -> None:
    """A script, until it is killed."""
    with pytest.raises(RedisError, match="killed"):
        server.eval("while true do end", 0)


def _patient(rig: Rig) -> bool:
    """Our own scripts may take long on a machine that is busy. One that does just now is to end first."""
    try:
        rig.redis.config_set("busy-reply-threshold", "5000")
    except RedisError as error:
        if "BUSY" not in str(error):
            raise
        return False
    return True


def _busy(rig: Rig) -> bool:
    try:
        rig.redis.exists("any")
    except RedisError as error:
        return "BUSY" in str(error)
    return False


def test_after_a_flush_of_everything_the_worker_serves_as_if_it_were_new(rig: Rig, tmp_path: Path) -> None:
    """What was queued and made is gone, as was asked for."""
    load = Load(rig, tmp_path)
    rig.redis.flushall()
    rig.until(lambda: rig.redis.hexists(keys.MODELS, "stub") and rig.leases())
    ids = [load.client.submit(model="stub", prompt=[1], seed=k, max_tokens=5).id for k in range(4)]
    rig.check(ids)
    assert load.worker.stop() == 0
    assert "announcing it again" in load.worker.log.read_text()
    rig.check_nothing_left()
    load.client.close()
