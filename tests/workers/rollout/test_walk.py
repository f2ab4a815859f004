"""docs/run/rollouts.md: its commands, as they are written, on a real system."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, free_port
from tests.waiting import PATIENCE_S, until

PAGE = (ROOT / "docs" / "run" / "rollouts.md").read_text("utf-8")
COMMANDS = re.findall(r"^    (.+)$", PAGE, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_bad_folder_is_rolled_back_by_itself(tmp_path: Path) -> None:
    """Between two commands it waits for what the page says happens between them."""
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m workers.cli "$@"\n')
    program.chmod(0o755)
    port = free_port()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PENSTOCK_URL": f"http://127.0.0.1:{port}"}

    def run(line: str) -> str:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def status() -> dict[str, Any]:
        state: dict[str, Any] = json.loads(run("penstock rollout status tiny --json --data-dir data"))
        return state

    up, *others = COMMANDS
    with (tmp_path / "up.log").open("wb") as log:
        line = f"exec {up} --port {port}"
        system = subprocess.Popen(["bash", "-c", line], cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "Penstock is ready" in (tmp_path / "up.log").read_text(), 240)
        for line in others:
            said = run(line)
            if " start " in line:
                until(lambda: status()["phase"] == "judging", 240)
            if " bench " in line:
                assert "0 failed" in said
                while status()["phase"] == "judging":  # the page's calls may have come before its part did
                    run(line)
        state = status()
        assert (state["phase"], state["step"]) == ("rolled_back", 0)
        assert state["reason"].startswith("empty: answers of at most one token: +100.0 points against the baseline")
        assert "roll back" in (tmp_path / "report.html").read_text("utf-8")
        split = json.loads(run("penstock models split tiny --json --data-dir data"))
        assert (split["default"], split["split"]) == (state["before"], {})
    finally:
        system.send_signal(signal.SIGTERM)
        system.wait(PATIENCE_S)
