"""A run whose tests look for another host fails, and says which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

TESTS = """
import socket
import pytest

def test_loopback():
    socket.getaddrinfo("localhost", 80)

def test_another_host():
    with pytest.raises(OSError):
        socket.getaddrinfo("penstock.dev", 80)

def test_another_hosts_address():
    with pytest.raises(OSError):
        socket.create_connection(("192.0.2.1", 80))
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = folder / "test_hosts.py"
    file.write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.loopback_only", "-p", "no:cacheprovider", str(file), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.exhaustive
def test_a_run_that_looks_for_another_host_fails(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("without root there is no network of its own")
    ended = run(tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "a test let something look for the host penstock.dev (" in ended.stdout
    assert "tests sent 1 packets to other hosts" in ended.stdout
    assert run(tmp_path, "-k", "loopback").returncode == pytest.ExitCode.OK
