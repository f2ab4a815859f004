"""`penstock models publish`: a model is known, and its tasks are accepted and queued, before any worker is up. And
`penstock models rm`, which takes it away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from engine.text import ModelCard
from producers import Client, Task, UnknownModel
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.store.fleet import rollouts
from tests.aws import Aws
from tests.workers.cli.conftest import Run
from workers.library.reference import BUNDLED

TINY = BUNDLED / "tiny"


@pytest.fixture(autouse=True)
def _servers(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_URL", valkey_url)


def test_tasks_of_a_published_model_are_checked_and_queued(run: Run, valkey: Redis, valkey_url: str) -> None:
    ran = run("models", "publish", "tiny", "small=tiny-draft", "--json")
    version = ModelCard.from_folder(TINY).version
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [(one["name"], one["before"]) for one in told] == [("tiny", None), ("small", None)]
    assert told[0]["version"] == version
    with Client(valkey_url) as client:
        task_id = client.submit(Task(model="tiny", prompt="x")).id
    assert valkey.hget(keys.task(task_id), "queue") == keys.version_queue("tiny", version).encode()


def test_another_version_is_told(run: Run) -> None:
    run("models", "publish", "tiny")
    ran = run("models", "publish", "tiny=tiny-v2")
    before, now = (ModelCard.from_folder(BUNDLED / name).version for name in ("tiny", "tiny-v2"))
    assert ran.out == f"tiny {now}, was {before}\n"


def test_a_damaged_or_incomplete_folder_is_refused(run: Run, valkey: Redis, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    (folder / "config.json").write_text("{}")
    ran = run("models", "publish", str(folder))
    assert (ran.status, f"cannot serve {folder}" in ran.err or "damaged" in ran.err) == (2, True)
    assert not valkey.exists(keys.MODELS)


def test_a_store_that_does_not_answer_is_named(run: Run) -> None:
    ran = run("models", "publish", "tiny", "--broker", "redis://127.0.0.1:1/0")
    assert (ran.status, "127.0.0.1:1" in ran.err) == (3, True)


def test_its_queues_on_sqs_are_made(run: Run, aws: Aws, valkey_url: str) -> None:
    ran = run("models", "publish", "tiny", "--broker", aws.broker("pub-"), "--store", valkey_url)
    assert ran.status == 0, ran.err
    version = ModelCard.from_folder(TINY).version
    urls = aws.client("sqs").list_queues(QueueNamePrefix="pub-")["QueueUrls"]
    assert len([url for url in urls if version in url]) == 4


def test_it_needs_no_torch(valkey_url: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from workers.cli import main; main()"
    argv = [sys.executable, "-c", code, "models", "publish", "tiny"]
    assert subprocess.run(argv, capture_output=True, timeout=240, check=True).stdout


class TestRemoved:
    def test_a_model_is_known_no_more_and_its_tasks_wait_for_its_return(
        self, run: Run, valkey: Redis, valkey_url: str
    ) -> None:
        version = ModelCard.from_folder(TINY).version
        run("models", "publish", "tiny", "other=tiny")
        with Client(valkey_url) as client:
            client.submit(Task(model="tiny", prompt="x"))
        assert run("models", "rm", "tiny", "other").out == (
            f"tiny {version} removed; 1 tasks still wait for it\nother {version} removed\n"
        )
        with Client(valkey_url) as client, pytest.raises(UnknownModel, match="none is published"):
            client.submit(Task(model="tiny", prompt="x"))
        assert valkey.hexists(keys.POOLS, keys.pool_queue("tiny", version, keys.UNSERVED)), "sweepers see what waits"
        assert valkey.llen(keys.version_queue("tiny", version)) == 1
        run("models", "publish", "tiny")
        with Client(valkey_url) as client:
            client.submit(Task(model="tiny", prompt="x"))

    def test_one_that_is_in_use_or_not_there_is_refused(self, run: Run, valkey: Redis) -> None:
        run("models", "publish", "tiny")
        version = ModelCard.from_folder(TINY).version
        pool = keys.Pool("tiny", version, "f")
        valkey.hset(keys.POOLS, pool.queue, json.dumps({"model": "tiny", "version": version, "fingerprint": "f"}))
        valkey.hset(broker_keys.INCARNATIONS, "host.7.worker.1", pool.queue)
        valkey.set(keys.lease("host.7.worker.1"), "{}", ex=60)

        def refused() -> str:
            ran = run("models", "rm", "tiny")
            assert ran.status == 2
            assert valkey.hexists(keys.MODELS, "tiny")
            return ran.err

        assert "is served by host.7.worker.1: end them first" in refused()
        valkey.delete(keys.lease("host.7.worker.1"))
        state = {"at": valkey.time()[0], "by": "host.8.ab"}
        valkey.hset(keys.SCALE_POOLS, "tiny", json.dumps(state))
        assert "is scaled by host.8.ab" in refused()
        valkey.delete(keys.SCALE_POOLS)
        record = rollouts.Rollout("tiny", "tiny=x", "v2", version, 1, 1.0, 1.0)
        valkey.hset(keys.ROLLOUTS, "tiny", record.to_json())
        assert "penstock rollout tiny --cancel" in refused()
        valkey.hset(keys.ROLLOUTS, "tiny", record.to("done", 2.0).to_json())
        assert run("models", "rm", "tiny", "--json").status == 0
        assert not valkey.exists(keys.ROLLOUTS)
        ran = run("models", "rm", "tiny")
        assert (ran.status, "there is no model 'tiny'; there are none" in ran.err) == (2, True)
