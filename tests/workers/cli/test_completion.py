"""`penstock completion`: scripts that shells accept, and what they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.cli.conftest import Run


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which this tree's penstock is."""
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m workers.cli "$@"\n')
    command.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def complete(script: str, words: list[str], path: str) -> list[str]:
    """What bash offers for the last of the words."""
    ask = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _penstock_completion penstock"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    shell = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}\n{show}"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stderr == ""
    return shell.stdout.split("\n")[:-1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_its_script(run: Run, shell: str) -> None:
    ran = run("completion", shell)
    assert ran.status == 0
    assert "_PENSTOCK_COMPLETE" in ran.out
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=ran.out, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_commands_options_and_models(run: Run, path: str) -> None:
    script = run("completion", "bash").out
    assert "models" in complete(script, ["penstock", "mod"], path)
    assert complete(script, ["penstock", "models", "pul"], path) == ["pull"]
    assert "--max-tokens" in complete(script, ["penstock", "run", "tiny", "x", "--max"], path)
    assert "tiny" in complete(script, ["penstock", "models", "show", "ti"], path)


def test_a_shell_without_a_script_is_refused(run: Run) -> None:
    ran = run("completion", "tcsh")
    assert ran.status == 2
    assert all(repr(shell) in ran.err for shell in ("bash", "zsh", "fish"))
