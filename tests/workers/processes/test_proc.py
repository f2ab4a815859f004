"""What a process is, by its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.processes import proc


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


def test_a_process_is_known_by_its_title_where_it_gave_itself_one() -> None:
    title = "/usr/bin/python -P -m workers.cli worker --name w1"
    titled = f"from setproctitle import setproctitle as s; s({title!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", titled], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        argv = proc.argv_of(process.pid)
        process.communicate("\n")
    assert (proc.command_of(argv), proc.option(argv, "--name")) == ("worker", "w1")


@pytest.mark.skipif(shutil.which("ps") is None, reason="no ps here")
def test_without_proc_ps_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_file = proc.argv_of(os.getpid())
    monkeypatch.setattr(proc, "PROC", tmp_path / "none")
    assert proc.argv_of(os.getpid()) == " ".join(by_file).split()
    assert proc.argv_of(2**22 + 1) == []
