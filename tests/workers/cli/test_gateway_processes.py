"""`penstock gateway --processes`: one socket, several processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.processes import ROOT, free_port, guarded
from tests.waiting import PATIENCE_S, until
from workers.processes import PENSTOCK


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def url(valkey_url: str, log: Path) -> Iterator[str]:
    port = free_port()
    argv = guarded(*PENSTOCK, "gateway", "--processes", "2", "--broker", valkey_url, "--port", str(port))
    with log.open("wb") as output, subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output) as parent:
        try:
            until(lambda: all(served(log, name) for name in "12"))
            yield f"http://127.0.0.1:{port}"
            parent.terminate()
            assert parent.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            parent.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/livez")


def served(log: Path, name: str) -> list[int]:
    """The process ids of the gateways of this name, in the order in which they came to serve."""
    return [int(pid) for pid in re.findall(rf"gateway\.{name} \| serves \(process (\d+)\)", log.read_text())]


def answering(url: str) -> str:
    """The name of the process that answers on a new connection."""
    answer = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
    assert answer.status_code == 200
    match = re.search(r'^penstock_build_info\{process="(.)"', answer.text, re.MULTILINE)
    assert match is not None, answer.text
    return match[1]


@pytest.mark.skipif(sys.platform != "linux", reason="takes children along only on Linux")
def test_all_take_callers_from_one_socket_and_no_request_is_lost_while_one_is_started_again(
    url: str, log: Path
) -> None:
    until(lambda: answering(url) == "1")
    until(lambda: answering(url) == "2")
    os.kill(served(log, "1")[0], signal.SIGTERM)
    until(lambda: answering(url) == "2" and len(served(log, "1")) == 2)
    until(lambda: answering(url) == "1")
    os.kill(served(log, "2")[0], signal.SIGKILL)

    def again() -> bool:
        with suppress(httpx.TransportError):  # of a connection that the killed one had taken
            answering(url)
        return len(served(log, "2")) == 2

    until(again)
    until(lambda: answering(url) == "2")
