"""The bench's workloads are pinned, since figures are compared over time; and it runs from end to end."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.bench.offline import bench_breakdown, main, measure, settings, workload, workloads
from engine.bench.options import checked, every_argument


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


def test_the_command_writes_its_figures(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    command = ["bench", "--model", str(model_folder), "--workload", "W1", "--json", str(out)]
    command += ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    said = capsys.readouterr().out
    assert "output tokens/s" in said
    results = json.loads(out.read_text())["penstock"]["results"]
    assert set(results) == {"W1"}
    assert [run["output_tokens"] for run in results["W1"]["runs"]] == [128]
    assert results["W1"]["best_output_tokens_per_s"] > 0
    assert "% of the limit" in said
    assert 0 < results["W1"]["share_of_limit"] < 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--workload", "W1,W9"], "'W9' is not known"),
        (["--repeats", "0"], "--repeats: '0' is no whole number of 1 or more"),
        (["--load", "--requests", "-1"], "--requests"),
        (["--json", "/dev/null/out.json"], "--json: /dev/null/out.json lies in /dev/null, which is no folder"),
        (["--json", "."], "--json: . is a folder"),
        (["--load", "--rates", "1,nan"], "rates are finite and above 0"),
        (["--load", "--rates", "1,,2"], "'1,,2' are no numbers with commas between them"),
        (["--load", "--breakdown"], "not allowed with"),
        (["--breakdown", "--tensor-parallel", "2"], "--breakdown times the parts of one process"),
        (["--load", "--peer", "transformers-cb"], "--peer is compared by throughput"),
    ],
)
def test_what_would_lose_the_figures_is_refused_first(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        checked(every_argument(), ["--model", "m", *given])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--workload", "W1,W64mix"],
            "W64mix has requests of 714 tokens, and the model a context of 512; leave it out",
        ),
        (["--load", "--mix", "chat,long"], "long has requests of 1532 tokens"),
        (["--workload", "W1", "--kernels", "none"], "argument --kernels: invalid choice: 'none'"),
        (["--workload", "W1", "--block-size", "0"], "block_size=0 must be from 1 to 1024"),
    ],
)
def test_an_impossible_bench_is_reported_in_one_line(
    model_folder: Path,
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--model", str(model_folder), *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_breakdown_can_be_of_an_engine_that_guesses(model_folder: Path) -> None:
    given = ["--model", str(model_folder), "--workload", "W1", "--breakdown", "--repeats", "1", "--dtype", "float32"]
    given += ["--speculate", "draft", "--draft-model", str(model_folder), "--device", "cpu", "--threads", "1"]
    found = bench_breakdown(checked(every_argument(), given), 320)
    # How many steps are of either kind is for the clock to say: drafts are left where they do not pay.
    told = found["W1"]["host"]
    assert sum(told[kind]["steps"] for kind in ("decode", "verify") if kind in told) > 0


def test_a_vocabulary_may_be_smaller_than_what_tokenizers_keep() -> None:
    assert len({token for prompt, _ in workload("W1", 40, 7, 0) for token in prompt}) > 30
