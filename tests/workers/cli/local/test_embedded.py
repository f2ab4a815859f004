"""A data directory has one owner at a time, and keeps what its server was told."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.waiting import until
from workers.cli.exits import Failure
from workers.cli.local import embedded
from workers.cli.local.embedded import DataDir, LeftBehind, open_data_dir, started, valkey
from workers.processes.supervisor import Child


class TestDataDir:
    def test_is_made_where_it_is_missing(self, tmp_path: Path) -> None:
        with DataDir(tmp_path / "a" / "b") as data:
            assert data.path.is_dir()

    def test_in_use_is_refused_naming_who_uses_it(self, tmp_path: Path) -> None:
        with DataDir(tmp_path), pytest.raises(Failure, match=f"in use by process {os.getpid()}") as failure:
            DataDir(tmp_path)
        assert failure.value.status == 2
        assert "--data-dir" in str(failure.value)

    def test_is_free_again_when_its_owner_closes_it(self, tmp_path: Path) -> None:
        DataDir(tmp_path).close()
        DataDir(tmp_path).close()

    def test_whose_owner_was_killed_is_waited_for_while_its_server_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server has inherited the lock and holds it a little longer than its owner lived."""
        monkeypatch.setattr(embedded, "LEFTOVER_S", 60.0)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        owner = subprocess.Popen([sys.executable, "-c", ""])
        owner.wait()
        (tmp_path / "lock").write_text(f"{owner.pid}\n")
        with pytest.raises(LeftBehind):
            DataDir(tmp_path)

        async def wait_for_it() -> None:
            waiting = asyncio.create_task(open_data_dir(tmp_path))
            await asyncio.sleep(0.1)
            assert not waiting.done(), "and nothing else is held up"
            holder.kill()
            (await waiting).close()

        asyncio.run(wait_for_it())
        holder.wait()

    def test_that_cannot_be_made_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(Failure, match="cannot use the data directory"):
            DataDir(tmp_path / "file" / "data")

    def test_keeps_its_port_while_that_is_free(self, tmp_path: Path) -> None:
        with DataDir(tmp_path) as data:
            port = data.port()
            assert data.port() == port
            with socket.create_server(("127.0.0.1", port)):
                other = data.port()
            assert other != port
            assert data.port() == other

    def test_a_port_that_cannot_be_remembered_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "port").mkdir()
        with DataDir(tmp_path) as data, pytest.raises(Failure, match="cannot write"):
            data.port()

    @pytest.mark.parametrize("written", ["", "x", "-5", "99999999"])
    def test_finds_a_port_whatever_the_file_says(self, tmp_path: Path, written: str) -> None:
        (tmp_path / "port").write_text(written)
        with DataDir(tmp_path) as data:
            assert 0 < data.port() < 65536


#: Locks a file and stays.
HOLDER = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def server(data: DataDir, *options: str) -> AsyncIterator[tuple[Child, Redis]]:
    port = data.port()
    program = valkey(data, port)
    child = Child(replace(program, argv=[*program.argv, *options]), lambda name, line: None)
    await child.start()
    try:
        await started(child, data, port)
        with Redis(port=port, decode_responses=True, retry=Retry(NoBackoff(), 0)) as redis:
            yield child, redis
    finally:
        await child.stop(60)


async def test_the_server_keeps_its_data_over_an_end_in_good_order(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (_, redis):
            assert redis.config_get("appendonly") == {"appendonly": "yes"}
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}
            redis.set("a", "b")
        async with server(data) as (_, redis):
            assert redis.get("a") == "b"


async def test_the_server_keeps_its_data_when_it_is_killed(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (child, redis):
            redis.set("a", "b")
            await child.stop(0, signal.SIGKILL)
        async with server(data) as (_, redis):
            assert redis.get("a") == "b"


def rewritten(redis: Redis) -> bool:
    found = redis.info("persistence")
    return found["aof_rewrites"] > 0 and not found["aof_rewrite_in_progress"]


async def test_a_server_with_much_to_read_is_waited_for(tmp_path: Path) -> None:
    """It answers some commands meanwhile, and others with LOADING."""
    with DataDir(tmp_path) as data:
        async with server(data) as (_, redis):
            redis.mset({f"key {n}": os.urandom(2000) for n in range(100)})
            redis.bgrewriteaof()
            await asyncio.to_thread(until, lambda: rewritten(redis))
        # Of each key it takes 10 ms to read, and looks at its callers between them.
        slowly = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
        async with server(data, *slowly) as (_, redis):
            assert redis.dbsize() == 100


async def test_the_server_holds_the_lock_of_its_directory(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (_, redis):
            os.close(data.lock)  # as if its owner had died
            lock = os.open(tmp_path / "lock", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            redis.ping()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data.lock = lock


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = Child(valkey(data, port), lambda name, line: None)
        await child.start()
        # What listens there is no Valkey: it never answers, and ours dies.
        with pytest.raises(Failure, match="in use"):
            await started(child, data, port)
