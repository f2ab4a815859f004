"""`penstock up` and `worker --gpus`: what is said on their lines is what each process is told."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from producers.gateway.settings import GatewaySettings
from tests.workers.cli.conftest import invoke, told, worker_programs
from workers.autoscaler.policy import Rules
from workers.cli import up
from workers.cli.exits import Failure
from workers.cli.gpus import Chosen
from workers.cli.options import DEFAULT_URL
from workers.cli.system import System
from workers.library import ResolvedModel
from workers.library.reference import BUNDLED
from workers.processes import PENSTOCK
from workers.processes.standby import IDLE_S
from workers.processes.supervisor import Program
from workers.settings import WorkerSettings

URL = "redis://127.0.0.1:1/0"
Conducted = Callable[..., System]


@pytest.fixture
def conducted(monkeypatch: pytest.MonkeyPatch) -> Conducted:
    """The system that `penstock up` would start."""

    def run(*options: str) -> System:
        made: list[System] = []

        async def conduct(system: System, use: object) -> bool:
            made.append(system)
            return False

        monkeypatch.setattr("workers.cli.system.conduct", conduct)
        result = invoke("up", *options)
        assert result.exit_code == 0, (result.output, result.exception)
        made[0].broker = made[0].store = URL
        return made[0]

    return run


def of(monkeypatch: pytest.MonkeyPatch, program: Program) -> WorkerSettings:
    """The settings that this worker would run with."""
    argv = tuple(program.argv)
    assert argv[: len(PENSTOCK)] == PENSTOCK
    return told(monkeypatch, *argv[len(PENSTOCK) :], env=program.env)


SAID = (
    *("--max-worker-deaths", "7", "--max-step-seconds", "45", "--no-breaker", "--core-watts", "4.5"),
    *("--placement", "prefix"),
    *("--engine-process", "on"),
    *("--spot-provider", "aws", "--spot-metadata-url", "http://imds"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-non-priority-step-tokens", "32"),
    *("--kv-cache-bytes", "1000000", "--memory-share", "0.5"),
    *("--dtype", "float32", "--quantization", "none", "--deterministic", "--threads", "3", "--drain-timeout", "5"),
    *("--speculate", "draft", "--draft-model", "tiny-draft", "--speculate-tokens", "3"),
)


def test_each_worker_is_told_what_was_said(conducted: Conducted, monkeypatch: pytest.MonkeyPatch) -> None:
    system = conducted("--model", "tiny", "--model", "two=tiny", "--workers", "2", "--health-port", "9100", *SAID)
    workers = [of(monkeypatch, program) for program in worker_programs(system.plan, system.urls)]
    assert [(one.model.partition("=")[0], one.health_port) for one in workers] == [
        ("tiny", 9100),
        ("tiny", 9101),
        ("two", 9102),
        ("two", 9103),
    ]
    for one in workers:
        assert (one.max_deaths, one.step_limit, one.drain, one.core_watts) == (7, 45.0, 5.0, 4.5)
        assert one.engine_process
        assert one.placement == "prefix"
        assert (one.spot_notice, one.spot_endpoint) == ("aws", "http://imds")
        assert one.engine == {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_non_priority_step_tokens": 32,
            "kv_cache_bytes": 1_000_000,
            "memory_share": 0.5,
            "dtype": "float32",
            "quantization": "none",
            "deterministic": True,
            "speculate": "draft",
            "draft_model": "tiny-draft",
            "speculate_tokens": 3,
            "threads": 3,
        }


def test_what_was_not_said_is_left_to_the_worker(conducted: Conducted, monkeypatch: pytest.MonkeyPatch) -> None:
    system = conducted()
    (program,) = worker_programs(system.plan, system.urls)
    settings = of(monkeypatch, program)
    assert settings.files_dir is not None, "up's own, for all its processes"
    assert settings == WorkerSettings(URL, URL, settings.model, settings.name, drain=30.0, files_dir=settings.files_dir)


@pytest.mark.parametrize(
    ("options", "shares", "in_turns"),
    [
        ((), [0.5, 0.5], True),
        (("--share", "0.7", "--share", "0.2"), [0.7, 0.2], True),
        (("--share", "0.7", "--share", "0.2", "--threads", "2"), [0.7, 0.2], True),
        (("--min", "0", "--max", "1"), [0.5, 0.5], True),
        (("--threads", "1"), [None, None], False),
        (("--workers", "2"), [None, None], False),
    ],
)
def test_models_of_one_device_take_turns_unless_several_workers_or_threads_are_asked_for(
    conducted: Conducted,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    shares: list[float | None],
    in_turns: bool,
) -> None:
    system = conducted("--model", "tiny", "--model", "two=tiny", *options)
    workers = [of(monkeypatch, program) for program in worker_programs(system.plan, system.urls)]
    engines = [worker.engine for worker in workers if worker.name.endswith(".1")]
    assert [engine.get("share") for engine in engines] == shares
    folders = {engine.get("turns") for engine in engines}
    assert (folders != {None}) == in_turns
    assert len(folders) == 1
    if in_turns:
        assert not Path(str(folders.pop())).exists(), "it goes when the system has stopped"
        assert all(engine.get("threads") in (None, 2) for engine in engines), "each computes with all cores"


def test_a_single_model_can_leave_memory_for_others(conducted: Conducted, monkeypatch: pytest.MonkeyPatch) -> None:
    system = conducted("--share", "0.4")
    (program,) = worker_programs(system.plan, system.urls)
    assert of(monkeypatch, program).engine == {"share": 0.4}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--share", "0.5", "--share", "0.6"), "--share: 0.5 + 0.6 = 1.1"),
        (("--share", "0.5", "--share", "0.2", "--max", "3"), "leave out --workers or --max 3"),
        (("--share", "0.5", "--share", "0.2", "--workers", "2"), "leave out --workers or --max 2"),
    ],
)
def test_shares_that_cannot_be_are_refused(options: tuple[str, ...], reason: str) -> None:
    result = invoke("up", "--model", "tiny", "--model", "two=tiny", *options)
    assert isinstance(result.exception, Failure)
    assert reason in str(result.exception)


def test_the_gateway_is_told_what_was_said(conducted: Conducted, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[GatewaySettings] = []
    monkeypatch.setattr("producers.gateway.serve", lambda settings, listener, ready: given.append(settings))
    monkeypatch.setattr("workers.cli.gateway.look_at_servers", lambda *_: None)
    origins = ("https://a.example", "http://localhost:3000")
    said = ("--max-queued", "60", "--max-queued-per-tenant", "6", "--max-queued-in-all", "0", "--max-wait", "9")
    said += (*(f"--cors-origin={origin}" for origin in origins), "--proxy-headers", "10.0.0.0/8")
    said += ("--proxy-headers", "::1")
    system = conducted(*said, "--model", "tiny", "--model", "two=tiny")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        system._listener = listener.dup()
        program = system._gateway()
        result = invoke(*program.argv[len(PENSTOCK) :], env=program.env)
        system._listener.detach()  # the command has closed what it was given
    assert result.exit_code == 0, (result.output, result.exception)
    assert (given[0].max_queued, given[0].max_queued_per_tenant) == (60, 6)
    assert (given[0].max_queued_in_all, given[0].max_wait) == (0, 9.0)
    assert given[0].proxy_headers == ("10.0.0.0/8", "::1")
    assert (given[0].cors_origins, given[0].awaited) == (origins, ("tiny", "two"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (("--max-step-seconds", "inf"), "is not a length of time"),
        (("--drain-timeout", "inf"), "is not a length of time"),
        (("--spot-provider", "gcp"), "the only provider is aws"),
        (("--spot-metadata-url", "http://imds"), "must be a URL (http://...), and needs --spot-provider"),
        (("--health-port", "65535", "--workers", "2"), "65535 is the last"),
        (("--max-queued", "-1"), "should be greater than or equal to 0"),
        (("--cors-origin", "https://a.example/"), "is not an origin"),
        (("--cors-origin", "a.example"), "is not an origin"),
        (("--proxy-headers", "proxy.example"), "give an address, a network"),
    ],
)
def test_what_no_process_would_take_is_refused_before_any_is_started(said: tuple[str, ...], why: str) -> None:
    result = invoke("up", *said)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())  # as if it stood on one line


@pytest.mark.parametrize(
    ("said", "runs"),
    [
        ((), Rules(min=1, max=1)),
        (("--workers", "3"), Rules(min=3, max=3)),
        (("--max", "2"), Rules(min=0, max=2, cheap_start=3600.0)),
        (("--min", "1", "--max", "4", "--cool-down", "20"), Rules(min=1, max=4, cool_down=20.0, cheap_start=3600.0)),
        (("--max", "2", "--patience", "0.1"), Rules(min=0, max=2, patience=0.1, cheap_start=0.0)),
        (("--max", "2", "--worth", "0.5"), Rules(min=0, max=2, worth=0.5, cheap_start=3600.0)),
    ],
)
def test_as_many_workers_run_as_was_said(conducted: Conducted, said: tuple[str, ...], runs: Rules) -> None:
    assert conducted(*said).plan.rules == runs


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ((), None),
        (("--standby",), IDLE_S),
        (("--max", "2"), IDLE_S),
        (("--max", "2", "--standby-idle", "60"), 60.0),
        (("--max", "2", "--no-standby"), None),
    ],
)
def test_a_standby_is_kept_where_workers_come_and_go(
    conducted: Conducted, said: tuple[str, ...], seconds: float | None
) -> None:
    assert conducted(*said).plan.standby_s == seconds


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (("--min", "3", "--max", "2"), "--min is 3 and --max is 2; they must be 0 <= --min <= --max"),
        (("--min", "1"), "--min 1 needs --max"),
        (("--workers", "2", "--max", "4"), "--workers 2 is a fixed number of workers"),
        (("--cool-down", "5"), "--cool-down needs --min or --max"),
        (("--worth", "5"), "--worth needs --min or --max"),
        (("--max", "2", "--cool-down", "0"), "--cool-down is 0; it must be above 0"),
        (("--standby-idle", "5"), "add --standby"),
        (("--max", "2", "--no-standby", "--standby-idle", "5"), "add --standby"),
        (("--port", "8001", "--health-port", "8000", "--workers", "2"), "port 8001 is the gateway's"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(said: tuple[str, ...], why: str) -> None:
    result = invoke("up", *said)
    assert isinstance(result.exception, Failure)
    assert why in str(result.exception)


def test_each_gpus_worker_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Program] = []

    async def supervise(programs: list[Program], say: object, drain: float) -> int:
        asked.extend(programs)
        return 0

    monkeypatch.setattr("workers.cli.supervised.supervise", supervise)
    monkeypatch.setattr("workers.cli.gpus.gpus_here", list)
    monkeypatch.setattr("workers.cli.gpus.choose", lambda said, here, ranks: (Chosen("gpu0", "0"), Chosen("gpu1", "1")))
    said = ["worker", "--broker", URL, "--model", "tiny", "--gpus", "all", "--name", "node"]
    for port, each in (("9100", [9100, 9101]), ("0", [0, 0])):
        asked.clear()
        result = invoke(*said, "--health-port", port)
        assert result.exit_code == 0, (result.output, result.exception)
        workers = [of(monkeypatch, program) for program in asked]
        assert [(one.name, one.health_port) for one in workers] == [("node.gpu0", each[0]), ("node.gpu1", each[1])]
        assert [one.broker for one in workers] == [URL, URL]


@pytest.mark.parametrize(("said", "folder"), [(("--data-dir", "d"), "d/files"), (("--files-dir", "f"), "f")])
def test_gateway_and_sweeper_have_the_same_folder_for_files(
    conducted: Conducted, said: tuple[str, ...], folder: str
) -> None:
    system = conducted(*said)
    with socket.socket() as listener:
        system._listener = listener
        for program in (system._gateway(), system._sweeper()):
            argv = list(program.argv)
            assert argv[argv.index("--files-dir") + 1] == str(Path(folder))


@pytest.mark.parametrize(
    ("called", "on_path", "typed"),
    [
        (".venv/bin/penstock", False, ".venv/bin/penstock"),
        (".venv/bin/penstock", True, "penstock"),
        ("/lib/workers/cli/__main__.py", False, "penstock"),
    ],
)
def test_what_to_try_is_named_as_a_shell_finds_it(
    called: str, on_path: bool, typed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "penstock"
    program.touch(0o755)
    monkeypatch.setattr("sys.argv", [called, "up"])
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "/nowhere")
    model = ResolvedModel("tiny", BUNDLED / "tiny")
    assert up.first_call(DEFAULT_URL, model) == f"{typed} chat tiny"


def test_how_to_end_it_is_said_where_ctrl_c_is_not_heard() -> None:
    assert up.how_to_end() == "Ctrl-C"
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control has it for `penstock up &`
    try:
        assert up.how_to_end() == f"kill -TERM {os.getpid()}"
    finally:
        signal.signal(signal.SIGINT, heard)


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--max-num-seqs", "0", "an integer from 1 to 4096"),
        ("--memory-share", "1.5", "a number above 0, up to 1"),
        ("--speculate", "often", "one of none, lookup, draft"),
    ],
)
def test_a_setting_out_of_bounds_is_refused_before_anything_starts(option: str, value: str, wanted: str) -> None:
    for command in (["up"], ["worker", "--broker", URL, "--model", "tiny"]):
        refused = invoke(*command, option, value).exception
        assert isinstance(refused, Failure)
        assert str(refused).startswith(f"{option} is ")
        assert str(refused).endswith(f"; it must be {wanted}")
