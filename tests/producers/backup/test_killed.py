"""`penstock backup` and `penstock restore` are killed where they are, and go on when they run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from producers import Client
from producers.connection.script import text
from producers.contract import keys
from tests.processes import ROOT, guarded
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def start(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    argv = (sys.executable, "-m", "workers.cli", *argv)
    return subprocess.Popen(guarded(*argv), cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_killed_processes_go_on(
    model: str, valkey: Redis, valkey_url: str, elsewhere: Redis, elsewhere_url: str, tmp_path: Path
) -> None:
    place, worker = tmp_path / "backup", FakeWorker(valkey)
    with Client(valkey_url) as client:
        ids = [client.submit(model="tiny", prompt=[1] * 500, max_tokens=8).id for _ in range(500)]
    for task_id in ids[:50]:
        worker.serve(task_id)
    worker.die()
    backup = ("backup", str(place), "--broker", valkey_url)
    killed = start(tmp_path, *backup)
    until(lambda: (place / "progress").exists() or (place / "manifest").exists())
    killed.kill()
    killed.wait()
    whole = (place / "manifest").exists()
    assert start(tmp_path, *backup).wait(PATIENCE_S) == (2 if whole else 0)
    restore = (
        "restore",
        str(place),
        "--without-journal",
        "--broker",
        elsewhere_url,
        "--old-store",
        valkey_url,
        "--yes",
    )
    killed = start(tmp_path, *restore)
    until(lambda: elsewhere.exists(keys.EPOCH))
    killed.kill()
    killed.wait()
    half = elsewhere.hget(keys.EPOCH, "state") == b"restoring"
    if half:
        assert start(tmp_path, "sweeper", "--broker", elsewhere_url).wait(PATIENCE_S) == 2
    assert start(tmp_path, *restore).wait(PATIENCE_S) == (0 if half else 2)
    assert elsewhere.hget(keys.EPOCH, "state") == b"open"
    assert {text(name) for name in elsewhere.zrange(keys.SUBMITTING, 0, -1)} == {*ids[50:]}
    assert elsewhere.xlen(keys.LEDGER) == 50
    assert elsewhere.hgetall(keys.WAITING) == valkey.hgetall(keys.WAITING)
