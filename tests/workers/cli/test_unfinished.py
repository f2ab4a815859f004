"""Folders that are whole or not there, and what killed processes leave of them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.cli.exits import Failure
from workers.cli.prepare import unfinished

#: Makes a folder, tells its name, and waits to be killed.
MAKER = """
import sys
from pathlib import Path
from workers.cli.prepare import unfinished
with unfinished(Path(sys.argv[1]), print) as work:
    (work / "half").touch()
    print(work, flush=True)
    sys.stdin.read()
"""


def made(out: Path) -> list[str]:
    """The folder made, and what was said."""
    said: list[str] = []
    with unfinished(out, said.append) as work:
        (work / "whole").touch()
    assert (out / "whole").exists()
    return said


def test_what_a_killed_process_left_is_swept_and_what_a_live_one_makes_is_not(tmp_path: Path) -> None:
    out = tmp_path / "model[1]"
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        left = Path(maker.stdout.readline().strip())
        (said,) = made(out)
        assert said == f"{left} is being made by another process; it is left alone"
        assert (left / "half").exists()
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    assert (left / "half").exists()
    (out / "whole").unlink()
    out.rmdir()
    (said,) = made(out)
    assert said == f"removed {left}, which a killed run had left"
    assert [path.name for path in tmp_path.iterdir()] == ["model[1]"]


def test_only_folders_of_the_same_target_that_look_like_ours_are_swept(tmp_path: Path) -> None:
    kept = [".other.0123abcd.partial", ".out.0123abcd.partial.d", ".out.mine.partial", ".out.0123abcd"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.00000000.partial").symlink_to(tmp_path / "elsewhere")
    assert made(tmp_path / "out") == []
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "elsewhere", ".out.00000000.partial", "out"}


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked", "while it is locked"])
def test_one_that_is_swept_before_it_has_its_lock_is_begun_again(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sweeps is in the midst of it, or done, when the maker comes to that call."""
    swept: list[Path] = []
    holders: list[int] = []
    flock = fcntl.flock
    name, real = ("open", os.open) if when == "before it is opened" else ("flock", flock)

    def late(*args: Any) -> Any:
        if not swept:
            swept.extend(tmp_path.iterdir())
            if when == "while it is locked":
                holder = os.open(swept[0], os.O_RDONLY)
                flock(holder, fcntl.LOCK_EX)
                holders.append(holder)
            else:
                swept[0].rmdir()
        return real(*args)

    monkeypatch.setattr(os if name == "open" else fcntl, name, late)
    assert made(tmp_path / "out") == []
    monkeypatch.undo()
    for holder in holders:
        os.close(holder)
        swept[0].rmdir()
    assert len(swept) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_that_fails_leaves_nothing_and_one_that_was_made_meanwhile_is_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), unfinished(tmp_path / "out", print):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with pytest.raises(Failure, match="was made meanwhile"), unfinished(tmp_path / "out", print):
        (tmp_path / "out" / "theirs").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
