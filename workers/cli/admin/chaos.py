"""`penstock chaos`: harm done to a staging system on purpose, and proof that it kept its promises."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from workers.cli.exits import MINDER_STATUS, Exit, Failure
from workers.cli.options import Url, finite
from workers.cli.processes import Broker, Store


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    example = (
        "penstock chaos tiny --broker redis://stage:6379/0 --url http://stage:8000 "
        "--process worker:w1=/run/w1.pid --process worker:w2=/run/w2.pid --faults kill,pause --minutes 10 --i-know"
    )
    hooks = (
        "With Kubernetes: --process worker:penstock-worker-0 --process worker:penstock-worker-1 "
        "--exec kill='kubectl delete pod {name} --grace-period=0 --force'"
    )
    epilog = f"Example: {example}\n\n{hooks}\n\n{MINDER_STATUS}"
    app.command(epilog=epilog, rich_help_panel="Processes")(chaos)


def chaos(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a model that is served there.")],
    broker: Broker,
    store: Store = None,
    url: Url = "http://127.0.0.1:8000",
    process: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE:NAME[=PID]",
            help="What may be harmed: worker, gateway, sweeper, broker or store; a worker by its --name. PID is a "
            "number or a file with one, of what it is said to be; without it, --exec says how to reach it. May be "
            "repeated.",
        ),
    ] = None,
    commands: Annotated[
        list[str] | None,
        typer.Option(
            "--exec",
            metavar="VERB=COMMAND",
            help="How to kill, pause, resume, drain or start a process: {name} and {role} are put in. May be repeated.",
        ),
    ] = None,
    faults: Annotated[
        str | None, typer.Option(help="kill, pause, drain, restart (of a server), with commas; unset: all that can be.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, callback=finite, help="Of load under faults.")] = 2.0,
    kills: Annotated[int | None, typer.Option(min=1, help="Go on until so many processes were killed.")] = None,
    pause: Annotated[float, typer.Option(min=0.1, callback=finite, help="Longest time between two faults (s).")] = 15.0,
    seed: Annotated[int, typer.Option(help="The same seed does the same at the same times.")] = 1,
    replay: Annotated[Path | None, typer.Option(help="A plan.json, in place of a seed.")] = None,
    lease: Annotated[float, typer.Option(min=1, callback=finite, help="The workers' --lease.")] = 10.0,
    open_tasks: Annotated[int, typer.Option(min=1, help="Tasks that are kept under way.")] = 8,
    longest: Annotated[int, typer.Option(min=8, help="Longest output, in tokens.")] = 300,
    alone: Annotated[
        bool, typer.Option("--alone", help="Nobody else uses the system: judge also what is left behind, and memory.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="For plan, journals and report; unset: a new one in the temporary directory.")
    ] = None,
    i_know: Annotated[bool, typer.Option("--i-know", help="Do it. Without this, it is only shown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Kill, stop and drain processes of a staging system under load, and prove that nothing was lost or came twice.

    Never on a system that matters: it is meant to survive, and this is how to find out. Tasks of many kinds are asked
    for and read in all ways there are; in the end each is run once more in quiet, and the outputs are compared, to the
    bit: start the workers with --deterministic. Exit status 1: a promise was broken.
    """
    import tempfile

    from redis.exceptions import RedisError

    from producers.connection.connect import connect, shown
    from producers.contract import keys
    from workers.chaos.load import Load
    from workers.chaos.operated import Operated, Process, say_plan
    from workers.chaos.plan import Plan, draw
    from workers.chaos.trial import Trial
    from workers.cli.client import Gateway

    try:
        hooks = _hooks(commands or [])
        processes = [Process.parse(text, hooks) for text in process or []]
        if not processes:
            raise Failure("nothing to harm: name at least one --process")
        names = [one.name for one in processes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise Failure(f"two processes are called {twice[0]}: a name is one process's")
        system = Operated(processes, broker)
        plan = (
            Plan.read(replay)
            if replay
            else draw(
                seed, 60 * minutes, system.targets, kinds=_kinds(faults), lease=lease, kills=kills, pause=(0.5, pause)
            )
        )
        system.check(plan)
        system.look()
        server = connect(store or broker)
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
    servers = " and ".join(dict.fromkeys(shown(one) for one in (broker, store or broker)))
    typer.echo(f"To the system of {servers} and {url}, under load, within {plan.seconds:.0f} s:", err=True)
    say_plan(lambda line: typer.echo(line, err=True), plan.faults, processes)
    if not i_know:
        raise Failure("nothing was done; if this is a system that may be harmed, say --i-know")
    folder = folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "journals").exists():
        raise Failure(f"{folder} has the journals of another run; choose another --folder")
    load = Load(plan.seed, model, 40, longest)
    gateway = Gateway(url)
    trial = Trial(gateway.url, broker, store or broker, load, plan, folder, open_tasks=open_tasks, alone=alone)
    # From `timeout`, or whoever ends a job: what stands still has to go on, as at Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with server:
            if not server.hexists(keys.MODELS, model):
                raise Failure(f"no worker has ever announced {model!r} there: nothing was done")
        gateway.models()
        report = trial.run(system, f"penstock {_line()}", lambda line: typer.echo(line, err=True))
    except RedisError as error:
        raise Failure(f"no answer from {servers} ({error}); journals: {folder}", Exit.UNREACHABLE) from error
    except KeyboardInterrupt:
        raise Failure(f"interrupted: nothing was judged; plan and journals: {folder}", Exit.INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    typer.echo(json.dumps(report.json(), indent=1) if as_json else report.markdown())
    for violation in report.violations[:40]:
        typer.echo(str(violation), err=True)
    typer.echo(f"plan, journals and report: {folder}", err=True)
    if report.count("outputs_equal_the_quiet_run"):
        typer.echo("equal outputs are promised of workers that all have --deterministic and one fingerprint", err=True)
    if not report.fine:
        raise Failure(
            f"{len(report.violations)} promises were broken; the same again: --replay {folder / 'plan.json'}",
            Exit.TASK_FAILED,
        )


def _hooks(commands: list[str]) -> dict[str, str]:
    from workers.chaos.operated import VERBS

    found = {}
    for text in commands:
        verb, equals, command = text.partition("=")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise Failure(f"--exec is {text!r}: {error}") from None
        if not equals or verb not in VERBS or not words:
            raise Failure(f"--exec is {text!r}; it must be VERB=COMMAND, with a verb of {', '.join(VERBS)}")
        found[verb] = command
    return found


def _kinds(asked: str | None) -> list[str]:
    from workers.chaos.operated import NEEDS

    if asked is None:
        return list(NEEDS)
    kinds = [kind.strip() for kind in asked.split(",")]
    if unknown := [kind for kind in kinds if kind not in NEEDS]:
        raise Failure(f"--faults names {', '.join(unknown)}; from outside there are {', '.join(NEEDS)}")
    return kinds


def _line() -> str:
    """What was typed, for whoever reads the report: without passwords, which are in URLs."""
    from producers.connection.connect import shown

    return shlex.join(shown(word) if "://" in word else word for word in sys.argv[1:])
