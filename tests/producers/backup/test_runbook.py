"""The commands of docs/run/backup.md, as they are written there, in their order, on real servers and processes."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest
from redis import Redis

from producers import Client
from producers.admin import keys as api_keys
from producers.connection.connect import connect_async
from producers.contract import keys
from producers.store.access.audit import Actor
from tests.processes import ROOT, running_valkey
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S, until
from tests.warm import Forked, printed

PAGE = (ROOT / "docs" / "run" / "backup.md").read_text("utf-8").replace("\\\n", "")
#: The commands of the page's code blocks.
COMMANDS = re.findall(r"^ +(penstock \S.*)$", PAGE, re.MULTILINE)


def command(*beginnings: str) -> str:
    """The one command of the page that begins so."""
    (found,) = [line for line in COMMANDS if line.startswith(beginnings)]
    return found


class Shell:
    """Runs commands in a folder. `places`: what the page's names stand for here."""

    def __init__(self, folder: Path, places: dict[str, str]) -> None:
        self._folder, self._places = folder, places
        self.ran: list[str] = []

    def argv(self, line: str) -> list[str]:
        self.ran.append(line)
        for name, here in self._places.items():
            line = line.replace(name, here)
        return [sys.executable, "-m", "workers.cli", *shlex.split(line)[1:]]

    def run(self, line: str, status: int = 0) -> str:
        found, told = printed(self.argv(line), {}, self._folder, 120)
        assert found == status, (line, told)
        return told

    def start(self, line: str) -> Forked:
        return Forked(self.argv(line), {}, self._folder / "log", self._folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_runbook(model: str, valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    with running_valkey() as server, Redis(port=server.port) as new, Client(valkey_url) as client:
        places = {
            "redis://10.0.0.5:6379/0": valkey_url,
            "redis://10.0.0.6:6379/0": f"redis://127.0.0.1:{server.port}/0",
            "/etc/penstock": str(tmp_path),
            "/backups": str(tmp_path / "backups"),
            "/srv/penstock": str(tmp_path / "new"),
        }
        shell = Shell(tmp_path, places)
        worker = FakeWorker(valkey)
        done, runs, deleted = [client.submit(model="tiny", prompt=[1], max_tokens=8) for _ in range(3)]
        worker.serve(done.id)
        worker.claim(runs.id)

        async def make_key() -> str:
            store = connect_async(valkey_url)
            key, _ = await api_keys.create(store, {"tenant": "a"}, Actor("test"))
            await store.aclose()
            return key.id

        shell.run(command("penstock secrets key"))
        key_id = asyncio.run(make_key())
        journal = tmp_path / "backups" / "journal"
        sweeper = shell.start(command("penstock sweeper"))
        try:
            until(lambda: valkey.exists(keys.JOURNAL))
            told = shell.run(command("penstock backup"))
            assert "3 task" in told
            assert "whole backup already" in shell.run(command("penstock backup"), 2)
            shell.run(command("penstock restore /backups/2026-11-28 --check"))
            (tmp_path / "file").touch()
            nowhere = f"penstock backup {tmp_path}/file/backup --broker redis://10.0.0.5:6379/0"
            assert f"cannot use {tmp_path}/file" in shell.run(nowhere, 1)
            deleted.delete()
            until(lambda: deleted.id.encode() in valkey.zrange(keys.ERASING, 0, -1))
            before = len(list(journal.iterdir()))
            until(lambda: len(list(journal.iterdir())) > before)
        finally:
            sweeper.terminate()
            assert sweeper.wait(PATIENCE_S) == 0
        written = len(list(journal.glob("journal-*")))
        prune = command("penstock prune-journal")
        assert "no backup in" in shell.run(prune.replace("2026-11-28", "2026-11-27"), 2)
        assert f"0 files are removed; {written} are left" in shell.run(prune)
        restore = command("penstock restore /backups/2026-11-28 --journal")
        assert "workers hold leases" in shell.run(restore, 2)
        assert new.dbsize() == 0
        worker.die()
        told = shell.run(restore)
        assert "1 deleted tasks stay so" in told
        assert "1 tasks that had not ended are queued again" in told
        assert new.exists(keys.task(done.id), keys.task(runs.id)) == 2
        assert not new.exists(keys.task(deleted.id))
        assert f"{key_id}  active" in shell.run(command("penstock keys ls"))

        new.flushall()
        without = re.sub(r"--journal \S+", "--without-journal", restore)
        assert new.dbsize() == 0
        shell.run(without)
        assert f"{key_id}  disabled" in shell.run(command("penstock keys ls"))
        assert f"{key_id} is active" in shell.run(command("penstock keys confirm"))
        assert f"{key_id}  active" in shell.run(command("penstock keys ls"))
        assert new.exists(keys.task(deleted.id))
    assert {*COMMANDS} <= {*shell.ran}, "a command of the page was not run"
