"""infra/gpu/check.sh: what it would run on a GPU starts, in time, and leaves its report."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infra.gpu.bench import held
from tests.processes import ROOT

CHECK = str(ROOT / "infra/gpu/check.sh")
PARTS = ("bench", "peer", "alone", "kernels", "parity", "engine", "ranks")
#: In place of coreutils': notes the limit and the command, and runs nothing.
TIMEOUT = """#!/bin/bash
printf '%q ' "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
"""


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, list[tuple[int, list[str]]]]:
    """The commands that each part would run on a GPU, in order: limit in seconds, arguments of Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/timeout").write_text(TIMEOUT)
    (tmp_path / "bin/timeout").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    found = {}
    for part in PARTS:
        commands = tmp_path / part
        # A Python that succeeds in all that it is asked, whether there is a GPU among it.
        env = {**os.environ, "PATH": path, "COMMANDS": str(commands), "PYTHON": "true", "OUT": str(tmp_path / "no")}
        subprocess.run([CHECK, part, "--out", str(tmp_path / "out")], env=env, check=True)
        lines = [shlex.split(line) for line in commands.read_text().splitlines()]
        assert all(line[:2] + line[3:4] == ["-k", "10", "true"] for line in lines)
        found[part] = [(int(line[2]), line[4:]) for line in lines]
    assert not (tmp_path / "no").exists(), "OUT may be anything's"
    return found


def test_no_part_takes_nine_minutes(asked: dict[str, list[tuple[int, list[str]]]]) -> None:
    for part, commands in asked.items():
        assert 0 < sum(limit + 10 for limit, _ in commands) <= 540, part


def test_all_parts_are_run_figures_first(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": "true"}
    subprocess.run([CHECK, "--out", str(tmp_path)], env=env, check=True)
    statuses = sorted(tmp_path.glob("*.status"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.stem for path in statuses] == list(PARTS)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_starts_without_the_packages_of_broker_and_gateway(
    asked: dict[str, list[tuple[int, list[str]]]],
) -> None:
    pytest.importorskip("triton")
    parts = [[command for _, command in commands] for commands in asked.values()]
    assert [len(commands) for commands in parts] == [1, 2, 3, 1, 1, 1, 2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.infra.rehearsal"],
        input=json.dumps(parts),
        cwd=ROOT,
        env=env,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("args", [["no-such-part"], ["--out"], ["--measures"], ["--gpu"]])
def test_what_it_does_not_know_is_refused(args: list[str]) -> None:
    ran = subprocess.run([CHECK, *args], check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "usage: infra/gpu/check.sh [bench|peer|alone|kernels|parity|engine|ranks|all]..." in ran.stderr


def test_a_run_at_once_is_of_as_many_requests_as_the_cache_holds() -> None:
    assert held(590_000, 256, 2000) == 256
    assert held(406_000, 256, 2000) == 201  # 8B in bf16 on a GPU of 80 GB
    assert held(100, 256, 2000) == 1
