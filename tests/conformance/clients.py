"""Runs scripts with the clients of others, each to its end: those of `js/` with Node.js, those of `python/` in an
environment of their own, because they want other versions than the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.javascript import run_source

HERE = Path(__file__).parent
#: What the Makefile installs there: requirements/clients.txt.
INSTALLED = Path(sys.prefix) / "clients" / "bin" / "python"
#: Seconds.
LIMIT = 300.0


def python(script: str, *arguments: str) -> Any:
    """The JSON that a script of `python/` prints."""
    # What they import is compiled once, not by each.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [str(INSTALLED), "-P", str(HERE / "python" / script), *arguments]
    return _told(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT))


def javascript(script: str, *arguments: str) -> Any:
    """The JSON that a script of `js/` prints. Skips the test as `run_source` does."""
    return _told(run_source((HERE / "js" / script).read_text(), *arguments))


def _told(ran: subprocess.CompletedProcess[str]) -> Any:
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
