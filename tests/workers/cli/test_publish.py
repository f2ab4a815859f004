"""`penstock models publish`: a model is known, and its tasks are accepted and queued, before any worker is up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from engine.text import ModelCard
from producers import Client, Task
from producers.contract import keys
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
    assert subprocess.run(argv, capture_output=True, timeout=60, check=True).stdout
