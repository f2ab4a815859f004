"""A data directory has one owner at a time, and keeps what its server was told."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from producers.connection.local import server_url, urls_in
from tests.waiting import until
from workers.cli import embedded_valkey as embedded
from workers.cli.embedded_valkey import DataDir, LeftBehind, open_data_dir, started, valkey
from workers.cli.exits import Failure
from workers.processes.proc import argv_of
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

    @pytest.mark.parametrize("mode", [0o755, 0o777])
    def test_of_an_earlier_release_is_closed_to_others(self, tmp_path: Path, mode: int) -> None:
        folder = tmp_path / "data"
        DataDir(folder).close()
        folder.chmod(mode)
        with DataDir(folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_with_the_files_of_a_gateway_is_taken(self, tmp_path: Path) -> None:
        folder = tmp_path / "data"
        (folder / "files").mkdir(parents=True)
        folder.chmod(0o755)
        DataDir(folder).close()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @pytest.mark.parametrize(("mode", "name"), [(0o755, "thesis.txt"), (0o1777, "lock")])
    def test_that_holds_more_than_ours_is_not_closed_to_others(self, tmp_path: Path, mode: int, name: str) -> None:
        folder = tmp_path / "home"
        folder.mkdir()
        (folder / name).write_text("")
        folder.chmod(mode)
        with pytest.raises(Failure, match=f"chmod 700 {folder}"):
            DataDir(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == mode
        assert sorted(path.name for path in folder.iterdir()) == [name]

    def test_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(Failure, match=rf"belongs to another user \(uid {os.getuid()}\)"):
            DataDir(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_that_is_a_link_is_refused_and_nothing_is_written_there(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir(mode=0o755)
        (tmp_path / "data").symlink_to(tmp_path / "there")
        with pytest.raises(Failure, match=rf"is a link; give the directory itself: --data-dir {tmp_path / 'there'}"):
            DataDir(tmp_path / "data")
        assert list((tmp_path / "there").iterdir()) == []

    @pytest.mark.parametrize("name", ["password", "port", "valkey.conf"])
    def test_writes_through_no_link(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "mine").write_text("as it was")
        (tmp_path / "data").mkdir(mode=0o700)
        (tmp_path / "data" / name).symlink_to(tmp_path / "mine")
        with DataDir(tmp_path / "data") as data:
            data.port()
            data.configure()
        assert (tmp_path / "mine").read_text() == "as it was"
        assert not (tmp_path / "data" / name).is_symlink()

    def test_keeps_its_password_and_makes_another_for_another_port(self, tmp_path: Path) -> None:
        """Who has taken the port was told the password by every client that called there meanwhile."""
        with DataDir(tmp_path) as data:
            port, password = data.port(), data.password()
            assert len(password) == 43
        with DataDir(tmp_path) as data:
            assert (data.port(), data.password()) == (port, password)
            with socket.create_server(("127.0.0.1", port)):
                data.port()
            assert data.password() not in ("", password)

    @pytest.mark.parametrize("written", ["", "two words", "\u00e4" * 20])
    def test_makes_a_password_whatever_the_file_says(self, tmp_path: Path, written: str) -> None:
        (tmp_path / "password").write_text(written)
        with DataDir(tmp_path) as data:
            assert data.url(data.port()) == server_url(data.port(), data.password())
            assert (tmp_path / "password").read_text().strip() == data.password()

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
        with Redis(port=port, password=data.password(), decode_responses=True, retry=Retry(NoBackoff(), 0)) as redis:
            yield child, redis
    finally:
        await child.stop(60)


async def test_the_server_keeps_its_data_over_an_end_in_good_order(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (_, redis):
            assert redis.config_get("appendonly") == {"appendonly": "yes"}
            assert redis.config_get("appendfsync") == {"appendfsync": "everysec"}
            assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            limit = int(redis.config_get("maxmemory")["maxmemory"])
            assert 0 < limit < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
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


async def test_the_server_asks_for_the_password_which_no_command_line_shows(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (child, redis):
            port = redis.connection_pool.connection_kwargs["port"]
            for password in (None, "", "wrong"):
                with Redis(port=port, password=password) as stranger, pytest.raises(AuthenticationError):
                    stranger.ping()
            for url in (data.url(port), *urls_in(tmp_path)):
                with Redis.from_url(url) as ours:
                    assert ours.execute_command("ACL", "WHOAMI") == b"default"
            assert child.pid is not None
            assert data.password() not in " ".join([*child.program.argv, *argv_of(child.pid)])
            assert data.password() not in (tmp_path / "valkey.log").read_text()


async def test_the_server_keeps_the_data_of_a_release_that_had_no_password(tmp_path: Path) -> None:
    with DataDir(tmp_path) as data:
        async with server(data) as (_, redis):
            redis.set("a", "b")
        (tmp_path / "password").unlink()
        (tmp_path / "valkey.conf").unlink()
        async with server(data) as (_, redis):
            assert redis.get("a") == "b"
            assert urls_in(tmp_path)[0] == data.url(redis.connection_pool.connection_kwargs["port"])


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
        password = data.password()
        with pytest.raises(Failure, match="in use"):
            await started(child, data, port)
        assert data.password() != password, "what listens there was told it"
