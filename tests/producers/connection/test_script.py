"""Scripts are there for as long as the process is, whatever becomes of the files and of the server's own copies."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ResponseError

from producers.connection.script import Call, arun, run, run_many, script
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.store import protocol


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """An installed package of scripts, and where they are."""
    name = f"installed_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name / "scripts"
    folder.mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    (folder / "one.lua").write_text("return 1")
    (folder / "two.lua").write_text("-- include: _all.lua\nreturn 2")
    (folder / "_all.lua").write_text("-- include: _most.lua\nlocal all = 1")
    (folder / "_most.lua").write_text("local most = 1")
    monkeypatch.syspath_prepend(tmp_path)
    return name, folder


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: (folder / "two.lua").write_text("return 'newer'")])
def test_what_is_installed_under_a_process_does_not_change_its_scripts(
    package: tuple[str, Path], change: Callable[[Path], object]
) -> None:
    name, folder = package
    assert script(name, "one").text == "return 1"
    change(folder)
    assert script(name, "two").text == "local most = 1\nlocal all = 1\nreturn 2"


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: [path.unlink() for path in folder.iterdir()]])
def test_a_package_without_its_scripts_is_no_server_that_is_away(
    package: tuple[str, Path], change: Callable[[Path], object]
) -> None:
    name, folder = package
    change(folder)
    with pytest.raises(RuntimeError, match="install Penstock again") as said:
        script(name, "one")
    assert str(folder) in str(said.value)
    assert trouble(said.value) is None


@pytest.fixture
def forgetting(valkey: Redis, valkey_url: str) -> Iterator[None]:
    """A server that is told to forget its scripts, as fast as it goes."""
    over = threading.Event()

    def forget() -> None:
        with Redis.from_url(valkey_url) as other:
            while not over.is_set():
                other.script_flush()

    thread = threading.Thread(target=forget)
    thread.start()
    yield
    over.set()
    thread.join()


def _cancel(k: int) -> Call:
    return protocol.cancel(f"nobody-{k}")


@pytest.mark.usefixtures("forgetting")
async def test_every_call_is_answered_by_a_server_that_forgets_its_scripts_again_and_again(
    valkey: Redis, valkey_url: str
) -> None:
    gone = [0, b"gone"]
    for k in range(60):
        assert run(valkey, _cancel(k)) == gone
    async with AsyncRedis.from_url(valkey_url) as other:
        for k in range(60):
            assert await arun(other, _cancel(k)) == gone
    calls = [_cancel(k) if k % 2 else protocol.queued(f"nobody-{k}") for k in range(40)]
    for _ in range(10):
        assert run_many(valkey, calls) == [gone if k % 2 else b"gone" for k in range(40)]


def test_a_call_s_own_error_is_nobody_else_s(valkey: Redis) -> None:
    valkey.script_flush()
    valkey.set(keys.task("broken"), "no record")
    fine, broken, again = run_many(valkey, [protocol.queued("a"), protocol.queued("broken"), protocol.queued("a")])
    assert fine == again == b"gone"
    assert isinstance(broken, ResponseError)
