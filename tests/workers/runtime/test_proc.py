"""What a process is, by its command line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from workers.runtime import proc


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ("python -m workers.cli worker --model tiny", "worker"),
        ("/usr/bin/python /opt/bin/penstock gateway", "gateway"),
        ("penstock up", "up"),
        ("penstock", ""),
        ("/opt/valkey-server --port 1", proc.SERVER),
        ("cat redis-server", ""),
        ("", ""),
    ],
)
def test_a_process_is_what_its_command_line_says(argv: str, command: str) -> None:
    assert proc.command_of(argv.split()) == command


def test_a_server_that_wrote_its_address_over_its_arguments_is_one() -> None:
    assert proc.command_of(["/usr/bin/redis-server 127.0.0.1:6379", "", ""]) == proc.SERVER


@pytest.mark.parametrize(
    ("argv", "said"),
    [("worker --name w1", "w1"), ("worker --name=w=2 -x", "w=2"), ("worker --names w1", None), ("worker --name", "")],
)
def test_an_option_is_read_in_both_forms(argv: str, said: str | None) -> None:
    assert proc.option(argv.split(), "--name") == said


def test_a_process_that_is_not_there_has_no_command_line() -> None:
    assert proc.argv_of(2**22 + 1) == []
    assert proc.argv_of(os.getpid())[0].rpartition("/")[2].startswith("python")


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
def test_without_proc_ps_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_file = proc.argv_of(os.getpid())
    monkeypatch.setattr(proc, "PROC", tmp_path / "none")
    assert proc.argv_of(os.getpid()) == " ".join(by_file).split()
    assert proc.argv_of(2**22 + 1) == []
