"""A backup of a system under load, with real workers, sweeper and webhooks; restored elsewhere, it serves all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producers import Client
from producers.contract import keys
from producers.store.epoch import LOOK_S
from tests.processes import free_port, observer, running_valkey
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.warm import Forked, printed
from tests.webhooks_process import WebhooksProcess
from tests.workers.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def rig_elsewhere() -> Iterator[Rig]:
    with running_valkey() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with observer(url) as redis:
            rig = Rig(url, redis)
            try:
                yield rig
            finally:
                rig.close()


def penstock(folder: Path, *argv: str, status: int = 0) -> str:
    found, told = printed(("-m", "workers.cli", *argv), {}, folder, 300)
    assert found == status, (argv, told)
    return told


@contextlib.contextmanager
def process(folder: Path, *argv: str) -> Iterator[Forked]:
    running = Forked(("-m", "workers.cli", *argv), {}, folder / f"{argv[0]}.log", folder)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def sweeper(folder: Path, url: str, *more: str) -> contextlib.AbstractContextManager[Forked]:
    return process(folder, "sweeper", "--broker", url, *more)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Load(threading.Thread):
    """Submits a task of one of three tenants after the other, until it is told to stop. `ids`: accepted ones, in order,
    by tenant."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.over = threading.Event()
        self.accepted: list[tuple[str, str]] = []

    def run(self) -> None:
        with Client(self._url) as client:
            seed = 0
            while not self.over.is_set():
                tenant = "abc"[seed % 3]
                task = client.submit(
                    model="stub", prompt=[1, 2, 3, 4], max_tokens=16, seed=seed, tenant=tenant, ttl=3600
                )
                self.accepted.append((task.id, tenant))
                seed += 1
                time.sleep(0.01)


def test_every_task_that_a_backup_under_load_has_ends_elsewhere(rig: Rig, tmp_path: Path) -> None:
    rig.publish_card()
    workers = [rig.worker(STUB_SEQS=4, STUB_STEP_S=0.02) for _ in range(2)]
    journal, place = str(tmp_path / "journal"), str(tmp_path / "backup")
    load = Load(rig.url)
    with sweeper(tmp_path, rig.url, "--journal", journal):
        load.start()
        rig.until(lambda: rig.redis.exists(keys.JOURNAL) and len(load.accepted) > 200)
        before = list(load.accepted)
        penstock(tmp_path, "backup", place, "--broker", rig.url)
        after = len(load.accepted)
        rig.until(lambda: len(load.accepted) > after + 50)
        with Client(rig.url) as client:
            deleted = [before[0][0], before[-1][0]]
            for task_id in deleted:
                client.get(task_id).delete()
        written = len(list(Path(journal).iterdir()))
        rig.until(lambda: len(list(Path(journal).iterdir())) > written + 1)
        load.over.set()
        load.join()
    for worker in workers:
        worker.stop(signal.SIGKILL)
    with rig_elsewhere() as new:
        argv = ("restore", place, "--journal", journal, "--broker", new.url, "--files-dir", "new-files", "--yes")
        assert "workers hold leases" in penstock(tmp_path, *argv, "--old-store", rig.url, status=2)
        for worker in workers:
            rig.lapse(worker)
        penstock(tmp_path, *argv, "--old-store", rig.url)
        new.worker(STUB_SEQS=16)
        with sweeper(tmp_path, new.url):
            stays = [(task_id, tenant) for task_id, tenant in before if task_id not in deleted]
            new.until_settled([task_id for task_id, _ in stays])
            with Client(new.url) as client:  # the sweeper may have compacted their streams by now
                for seed, (task_id, _) in enumerate(before):
                    assert task_id in deleted or client.get(task_id).result(PATIENCE_S).text == text_of(seed, 0, 16)
            # The backup has also some of those that came while it was made.
            new.until(lambda: not new.redis.hgetall(keys.WAITING))
        for tenant in "abc":
            mine = {task_id for task_id, whose in load.accepted if whose == tenant}
            assert set(new.redis.zrange(keys.tasks(tenant), 0, -1)) <= mine
            assert {task_id for task_id, whose in stays if whose == tenant} <= set(
                new.redis.zrange(keys.tasks(tenant), 0, -1)
            )
        for task_id, tenant in stays:
            assert new.record(task_id)["tenant"] == tenant
        assert not any(new.redis.exists(keys.task(task_id), keys.stream(task_id)) for task_id in deleted)
        new.check_nothing_left()


def test_processes_that_began_before_a_restore_end(rig: Rig, tmp_path: Path) -> None:
    worker, port = rig.worker(), free_port()
    with (
        sweeper(tmp_path, rig.url) as sweeping,
        WebhooksProcess(rig.url) as webhooks,
        process(tmp_path, "gateway", "--broker", rig.url, "--port", str(port)) as gateway,
    ):
        rig.until(lambda: rig.redis.exists(keys.SWEEPER) and listens(port))
        time.sleep(2 * LOOK_S)  # each has looked
        rig.redis.hset(keys.EPOCH, mapping={"id": "e2", "state": "open"})
        assert sweeping.wait(PATIENCE_S) == 2
        assert webhooks.process.wait(PATIENCE_S) == 0
        assert gateway.wait(PATIENCE_S) == 0
        assert worker.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    assert "restored from a backup" in worker.log.read_text()
    rig.worker()  # who begins now knows the epoch
    rig.redis.hset(keys.EPOCH, "state", "restoring")
    assert "is being restored" in penstock(tmp_path, "sweeper", "--broker", rig.url, status=2)
