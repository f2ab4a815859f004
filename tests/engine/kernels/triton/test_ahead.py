"""What is compiled ahead, without a GPU, is what a run looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def compiled(folder: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env["TRITON_INTERPRET"] = "0"
    command = [sys.executable, "-m", "tests.engine.kernels.triton.compile_ahead", str(folder), "sm_90"]
    ran = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_time_finds_all_in_the_cache_by_the_key_of_a_launch(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    *builds, by_hand = first["builds"]
    # One by dtype and by whether the stride is even; the key that was written out is that of the first.
    assert len({build["key"] for build in builds}) == 3 == len(builds)
    assert not any(build["cached"] for build in builds)
    assert all(build["bytes"] > 1000 and build["seconds"] > 0 for build in builds)
    assert first["by hand"] == builds[0]["key"] == by_hand["key"]
    assert by_hand["cached"]
    assert "shared memory" in first["refused"]

    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    # Beside the kernels: up to Triton 3.6 a launcher for the types in C of each of the two; and the way to the driver.
    launchers = [path for path in files if path.name.startswith("__triton_launcher")]
    assert len(launchers) == (2 if first["triton"] < [3, 7] else 0)
    assert len([path for path in files if path.name.startswith("cuda_utils")]) == 1
    second = compiled(tmp_path)
    assert [build["key"] for build in second["builds"]] == [build["key"] for build in first["builds"]]
    assert all(build["cached"] for build in second["builds"])
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()) == files
