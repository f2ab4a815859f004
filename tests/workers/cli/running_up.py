"""A `penstock up` in a process of its own, and what is asked of it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, until
from workers.cli.client import FINAL, Gateway
from workers.cli.embedded_valkey import DataDir, LeftBehind
from workers.cli.exits import Exit, Failure

PENSTOCK = (sys.executable, "-m", "workers.cli")


class Up:
    """A `penstock up` of one's own, on any free port."""

    def __init__(self, data_dir: Path, *args: str) -> None:
        self.out = ""
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [*PENSTOCK, "up", "--port", "0", "--data-dir", str(data_dir), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.seen: set[int] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line

    def wait_ready(self) -> Gateway:
        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, self.out
            return re.search(r"ready at (http://\S+)", self.out)

        gateway = Gateway(until(ready)[1])
        assert len(self.children()) >= 2
        return gateway

    def children(self) -> dict[str, int]:
        """Process ids by what they are: valkey, gateway, worker, standby."""
        found = dict(self._found())
        self.seen |= set(found.values())
        return found

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        return [pid for kind, pid in self._found() if kind == "worker"]

    def _found(self) -> Iterator[tuple[str, int]]:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, state, parent, *_ = stat.read_text().rpartition(")")[2].split(" ", 3)
                if int(parent) == self.process.pid and state != "Z":
                    # A standby and what becomes of it have titles, which are one word.
                    words = (stat.parent / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").split()
                    kind = words[4].decode() if len(words) > 4 and words[3] == b"workers.cli" else "standby"
                    if words:  # else it ends, or becomes another program just now
                        yield "valkey" if b"valkey" in words[0] else kind, int(stat.parent.name)

    def stop(self, sig: signal.Signals = signal.SIGINT) -> int:
        self.children()
        self.process.send_signal(sig)
        return self.ended()

    def ended(self) -> int:
        """The status with which it ends by itself."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def nothing_left(self) -> bool:
        """None of its processes lives, and its data directory is free."""
        until(lambda: not any(map(lives, self.seen)))
        until(self._free)
        return True

    def _free(self) -> bool:
        # A server that was killed is a zombie already while its other threads end, which hold its files.
        with contextlib.suppress(LeftBehind):
            DataDir(self.data_dir).close()
            return True
        return False


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts systems, on one data directory unless told otherwise; whatever is left is killed."""
    started: list[Up] = []

    def start(*args: str, data_dir: Path = tmp_path / "data") -> Up:
        started.append(Up(data_dir, *args))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def task(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "def f(x):", "ignore_eos": True, **fields}


def final(gateway: Gateway, task_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        try:
            found = gateway.task(task_id)
        except Failure as failure:  # what it needs is being started again
            if failure.status != Exit.UNREACHABLE:
                raise
            return None
        return found if found["status"] in FINAL else None

    found: dict[str, Any] = until(look)
    return found


def whole(gateway: Gateway, task_id: str) -> list[tuple[int, int]]:
    """A finished task's (index, token id)s as streamed, checked for being contiguous."""
    events = [event for event in gateway.events(task_id) if event["event"] == "token"]
    assert [event["position"] for event in events] == list(range(len(events)))
    return [(event["index"], event["token_id"]) for event in events]
