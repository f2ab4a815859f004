"""The bench's workloads are pinned, since figures are compared over time; and it runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.bench import every_argument, measure, settings, workload, workloads


def digest(name: str, repeat: int) -> str:
    return sha256(json.dumps(workload(name, 49152, 1234, repeat)).encode()).hexdigest()[:12]


def test_workloads_never_change() -> None:
    assert [digest("W8", 0), digest("W8", 1), digest("W64mix", 0)] == ["e98988c1b289", "d4fb98f09851", "02a871e54f5e"]


def test_lengths_depend_on_the_seed_alone() -> None:
    shapes = [[(len(prompt), output) for prompt, output in workload("W64mix", 500, 7, repeat)] for repeat in (0, 1)]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 64
    assert all(16 <= prompt <= 512 and 16 <= output <= 256 for prompt, output in shapes[0])
    assert workload("W32", 500, 7, 0) != workload("W32", 500, 7, 1)
    assert [(len(prompt), output) for prompt, output in workload("W32", 500, 7, 0)] == [(128, 128)] * 32


def test_engines_have_room_for_the_jobs_and_without_any_for_as_many_as_a_worker() -> None:
    told = ["--model", "m", "--workload", "W8,W64mix", "--repeats", "1", "--speculate", "lookup", "--kernels", "cpu"]
    args = every_argument().parse_args(told)
    offline, under_load = settings(args, workloads(args, 500)), settings(args, {})
    assert (offline.max_num_seqs, offline.max_model_len) == (64, 714)
    assert (under_load.max_num_seqs, under_load.max_model_len) == (EngineConfig().max_num_seqs, None)
    assert {(one.speculate, one.kernels) for one in (offline, under_load)} == {("lookup", "cpu")}


def test_a_workload_of_one_takes_steps_of_few_tokens() -> None:
    args = every_argument().parse_args(["--model", "m", "--workload", "W1", "--max-num-batched-tokens", "32"])
    assert settings(args, workloads(args, 500)).max_num_batched_tokens == 32


def test_measures_are_of_the_times_of_delivery() -> None:
    jobs = [([1, 2], 3), ([1], 2)]
    found = measure(10.0, jobs, [[11.0, 12.0, 13.0], [12.0, 15.0]], 4.0)
    assert (found["wall_s"], found["cpu_s"]) == (5.0, 4.0)
    assert found["output_tokens_per_s"] == 1.0
    assert (found["ttft_p50_s"], found["ttft_max_s"]) == (1.5, 2.0)
    assert found["tpot_mean_ms"] == 2000.0


def test_a_run_with_missing_tokens_counts_for_nothing() -> None:
    with pytest.raises(RuntimeError, match="another number of tokens"):
        measure(0.0, [([1], 2)], [[1.0]], 0.1)


def test_the_command_writes_its_figures(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "engine.bench", "--model", str(model_folder), "--workload", "W1,W8"]
    command += ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--repeats", "1", "--json", str(out)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "output tokens/s" in ran.stdout
    results = json.loads(out.read_text())["penstock"]["results"]
    assert set(results) == {"W1", "W8"}
    assert [run["output_tokens"] for run in results["W8"]["runs"]] == [1024]
    assert results["W8"]["best_output_tokens_per_s"] > 0
    assert "% of the limit" in ran.stdout
    assert 0 < results["W1"]["share_of_limit"] < 1


def test_an_unknown_workload_is_refused_by_name(model_folder: Path) -> None:
    command = [sys.executable, "-m", "engine.bench", "--model", str(model_folder), "--workload", "W9"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "'W9' is not known" in ran.stderr
