"""`penstock worker`, `gateway` and `sweeper`: one process each, for the Procfile and for whoever runs many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from workers.cli.exits import PROCESS_STATUS, Failure, needs
from workers.cli.models.references import MODEL, complete_model
from workers.cli.options import (
    CorsOrigin,
    Deterministic,
    Device,
    DraftModel,
    DType,
    Gpus,
    KvCacheBytes,
    KvCacheDType,
    MaxBatchedTokens,
    MaxDeaths,
    MaxNumSeqs,
    MaxQueued,
    MaxQueuedPerTenant,
    MemoryShare,
    Quantization,
    Speculate,
    SpeculateTokens,
    SpotEndpoint,
    SpotNotice,
    StepLimit,
    Threads,
    UnhurriedTokens,
    check_spot,
    finite,
    health_ports,
    process_name,
    said_again,
    speculation,
)

if TYPE_CHECKING:
    from producers.sweeper.sweeper import SweeperSettings

Broker = Annotated[
    str,
    typer.Option(
        envvar="BROKER_URL",
        help="The Redis or Valkey server with the queues: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../NAME/DB.",
    ),
]
#: Of commands that mind a system: without it, that of `penstock up` here.
AnyBroker = Annotated[
    str | None,
    typer.Option(
        envvar="BROKER_URL", help="The server with the queues; unset: that of `penstock up` in this directory."
    ),
]
Store = Annotated[
    str | None, typer.Option(envvar="STORE_URL", help="The one with records and streams; unset: the broker.")
]
#: -P: a folder named `workers` where the user happens to be is not ours.
PENSTOCK: Final = (sys.executable, "-P", "-m", "workers.cli")
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    examples: dict[Callable[..., None], str] = {
        worker: "penstock worker --broker redis://10.0.0.5:6379/0 --model tiny --max-num-seqs 32",
        gateway: "penstock gateway --broker redis://10.0.0.5:6379/0 --host 0.0.0.0 --port 8000",
        sweeper: "penstock sweeper --broker redis://10.0.0.5:6379/0",
    }
    for command, example in examples.items():
        epilog = f"Example: {example}\n\n{PROCESS_STATUS}"
        app.command(epilog=epilog, rich_help_panel="Processes")(command)


def worker(
    context: typer.Context,
    broker: Broker,
    model: Annotated[str, typer.Option(help=MODEL, autocompletion=complete_model)],
    store: Store = None,
    name: Annotated[
        str | None, typer.Option(callback=process_name, help="Of this process, in leases and logs; unset: HOST.PID.")
    ] = None,
    lease: Annotated[
        float, typer.Option(min=1, callback=finite, help="Seconds of silence after which its tasks go to others.")
    ] = 10.0,
    drain: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that running tasks may go on at SIGTERM.")
    ] = 30.0,
    max_deaths: MaxDeaths = 3,
    step_limit: StepLimit = 180.0,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve /livez and /readyz on this port; with --gpus the first worker, each other one on the next. "
            "0: any that is free; unset: nowhere.",
        ),
    ] = None,
    spot_notice: SpotNotice = None,
    spot_endpoint: SpotEndpoint = None,
    max_num_seqs: MaxNumSeqs = None,
    max_batched_tokens: MaxBatchedTokens = None,
    unhurried_tokens: UnhurriedTokens = None,
    kv_cache_bytes: KvCacheBytes = None,
    memory_share: MemoryShare = None,
    dtype: DType = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = None,
    deterministic: Deterministic = False,
    speculate: Speculate = None,
    draft_model: DraftModel = None,
    speculate_tokens: SpeculateTokens = None,
    device: Device = None,
    gpus: Gpus = None,
    threads: Threads = None,
    events: Annotated[
        bool,
        typer.Option(
            "--task-events", "-E", help="Send Celery's task events, as `celery control enable_events` makes it."
        ),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model: take tasks from its queue, run them in the engine, publish their tokens."""
    check_spot(spot_notice, spot_endpoint)
    if gpus is not None:
        raise typer.Exit(_one_for_each(context, gpus, name, drain))
    with needs("worker"):
        from engine.errors import EngineError
        from workers.errors import Refused
        from workers.runtime.worker import run_worker
        from workers.settings import WorkerSettings
    asked: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_batched_tokens,
        "unhurried_tokens": unhurried_tokens,
        "kv_cache_bytes": kv_cache_bytes,
        "memory_share": memory_share,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "deterministic": deterministic or None,
        **speculation(speculate, draft_model, speculate_tokens),
        "device": device,
        "threads": threads,
    }
    engine = {option: value for option, value in asked.items() if value is not None}
    settings = WorkerSettings(
        broker,
        store or broker,
        model,
        engine=engine,
        lease=lease,
        drain=drain,
        max_deaths=max_deaths,
        step_limit=step_limit,
        health_port=health_port,
        spot_notice=spot_notice,
        spot_endpoint=spot_endpoint,
        events=events,
    )
    if name is not None:
        settings = replace(settings, name=name)
    try:
        status = run_worker(settings, checked_level(log_level))
    except (Refused, EngineError) as refusal:
        raise Failure(str(refusal)) from refusal
    raise typer.Exit(status)


def _one_for_each(context: typer.Context, asked: str, name: str | None, drain: float) -> int:
    """This command once for each GPU, with what else was said on its line."""
    import asyncio
    import os
    import socket
    from contextlib import suppress

    from engine.execution.threads import threads_of_each
    from workers.cli.gpus.choice import choose, gpus_here
    from workers.cli.gpus.workers import programs, supervise

    if context.params["device"] == "cpu":
        raise Failure("--gpus goes with --device cuda, not with cpu")
    gpus = choose(asked, gpus_here())
    ports = health_ports(context.params["health_port"], len(gpus))
    argv = [*PENSTOCK, str(context.info_name), *said_again(context, without=("gpus", "name", "device", "health_port"))]
    argv += ["--device", "cuda"]
    if context.params["threads"] is None:
        argv += ["--threads", str(threads_of_each(len(gpus)))]

    def say(name: str, line: str) -> None:
        with suppress(OSError):  # nobody reads it any more: no reason to stop serving
            typer.echo(f"{name} | {line}", err=True)

    each = programs(gpus, argv, _urls(context), name or f"{socket.gethostname()}.{os.getpid()}", ports)
    return asyncio.run(supervise(each, say, drain))


def _urls(context: typer.Context) -> dict[str, str]:
    """For the environment: they may have passwords in them."""
    found = {option.envvar: context.params.get(str(option.name)) for option in context.command.params}
    return {name: str(value) for name, value in found.items() if isinstance(name, str) and value is not None}


def gateway(
    broker: Broker,
    store: Store = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    drain: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that open streams may go on at SIGTERM.")
    ] = 30.0,
    reader_lease: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="Seconds after which a request is cancelled whose gateway died."),
    ] = 15.0,
    max_queued: MaxQueued = None,
    max_queued_per_tenant: MaxQueuedPerTenant = None,
    cors_origin: CorsOrigin = None,
    await_model: Annotated[
        list[str] | None,
        typer.Option(help="Answer /readyz with 503 until a worker has served this model. May be repeated."),
    ] = None,
    log_level: LogLevel = "info",
    fd: Annotated[int | None, typer.Option(hidden=True, help="A socket that listens already.")] = None,
) -> None:
    """Serve the HTTP API."""
    import socket

    with needs("gateway"):
        from producers.gateway import GatewaySettings, serve
    _log(log_level)
    listener = socket.socket(fileno=fd) if fd is not None else open_port(host, port)
    settings = GatewaySettings(
        broker,
        store or broker,
        host,
        port,
        drain=drain,
        reader_lease=reader_lease,
        max_queued=max_queued,
        max_queued_per_tenant=max_queued_per_tenant,
        cors_origins=tuple(cors_origin or ()),
        awaited=tuple(await_model or ()),
    )
    with _bad_urls():
        _look_at(broker, store)
        serve(settings, listener)


def sweeper(
    broker: Broker,
    store: Store = None,
    name: Annotated[
        str | None,
        typer.Option(callback=process_name, help="Of this process, its own alone; unset: HOST.PID and more."),
    ] = None,
    lease: Annotated[
        float, typer.Option(min=1, callback=finite, help="Seconds of silence after which another sweeper leads.")
    ] = 5.0,
    compact_after: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds after a task is settled that its stream is compacted."),
    ] = 60.0,
    letters_kept: Annotated[
        float, typer.Option(min=0, callback=finite, help="Days that a dead letter is kept.")
    ] = 14.0,
    reader_lease: Annotated[
        float, typer.Option(min=1, callback=finite, help="As the gateways' --reader-lease.")
    ] = 15.0,
    log_level: LogLevel = "info",
) -> None:
    """Repair what dead processes left: unsent tasks, unsettled results, lost readers. Compact streams. One leads."""
    import asyncio

    from producers.sweeper.sweeper import SweeperSettings

    _log(log_level)
    settings = SweeperSettings(
        broker,
        store or broker,
        lease=lease,
        reader_lease=reader_lease,
        compact_after=compact_after,
        letters_kept=letters_kept * 24 * 3600,
    )
    if name is not None:
        settings = replace(settings, name=name)
    with _bad_urls():
        _look_at(broker, store)
        asyncio.run(sweep(settings))


async def sweep(settings: SweeperSettings) -> None:
    """Lead, or wait to, until SIGTERM or SIGINT."""
    import asyncio
    import signal
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from producers.sweeper.sweeper import lead

    async with AsyncClient(settings.broker, settings.store) as client:
        task = asyncio.create_task(lead(client, settings))
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
        with suppress(asyncio.CancelledError):
            await task


def open_port(host: str, port: int) -> Any:
    """A listening socket. Raises Failure where the address is not to be had."""
    with needs("gateway"):
        from producers.gateway.server import listen
    try:
        return listen(host, port)
    except OSError as error:
        raise Failure(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port (0: any)"
        ) from error


def _look_at(broker: str, store: str | None) -> None:
    """Raises ServerRefused for servers that cannot be used; those that are away are waited for."""
    from producers.store.servers import check_server

    for url, role in {store or broker: "store", broker: "broker"}.items():
        check_server(url, role, must_answer=False)


@contextmanager
def _bad_urls() -> Iterator[None]:
    from producers.store.servers import ServerRefused

    try:
        yield
    except (ValueError, ServerRefused) as error:
        raise Failure(str(error)) from error


def _log(level: str) -> None:
    import logging

    logging.basicConfig(level=checked_level(level), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def checked_level(name: str) -> str:
    """A log level as Python's logging names it. Raises Failure."""
    if name.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Failure(f"--log-level is {name!r}; it must be debug, info, warning or error")
    return name.upper()
