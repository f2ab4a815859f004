"""`penstock chaos`: injects faults into a staging system under load and checks that it kept its promises."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Exit, Failure
from workers.cli.options import Broker, Store, Url, finite
from workers.cli.terminal import note

if TYPE_CHECKING:
    from redis import Redis

    from workers.cli.client import Gateway
    from workers.trials.chaos.checker.report import Report
    from workers.trials.chaos.operated import Process


app = Commands("Operations", OPERATOR_STATUS)


@app.shown(
    "penstock chaos tiny --broker redis://stage:6379/0 --url http://stage:8000 "
    "--process worker:w1=/run/w1.pid --process worker:w2=/run/w2.pid --faults kill,pause --minutes 10 --confirm\n\n"
    "With Kubernetes: --process worker:penstock-worker-0 --process worker:penstock-worker-1 "
    "--exec kill='kubectl delete pod {name} --grace-period=0 --force'"
)
def chaos(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a model that the system serves.")],
    broker: Broker,
    store: Store = None,
    url: Url = "http://127.0.0.1:8000",
    process: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE:NAME[=PID]",
            help="A process to harm. ROLE: worker, gateway, sweeper, broker or store. NAME: a worker's --name. "
            "PID: its process id, or a file that holds it; without PID, --exec says how to reach it. May be repeated.",
        ),
    ] = None,
    commands: Annotated[
        list[str] | None,
        typer.Option(
            "--exec",
            metavar="VERB=COMMAND",
            help="Command to kill, pause, resume, drain or start a process; {name} and {role} are filled in. May be "
            "repeated.",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            help="Kinds of faults, with commas: kill, pause, drain, restart (servers). Unset: all possible ones."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, callback=finite, help="Minutes of load under faults.")] = 2.0,
    min_kills: Annotated[int | None, typer.Option(min=1, help="Go on until this many processes were killed.")] = None,
    max_interval: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Longest time between two faults (s).")
    ] = 15.0,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed makes the same plan of faults.")] = 1,
    plan: Annotated[Path | None, typer.Option(help="Repeat this plan.json instead of drawing a plan.")] = None,
    lease: Annotated[float, typer.Option(min=1, callback=finite, help="The workers' --lease.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks to keep under way.")] = 8,
    max_output_tokens: Annotated[int, typer.Option(min=8, help="Longest output in tokens.")] = 300,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Nobody else uses the system: check leftover keys and idle memory, too.")
    ] = False,
    report_dir: Annotated[
        Path | None, typer.Option(help="Folder for plan, journals and report. Unset: a new temporary folder.")
    ] = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Do it. Without this, the plan is only shown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Kill, pause and drain processes of a staging system under load; check that nothing was lost or duplicated.

    Never use it on a production system. It submits tasks of many kinds and reads them in every way. In the end each
    task runs once more without faults, and the outputs must be identical: start the workers with --deterministic. Exit
    status 1: a promise was broken.
    """
    from producers.broker.connect import control_url
    from producers.connection.connect import connect, is_redis, shown
    from producers.connection.local import store_of
    from workers.cli.client import Gateway
    from workers.trials.chaos.client import Settings
    from workers.trials.chaos.load import WAYS, WITHOUT_CELERY, Load
    from workers.trials.chaos.operated import Operated, say_plan
    from workers.trials.chaos.plan import Plan, draw
    from workers.trials.chaos.trial import OneClient, Trial

    try:
        processes = _processes(process or [], commands or [], broker)
        store = store_of(broker, store)
        system = Operated(processes, control_url(broker, store))
        drawn = (
            Plan.read(plan)
            if plan
            else draw(
                seed,
                60 * minutes,
                system.targets,
                kinds=_kinds(faults),
                lease=lease,
                kills=min_kills,
                pause=(0.5, max_interval),
            )
        )
        system.check(drawn)
        system.look()
        server = connect(store)
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
    servers = " and ".join(dict.fromkeys(shown(one) for one in (broker, store)))
    note(f"Faults for the system at {servers} and {url}, under load, within {drawn.seconds:.0f} s:")
    say_plan(note, drawn.faults, processes)
    if not confirm:
        raise Failure("nothing was done; if this system may be harmed, say --confirm")
    folder, gateway = _folder(report_dir), Gateway(url)
    load = Load(drawn.seed, model, 40, max_output_tokens, ways=tuple(WAYS) if is_redis(broker) else WITHOUT_CELERY)
    trial = Trial(control_url(broker, store), store, drawn, folder, alone=exclusive)
    settings = Settings(*("client", str(trial.journals), gateway.url, broker, store, load), open_tasks=concurrency)
    with _telling(servers, folder), contextlib.closing(OneClient(settings, folder)) as client:
        _look_for(model, server, gateway)
        report = trial.run(system, client, f"penstock {_line()}", note)
    _tell(report, folder, as_json)


def _processes(process: list[str], commands: list[str], broker: str) -> list[Process]:
    """The processes to harm. Raises ValueError, and Failure."""
    from producers.connection.connect import is_redis, shown
    from workers.trials.chaos.operated import Process

    hooks = _hooks(commands)
    processes = [Process.parse(text, hooks) for text in process]
    if not processes:
        raise Failure("there is nothing to harm: name at least one --process")
    names = [one.name for one in processes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Failure(f"two processes are called {twice[0]}: give each its own name")
    if not is_redis(broker) and any(one.role == "broker" for one in processes):
        raise Failure(f"{shown(broker)} has no process that could be harmed; its books are on the store: name that")
    return processes


def _folder(report_dir: Path | None) -> Path:
    """An existing folder without the journals of another run. Raises Failure."""
    import tempfile

    folder = report_dir or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "journals").exists():
        raise Failure(f"{folder} has the journals of another run; choose another --report-dir")
    return folder


def _look_for(model: str, store: Redis, gateway: Gateway) -> None:
    """Raises Failure where nobody serves the model, or no gateway answers: such a run would prove every promise."""
    from producers.contract import keys

    with store:
        if not store.hexists(keys.MODELS, model):
            raise Failure(f"no worker has ever announced {model!r} there: nothing was done")
    gateway.models()


@contextlib.contextmanager
def _telling(servers: str, folder: Path) -> Iterator[None]:
    """Within it, lost servers and interruptions raise Failure.

    So does SIGTERM, from `timeout` or a job's end: paused processes must be resumed, as at Ctrl-C.
    """
    from redis.exceptions import RedisError

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except RedisError as error:
        raise Failure(f"no answer from {servers} ({error}); journals: {folder}", Exit.UNREACHABLE) from error
    except KeyboardInterrupt:
        raise Failure(f"interrupted: nothing was judged; plan and journals: {folder}", Exit.INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(report: Report, folder: Path, as_json: bool) -> None:
    """Print the report. Raises Failure if a promise was broken."""
    typer.echo(json.dumps(report.json(), indent=1) if as_json else report.markdown())
    for violation in report.violations[:40]:
        note(str(violation))
    note(f"plan, journals and report: {folder}")
    if report.count("outputs_equal_the_quiet_run"):
        note("equal outputs are promised only if all workers have --deterministic and the same fingerprint")
    if not report.fine:
        raise Failure(
            f"{len(report.violations)} promises were broken; to repeat the run: --plan {folder / 'plan.json'}",
            Exit.TASK_FAILED,
        )


def _hooks(commands: list[str]) -> dict[str, str]:
    from workers.trials.chaos.operated import VERBS

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
    from workers.trials.chaos.operated import NEEDS

    if asked is None:
        return list(NEEDS)
    kinds = [kind.strip() for kind in asked.split(",")]
    if unknown := [kind for kind in kinds if kind not in NEEDS]:
        raise Failure(f"--faults names {', '.join(unknown)}; it can do {', '.join(NEEDS)}")
    return kinds


def _line() -> str:
    """The command line as typed, for the report, without the URLs' passwords."""
    from producers.connection.connect import shown

    return shlex.join(shown(word) if "://" in word else word for word in sys.argv[1:])
