"""`penstock models sign` and `verify`, and what a worker is told of signatures."""

from __future__ import annotations

import gc
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workers.cli.conftest import Run
from tests.workers.library.test_signatures import key_pair
from workers.library.reference import BUNDLED
from workers.settings import WorkerSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED / "tiny", copy)
    (copy / "manifest.json").unlink(missing_ok=True)
    return copy


def test_keys_of_openssl_do_from_the_command_line(run: Run, folder: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        private, public = key_pair(tmp_path, "key")
    else:
        private, public = tmp_path / "key.pem", tmp_path / "key.pub"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)], check=True)
        subprocess.run(["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)], check=True)
    ran = run("models", "verify", str(folder))
    assert (ran.status, "nothing says what its files should be" in ran.err) == (2, True)
    key = run("models", "sign", str(folder), "--key", str(private)).out.strip()
    assert f"is signed by {key}" in run("models", "verify", str(folder), "--require-signature", str(public)).out


def test_a_worker_is_told_the_keys(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[WorkerSettings] = []

    def run_worker(settings: WorkerSettings, level: object) -> int:
        told.append(settings)
        return 0

    monkeypatch.setattr("workers.runtime.worker.run_worker", run_worker)
    monkeypatch.setattr(gc, "disable", lambda: None)
    keys = [str(key_pair(tmp_path, name)[1]) for name in ("one", "two")]
    options = [part for key in keys for part in ("--require-signature", key)]
    assert run("worker", "--model", "tiny", "--broker", "redis://127.0.0.1:1/0", *options).status == 0
    assert [settings.require_signature for settings in told] == [tuple(keys)]
