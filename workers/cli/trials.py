"""`penstock bench` and `penstock chaos`: load and faults for a running system, from `workers.trials`.

bench puts load on it over HTTP and measures latencies, rates and goodput. chaos injects faults into a staging system
under load and checks that it kept its promises.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, OPERATOR_STATUS, Exit, Failure, touching
from workers.cli.options import DEFAULT_URL, SAMPLING, Broker, DataDir, Store, Url, finite, takes
from workers.cli.terminal import aligned, note
from workers.progress import Progress, bar

if TYPE_CHECKING:
    from redis import Redis

    from workers.cli.client import Gateway
    from workers.trials.bench.figures import Limits
    from workers.trials.bench.load import Client, Load, Sample
    from workers.trials.chaos.checker.report import Report
    from workers.trials.chaos.operated import Process


app = Commands("Operations", CALLER_STATUS)


@app.shown("penstock bench tiny --rate 20 --requests 500 --ttft-limit 0.2 --out bench.json --plot bench.svg")
@takes(sampling=[SAMPLING["temperature"]])
def bench(
    model: Annotated[str, typer.Argument(help="A model that the system serves.")],
    *,
    requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 100,
    duration: Annotated[
        float | None, typer.Option(min=0, help="Send no more requests after this many seconds.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, at random times (open loop). Unset: closed loop.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="With --rate: 1 is Poisson arrivals, less makes bursts.")
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests at a time. Unset: 8 in a closed loop, no limit in an open one."),
    ] = None,
    warm_up_requests: Annotated[int, typer.Option(min=0, help="Requests to send first and not to measure.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean prompt length; prompts are random tokens.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean output length in tokens.")] = 64,
    length_spread: Annotated[
        float, typer.Option(min=0, max=1, help="Vary lengths by up to this share of the mean, either way.")
    ] = 0.0,
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with, to measure prefix caching.")
    ] = 0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts: one text a line, or JSON lines with `prompt` and `max_tokens`."),
    ] = None,
    tiers: Annotated[str, typer.Option(help="Tiers of the requests, with weights: priority=1,batch=3.")] = "default",
    sampling: dict[str, Any],
    ttft_limit: Annotated[
        float | None, typer.Option(min=0, help="Longest TTFT of a request that counts as goodput (s).")
    ] = None,
    itl_limit: Annotated[
        float | None, typer.Option(min=0, help="Longest mean ITL of a request that counts as goodput (s).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed sends the same requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the figures and every request to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and load into this SVG file.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Put load on a running system and measure rates, latencies and goodput.

    Latencies count from the time at which a request was due, so that a stalled system does not look fast.
    """
    import asyncio

    from workers.cli.client import Gateway
    from workers.trials.bench.figures import Limits
    from workers.trials.bench.figures import plot as draw
    from workers.trials.bench.load import Load, read_prompts

    gateway = Gateway(url)
    served = {card["id"]: card for card in gateway.models()}
    if model not in served:
        raise Failure(f"{gateway.url} serves no model {model!r}; it has: {', '.join(sorted(served)) or 'none'}")
    try:
        prompt_list = read_prompts(prompts) if prompts is not None else []
    except (OSError, ValueError) as error:
        raise Failure(f"cannot use --prompts: {error}") from error
    load = Load(
        model=model,
        vocab_size=served[model]["vocab_size"],
        requests=requests + warm_up_requests,
        rate=rate,
        burstiness=burstiness,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        spread=length_spread,
        shared_prefix=shared_prefix_tokens,
        prompts=prompt_list,
        tiers=weights(tiers),
        extra=sampling,
        seed=seed,
    )
    for path in (out, plot):
        check_writable(path)
    cap = concurrency if concurrency is not None or rate is not None else 8
    limits = Limits(ttft_limit, itl_limit)
    try:
        with Progress(quiet=as_json) as progress:
            samples, client = asyncio.run(_drive(gateway.url, load, cap, duration, progress))
    except KeyboardInterrupt:
        raise Failure("interrupted; requests under way were cancelled", Exit.INTERRUPTED) from None
    figures = _figures(load, cap, gateway.url, samples, client, limits, warm_up_requests)
    if out is not None:
        each = [_each(sample) for sample in samples]
        out.write_text(json.dumps({**figures, "samples": each}) + "\n")
    if plot is not None:
        plot.write_text(draw(samples, _title(figures)))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _report(figures)
    if not figures["requests"]["completed"]:
        raise Failure(f"no request was completed: {figures['requests']['errors']}", Exit.TASK_FAILED)


async def _drive(
    url: str, load: Load, cap: int | None, duration: float | None, progress: Progress
) -> tuple[list[Sample], Client]:
    from workers.trials.bench.load import drive

    ended = failed = 0

    def note(sample: Sample) -> None:
        nonlocal ended, failed
        ended, failed = ended + 1, failed + (sample.error is not None)
        failures = f", {failed} failed" if failed else ""
        progress.show(f"{bar(ended, load.requests)}  {ended} of {load.requests} requests{failures}")

    progress.show(f"0 of {load.requests} requests")
    return await drive(url, load.schedule(), concurrency=cap, duration=duration, note=note)


def _figures(
    load: Load, cap: int | None, url: str, samples: Sequence[Sample], client: Client, limits: Limits, warm_up: int
) -> dict[str, Any]:
    from dataclasses import asdict

    from workers.trials.bench.figures import summary

    settings = {name: value for name, value in asdict(load).items() if name != "prompts"}
    settings |= {"url": url, "concurrency": cap, "warm_up": warm_up, "prompts": len(load.prompts)}
    return {**summary(samples, client, limits, warm_up), "settings": settings}


def _report(figures: dict[str, Any]) -> None:
    requests, client = figures["requests"], figures["client"]
    typer.echo(_title(figures))
    for line in aligned(_table(figures)):
        typer.echo(line)
    typer.echo(
        f"requests  {requests['completed']} completed, {requests['failed']} failed in {figures['duration_s']:.2f} s: "
        f"{_number(figures['completed_per_s'])}/s completed, {_number(figures['offered_per_s'])}/s sent\n"
        f"tokens    {figures['prompt_tokens']:,} in, {figures['output_tokens']:,} out: "
        f"{_number(figures['output_tokens_per_s'])}/s out"
    )
    for error, count in requests["errors"].items():
        typer.echo(f"          {count} x {error}")
    if goodput_line := _goodput(figures["goodput"]):
        typer.echo(goodput_line)
    typer.echo(
        f"client    {100 * client['cpu']:.0f} % of a core; its event loop was late by "
        f"{1000 * client['loop_late_p99_s']:.1f} ms (p99), so times are no finer than that"
    )
    if client["bottleneck"]:
        typer.echo("          too much of a core: these figures measure the client rather than the system")


def _table(figures: dict[str, Any]) -> list[list[str]]:
    table = [["", "mean", "p50", "p95", "p99", "max"]]
    rows = {"TTFT": "ttft", "time between tokens": "itl", "end to end": "e2e", "queue wait": "queue_wait"}
    for name, key in rows.items():
        table.append([name, *_milliseconds(figures["latency_s"][key])])
    if len(figures["tiers"]) > 1:
        for tier, latencies in figures["tiers"].items():
            table.append([f"TTFT, {tier}", *_milliseconds(latencies["ttft"])])
    return table


def _goodput(goodput: dict[str, Any]) -> str:
    """The line for goodput; empty without limits."""
    limits = {"TTFT": goodput["limits_s"]["ttft"], "between tokens": goodput["limits_s"]["itl"]}
    goals = [f"{name} at most {1000 * value:g} ms" for name, value in limits.items() if value is not None]
    share = 100 * (goodput["share"] or 0.0)
    return f"goodput   {_number(goodput['per_s'])}/s, {share:.1f} % of all: {', '.join(goals)}" if goals else ""


def _title(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    how = f"{settings['rate']:g} requests/s" if settings["rate"] is not None else "closed loop"
    cap = f", at most {settings['concurrency']} at a time" if settings["concurrency"] is not None else ""
    workload = (
        f"{settings['prompts']} prompts"
        if settings["prompts"]
        else f"{settings['prompt_tokens']} tokens in, {settings['output_tokens']} out"
    )
    return f"{settings['model']}: {how}{cap}; {workload}; {figures['requests']['sent']} requests"


def _each(sample: Sample) -> dict[str, Any]:
    same = ("number", "tier", "due", "sent", "ended", "error", "task_id", "queue_wait", "prompt_tokens")
    return {**{name: getattr(sample, name) for name in same}, "tokens": [round(at, 6) for at in sample.tokens]}


def _milliseconds(spread: dict[str, float] | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [f"{1000 * spread[name]:,.1f} ms" for name in ("mean", "p50", "p95", "p99", "max")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def weights(text: str, option: str = "--tiers") -> dict[str, float]:
    """The tiers and weights of an option. Raises Failure."""
    from producers.contract.keys import TIERS

    weight_of = {}
    for part in text.split(","):
        tier, equals, weight = part.strip().partition("=")
        try:
            weight_of[tier] = float(weight) if equals else 1.0
        except ValueError:
            weight_of[tier] = -1.0
        if tier not in TIERS or not 0 < weight_of[tier] < float("inf"):
            raise Failure(f"{option} has {part!r}; it takes {', '.join(TIERS)}, each with a weight above 0 after =")
    return weight_of


def check_writable(path: Path | None) -> None:
    """Refuses an unwritable output file before the work, rather than after it. Raises Failure."""
    if path is not None:
        with touching(path, "write"):
            path.open("a").close()


@app.shown(
    "penstock chaos tiny --broker redis://stage:6379/0 --url http://stage:8000 "
    "--process worker:w1=/run/w1.pid --process worker:w2=/run/w2.pid --faults kill,pause --minutes 10 --confirm\n\n"
    "With Kubernetes: --process worker:penstock-worker-0 --process worker:penstock-worker-1 "
    "--exec kill='kubectl delete pod {name} --grace-period=0 --force'",
    status=OPERATOR_STATUS,
)
def chaos(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The name of a model that the system serves.")],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    url: Url = DEFAULT_URL,
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
    from workers.cli.client import Gateway
    from workers.cli.servers import addresses
    from workers.trials.chaos.client import Settings
    from workers.trials.chaos.load import WAYS, WITHOUT_CELERY, Load
    from workers.trials.chaos.operated import Operated, say_plan
    from workers.trials.chaos.plan import Plan, draw
    from workers.trials.chaos.trial import OneClient, Trial

    broker, store = addresses(broker, store, data_dir)
    try:
        processes = _processes(process or [], commands or [], broker)
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
    servers = " and ".join(dict.fromkeys(shown(server_url) for server_url in (broker, store)))
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
        with Progress(quiet=as_json) as progress:

            def say(line: str) -> None:
                progress.note(line)
                progress.show(f"since then: {line}")

            progress.show("load without faults")
            report = trial.run(system, client, f"penstock {_line()}", say)
    _print_report(report, folder, as_json)


def _processes(process: list[str], commands: list[str], broker: str) -> list[Process]:
    """The processes to harm. Raises ValueError, and Failure."""
    from producers.connection.connect import is_redis, shown
    from workers.trials.chaos.operated import Process

    hooks = _hooks(commands)
    processes = [Process.parse(text, hooks) for text in process]
    if not processes:
        raise Failure("there is nothing to harm: name at least one --process")
    names = [declared.name for declared in processes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Failure(f"two processes are called {twice[0]}: give each its own name")
    if not is_redis(broker) and any(declared.role == "broker" for declared in processes):
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
    """Turns lost servers and interruptions into Failure.

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


def _print_report(report: Report, folder: Path, as_json: bool) -> None:
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

    hooks = {}
    for text in commands:
        verb, equals, command = text.partition("=")
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise Failure(f"--exec is {text!r}: {error}") from None
        if not equals or verb not in VERBS or not arguments:
            raise Failure(f"--exec is {text!r}; it must be VERB=COMMAND, with a verb of {', '.join(VERBS)}")
        hooks[verb] = command
    return hooks


def _kinds(names: str | None) -> list[str]:
    from workers.trials.chaos.operated import NEEDS

    if names is None:
        return list(NEEDS)
    kinds = [kind.strip() for kind in names.split(",")]
    if unknown := [kind for kind in kinds if kind not in NEEDS]:
        raise Failure(f"--faults names {', '.join(unknown)}; it can do {', '.join(NEEDS)}")
    return kinds


def _line() -> str:
    """The command line as typed, for the report, without the URLs' passwords."""
    from producers.connection.connect import shown

    return shlex.join(shown(word) if "://" in word else word for word in sys.argv[1:])
