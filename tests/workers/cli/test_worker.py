"""`penstock worker`: what is said on the command line is what the worker is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.aws import Aws
from tests.workers.cli.conftest import invoke, told
from workers.cli.exits import Failure
from workers.settings import WorkerSettings

URL = "redis://127.0.0.1:1/0"
WORKER = ("worker", "--broker", URL, "--model", "tiny")


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = told(
        monkeypatch,
        *WORKER,
        *("--store", "redis://127.0.0.1:2/0", "--name", "w", "--lease", "20", "--drain-timeout", "5"),
        *("--max-worker-deaths", "7", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
        *("--max-non-priority-step-tokens", "32"),
        *("--kv-cache-bytes", "1000000"),
        *("--memory-share", "0.5"),
        *("--dtype", "float32", "--quantization", "none", "--deterministic", "--device", "cpu", "--threads", "1"),
        *("--draft-model", "tiny-draft", "--speculate-tokens", "3", "--no-breaker", "--placement", "prefix"),
    )
    engine = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_non_priority_step_tokens": 32,
        "kv_cache_bytes": 1_000_000,
        "memory_share": 0.5,
        "dtype": "float32",
        "quantization": "none",
        "deterministic": True,
        "draft_model": "tiny-draft",
        "speculate_tokens": 3,
        "device": "cpu",
        "threads": 1,
    }
    assert settings == WorkerSettings(
        URL,
        "redis://127.0.0.1:2/0",
        "tiny",
        "w",
        engine,
        lease=20.0,
        drain=5.0,
        max_deaths=7,
        breaker=False,
        placement="prefix",
    )


def test_a_placement_that_there_is_not_is_misuse() -> None:
    result = invoke(*WORKER, "--placement", "random")
    assert result.exit_code == 2
    assert "must be prefix or off" in " ".join(result.output.replace("│", " ").split())


def test_settings_of_several_machines_are_refused_by_their_options_before_servers_and_models_are_tried(
    tmp_path: Path,
) -> None:
    (tmp_path / "short").write_text("short")
    machines = ("--pipeline-parallel", "2", "--nodes", "2", "--ranks-secret")
    for command in ((*WORKER, *machines), ("ranks", "--model", "no/such", "--lead", "a", "--node", "1", machines[-1])):
        for secret, why in (("none", "No such file"), ("short", "5 bytes; 16 is the least")):
            result = invoke(*command, str(tmp_path / secret))
            assert isinstance(result.exception, Failure)
            assert str(result.exception).startswith("--ranks-secret: ")
            assert why in str(result.exception)
    result = invoke(*WORKER, *machines, str(tmp_path / "short"), "--ranks-address", "10.0.0.5")
    assert str(result.exception).startswith("--ranks-address is '10.0.0.5'; it must be HOST:PORT")
    assert "--pipeline-parallel=1 with --tensor-parallel=1 cannot be divided among --nodes=2" in str(
        invoke(*WORKER, "--nodes", "2").exception
    )


def test_what_is_not_said_is_the_settings_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = WorkerSettings(URL, URL, "tiny", "w")
    assert dataclasses.replace(told(monkeypatch, *WORKER), name="w") == usual


@pytest.mark.parametrize("option", ["--drain-timeout", "--reader-lease"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300"])
def test_what_is_no_number_of_seconds_is_misuse(option: str, seconds: str) -> None:
    result = invoke("gateway", "--broker", URL, option, seconds)
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.parametrize("command", ["worker", "sweeper"])
@pytest.mark.parametrize("name", ["", "a b", "a\n", "wörker", "a" * 513])
def test_a_name_that_logs_and_leases_cannot_show_is_misuse(command: str, name: str) -> None:
    result = invoke(command, "--broker", URL, "--name", name)
    assert result.exit_code == 2
    assert "--name" in result.output
    assert "without spaces" in result.output


@pytest.mark.parametrize("command", ["gateway", "sweeper"])
def test_a_bucket_that_is_missing_is_refused_at_the_start(command: str, valkey_url: str, aws: Aws) -> None:
    place = f"s3://nowhere?region=us-east-1&endpoint_url={aws.url}"
    port = ["--port", "0"] if command == "gateway" else []
    result = invoke(command, "--broker", valkey_url, "--files-dir", place, *port)
    assert isinstance(result.exception, Failure)
    assert "there is no bucket nowhere" in str(result.exception)
