"""`penstock up`: the whole system on one machine, until it is told to stop. `penstock url`: where its server is."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engine.errors import message_of, renamed
from producers.connection.local import DATA_DIR
from workers.cli.commands import Commands
from workers.cli.exits import CALLER_STATUS, PROCESS_STATUS, Failure, check_extras, refusing
from workers.cli.gateway import Auth, describe_auth, effective_auth
from workers.cli.gateway import gateway as gateway_command
from workers.cli.options import (
    DEFAULT_URL,
    ENGINE,
    MODEL,
    Broker,
    DataDir,
    FilesDir,
    Gpus,
    LogLevel,
    SecretsKey,
    Shares,
    Store,
    as_arguments,
    check_spot,
    complete_model,
    find_models,
    finite,
    health_ports,
    options_of,
    shares_of,
    takes,
)
from workers.cli.terminal import relayed
from workers.cli.worker import check_nodes, folder_of_turns
from workers.cli.worker import worker as worker_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.autoscaler.policy import Rules
    from workers.cli.local_pools import Plan
    from workers.cli.system import System
    from workers.library import ResolvedModel


#: Settings of the workers' engines. Where a model runs is decided with --gpus.
OF_ENGINES: Final = {name: field for name, field in ENGINE.items() if name != "device"}
#: Options that `up` passes on unchanged: those of the commands that it starts.
OF_WORKERS: Final = (
    "max_worker_deaths",
    "max_step_seconds",
    "engine_process",
    "no_breaker",
    "core_watts",
    "placement",
    "require_signature",
    "spot_provider",
    "spot_metadata_url",
)
OF_THE_GATEWAY: Final = (
    *("auth", "insecure", "max_queued", "max_queued_per_tenant", "max_queued_in_all", "max_wait", "cors_origin"),
    *(
        "max_streams",
        "max_streams_per_tenant",
        "proxy_headers",
        "connections_per_address",
        "max_body",
        "max_file",
        "max_file_bytes",
        "max_files",
        "max_batches",
        "max_endpoints",
        "max_task_bytes",
        "max_idempotency_keys",
        "files_redirect",
        "webhook_allow",
        "prices",
    ),
)
OF_WEBHOOKS: Final = ("webhook_allow",)


app = Commands("Start here", PROCESS_STATUS)


@app.shown("penstock up --port 8000 --data-dir ~/penstock --model tiny --min 0 --max 2")
@takes(
    engine=OF_ENGINES.values(),
    worker=options_of(worker_command, OF_WORKERS),
    gateway=options_of(gateway_command, OF_THE_GATEWAY),
)
def up(
    context: typer.Context,
    *,
    host: Annotated[str, typer.Option(help="The address that the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The gateway's port. 0: any free port.")] = 8000,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    model: Annotated[
        list[str] | None, typer.Option(help=f"{MODEL} May be repeated. Unset: tiny.", autocompletion=complete_model)
    ] = None,
    share: Shares = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Worker processes for each model, a fixed number. Unset: 1, or --min to --max."
        ),
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(
            "--min", min=0, max=64, help="Fewest workers of each model; more run while tasks wait. Unset: 0 with --max."
        ),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option("--max", min=1, max=64, help="Most workers of each model. Unset: --workers, or each of --gpus."),
    ] = None,
    cool_down: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Seconds for which fewer workers must have been enough before one ends. Unset: 300."
        ),
    ] = None,
    keep_warm: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds for which a version that was the default keeps its workers: who goes back finds them.",
        ),
    ] = 600.0,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help="With --min 0: share of its target wait (flex 300 s, batch 3600 s) after which a flex or batch task "
            "starts a worker. Unset: two cold starts, 20 s before the first one, and half of the target wait at most.",
        ),
    ] = None,
    worth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            callback=finite,
            help="With --min 0: work queued in flex and batch, in cold starts of a worker, from which on it starts one "
            "at once. Unset: 2.",
        ),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby/--no-standby",
            help="Keep one process that has imported everything, at most 400 MB, and becomes the next worker, also in "
            "place of one that dies. Unset: if --min is below --max.",
        ),
    ] = None,
    standby_idle: Annotated[
        float | None,
        typer.Option(
            min=1, callback=finite, help="Seconds after which the standby ends if no worker started. Unset: 3600."
        ),
    ] = None,
    gpus: Gpus = None,
    engine: dict[str, Any],
    worker: dict[str, Any],
    health_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Serve the first worker's /livez and /readyz on this port, and each further worker's on the next one, "
            "model by model. Unset: no port.",
        ),
    ] = None,
    gateway: dict[str, Any],
    files_dir: FilesDir = None,
    secrets_key: SecretsKey = None,
    sources: Annotated[
        Path | None, typer.Option(help="Run the event sources of this TOML file, too (docs/use/sources.md).")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that running tasks may go on after Ctrl-C.")
    ] = 30.0,
    log_level: LogLevel = "warning",
) -> None:
    """Start the whole system here: Valkey, a gateway, workers, a sweeper, webhooks. Ctrl-C drains and stops it.

    Without --broker, an embedded Valkey server holds queues, records and results, in --data-dir; with SQS as the broker
    and no --store, records and results. With --min 0 it starts with no worker: the first task starts one, and without
    tasks it ends again. Queued tasks are kept for the next start.
    """
    import asyncio
    import os
    from functools import partial

    from workers.cli.gpus import choose, gpus_here
    from workers.cli.servers import changes_logged_to, checked_level, set_up_logging, use_secrets_key
    from workers.processes import UMASK
    from workers.runtime.cold_start import COLD_START

    data_dir = data_dir or DATA_DIR
    check_extras("gateway", "worker", "webhooks")
    from workers.cli.local_pools import Plan
    from workers.cli.system import System, conduct

    if store is not None and broker is None:
        raise Failure("--store needs --broker; without them the embedded Valkey server is both")
    check_spot(worker.get("spot_provider"), worker.get("spot_metadata_url"))
    asks = effective_auth(gateway.get("auth"), "insecure" in gateway, host)
    level = checked_level(log_level)
    set_up_logging(level, "autoscaler | ")  # nothing else in this process logs
    use_secrets_key(secrets_key)

    ranks = engine.get("tensor_parallel", 1) * engine.get("pipeline_parallel", 1) // engine.get("nodes", 1)
    chosen = choose(gpus, gpus_here(), max(1, ranks)) if gpus is not None else ()
    names = model or ["tiny"]
    if len(chosen) % len(names):
        raise Failure(f"{len(chosen)} GPUs cannot be shared evenly by {len(names)} models")
    scaling = {"cool_down": cool_down, "patience": patience, "worth": worth}
    rules = _rules(workers, min_workers, max_workers, scaling, len(chosen) // len(names))
    check_nodes(engine.get("nodes"), rules.max * len(names))
    shares = shares_of(names, share)
    if share and (chosen or rules.max > 1):
        raise Failure(
            "--share is for models with one worker each on one device: leave out "
            + ("--gpus, and show them the GPU by CUDA_VISIBLE_DEVICES" if chosen else f"--workers or --max {rules.max}")
        )
    in_turns = len(names) > 1 and rules.max == 1 and not chosen and (bool(share) or "threads" not in engine)
    idle = _standby_s(standby, standby_idle, rules)
    ports = health_ports(health_port, rules.max * len(names))
    if port in ports:
        raise Failure(
            f"port {port} is the gateway's, and --health-port {health_port} would give it to a worker's /readyz too"
        )
    models = find_models(names, lambda line: relayed("up", line))
    if "draft_model" in engine:  # downloaded once here, not in each worker
        find_models([engine["draft_model"]], lambda line: relayed("up", line))
    plan = Plan(
        models,
        data_dir,
        host,
        port,
        broker,
        store,
        rules,
        True,
        idle,
        chosen,
        drain_timeout,
        level,
        worker_options=tuple(as_arguments(context, only=(*OF_WORKERS, *OF_ENGINES))),
        gateway_options=tuple(as_arguments(context, only=OF_THE_GATEWAY)),
        webhooks_options=tuple(as_arguments(context, only=OF_WEBHOOKS)),
        health_ports=tuple(ports),
        files_dir=files_dir,
        sources=sources,
        shares=tuple(shares) if share or in_turns else (),
        keep_warm_s=keep_warm,
    )

    os.umask(UMASK)  # not before: other users may serve a model that was pulled
    COLD_START.mark("imports")
    server = "an embedded Valkey server" if plan.embedded else "the broker that was given"
    relayed(
        "up",
        f"starting {server}, a gateway, a sweeper, a webhooks process, {'event sources, ' if sources else ''}"
        f"{rules.min * len(models)} worker(s) for {', '.join(model.name for model in models)}",
    )
    with ExitStack() as stack:
        if plan.embedded:
            stack.enter_context(changes_logged_to(data_dir / "audit.log"))
        if in_turns:
            plan = replace(plan, turns=stack.enter_context(folder_of_turns()))
        finished = asyncio.run(conduct(System(plan, relayed), partial(_serve, asks=asks)))
    assert not finished, "it is used until a signal comes"
    relayed("up", "stopped; queued tasks are kept for the next start")


class Server(StrEnum):
    """A server that has a URL."""

    BROKER = "broker"
    STORE = "store"


@app.shown("export BROKER_URL=$(penstock url)", status=CALLER_STATUS)
def url(
    which: Annotated[Server, typer.Argument(help="Its broker, or its store, where that is another server.")] = (
        Server.BROKER
    ),
    data_dir: DataDir = None,
) -> None:
    """Print the URL of a `penstock up` on this machine, with its password: for Celery and other programs."""
    from producers.connection.local import urls_in

    with refusing(ValueError):
        broker, store = urls_in(data_dir or DATA_DIR)
    typer.echo(broker if which is Server.BROKER else store)


async def _serve(system: System, asks: Auth) -> None:
    import asyncio

    from workers.runtime.cold_start import COLD_START

    models = [model.name for model in system.plan.models]
    kept = f", kept in {system.plan.data_dir}" if system.plan.embedded else ""
    store = "" if system.store == system.broker else f"  store   {_masked(system, system.store)}{kept}\n"
    health = "".join(f" http://127.0.0.1:{port}/readyz" for port in system.plan.health_ports if port is not None)
    typer.echo(
        f"\nPenstock is ready at {system.url}\n"
        f"  start   {COLD_START}\n"
        f"  models  {', '.join(models)}{_shares(system.plan)}\n"
        f"  auth    {describe_auth(asks, system.plan.host, own_name(), _of_the_store(system))}\n"
        f"  broker  {_masked(system, system.broker)}{kept if not store else ''}\n"
        + store
        + _whole(system)
        + f"  workers {numbers(system.plan.rules)}{health}\n"
        + "".join(f"          {child.program.name}: {child.status}\n" for child in system.children if child.status)
        + f"  webhooks to public https:// URLs{_allowed(system)}\n"
        + f"  console {system.url}/console\n"
        f"  try     {first_call(system.url, system.plan.models[0])}\n"
        f"{how_to_end()} drains and stops it.\n"
    )
    await asyncio.Event().wait()


def _shares(plan: Plan) -> str:
    """The text for models that take turns; empty for others."""
    if plan.turns is None:
        return ""
    return f", which compute in turns, by shares of {', '.join(f'{share:.2g}' for share in plan.shares)}"


def own_name() -> str:
    """The text to type for this command: `penstock`, or its path where it was called by that and is not on PATH."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "penstock" and shutil.which("penstock") is None else "penstock"


def first_call(url: str, model: ResolvedModel) -> str:
    """The command to try first at a gateway's URL: a chat if the model has a template."""
    from engine.text import ModelCard, TemplateSource
    from engine.text.config import read_config
    from engine.text.pooling import purpose

    elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
    made = purpose(model.folder, read_config(model.folder))
    if made == "embed":
        return f"{own_name()} embed {model.name} 'A penstock feeds a turbine.'{elsewhere}"
    if made == "token_classify":
        return f"{own_name()} classify {model.name} --tokens 'Marie Curie was born in Warsaw.'{elsewhere}"
    if made != "generate":
        texts = '"input": "It works well."' if made == "classify" else '"query": "rain", "documents": ["wet", "dry"]'
        body = f'{{"model": "{model.name}", {texts}}}'
        return f"curl {url}/v1/{made} -H 'Content-Type: application/json' -d '{body}'"
    if TemplateSource.from_bytes(ModelCard.tokenizer_files(model.folder)) is not None:
        return f"{own_name()} chat {model.name}{elsewhere}"
    return f"{own_name()} submit {model.name} 'Once upon a time' --stream{elsewhere}"


def _masked(system: System, url: str) -> str:
    """A server's URL without what must not be read over a shoulder, or in a log."""
    from producers.connection.connect import shown

    embedded = system.plan.embedded and url == system.store
    return shown(url).replace("://", "://:***@", 1) if embedded else shown(url)


def _whole(system: System) -> str:
    """The line with the command that prints the embedded server's URL; empty without such a server."""
    if not system.plan.embedded:
        return ""
    which = "" if system.store == system.broker else " store"
    return f"          its whole URL, for Celery: {own_name()} url{which}{_of_the_store(system)}\n"


def _rules(
    workers: int | None,
    min_workers: int | None,
    max_workers: int | None,
    scaling: Mapping[str, float | None],
    gpus: int,
) -> Rules:
    """The number of workers of each model. `scaling`: other rules, None where they are unset; `gpus`: of each model; 0
    if no GPU was named. Raises Failure."""
    from workers.autoscaler.policy import Rules
    from workers.autoscaler.pools import cheap_start

    scaled = min_workers is not None or max_workers is not None
    if workers is not None and scaled:
        raise Failure(f"--workers {workers} is a fixed number of workers; leave it out with --min and --max")
    if gpus and workers is not None:
        raise Failure("--gpus starts one worker for each GPU; leave --workers out")
    if gpus and max_workers is not None and max_workers > gpus:
        raise Failure(
            f"--max is {max_workers}, and each model has {gpus} of the GPUs; each worker needs one of its own"
        )
    given: dict[str, Any] = {name: value for name, value in scaling.items() if value is not None}
    if not scaled:
        for name in given:
            option = f"--{name.replace('_', '-')}"
            raise Failure(f"{option} needs --min or --max: without them the number of workers never changes")
        min_workers = max_workers = gpus or workers or 1
    elif max_workers is None:
        if not gpus:
            raise Failure(f"--min {min_workers} needs --max, the most workers that may run")
        max_workers = gpus
    more: dict[str, Any] = cheap_start(given, local=True) if scaled else {}
    try:
        rules = Rules(min=min_workers or 0, max=max_workers)
        return replace(rules, **given, **more)
    except ValueError as error:
        options = {name: f"--{name.replace('_', '-')}" for name in ("min", "max", *scaling)}
        raise Failure(renamed(message_of(error), options)) from error


def _standby_s(standby: bool | None, idle: float | None, rules: Rules) -> float | None:
    """The time (s) for which a standby is kept; None: there is none. Raises Failure."""
    from workers.processes.standby import IDLE_S

    keeps_standby = rules.min < rules.max if standby is None else standby
    if idle is not None and not keeps_standby:
        raise Failure("--standby-idle needs a standby: add --standby")
    return (idle or IDLE_S) if keeps_standby else None


def numbers(rules: Rules) -> str:
    """The text for the number of workers."""
    if rules.min == rules.max:
        return f"{rules.min}"
    return f"{rules.min} now; up to {rules.max} of each model run while tasks come"


def _of_the_store(system: System) -> str:
    """The options with which commands find the store; empty if they find it by themselves."""
    if system.plan.embedded:
        return "" if system.plan.data_dir == DATA_DIR else f" --data-dir {system.plan.data_dir}"
    return " --store STORE_URL"


def _allowed(system: System) -> str:
    """The text for other receivers of webhooks."""
    allowed = system.plan.webhooks_options[1::2]
    if allowed:
        return f", and to {', '.join(allowed)}"
    return "; to receivers on this machine with --webhook-allow 127.0.0.0/8"


def how_to_end() -> str:
    """The text for stopping this process. A shell without job control makes its background jobs ignore Ctrl-C."""
    import os
    import signal

    return f"kill -TERM {os.getpid()}" if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else "Ctrl-C"
