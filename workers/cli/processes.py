"""`penstock worker`, `gateway` and `sweeper`: one process each, as the Procfile starts them."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from dataclasses import replace
from errno import EACCES, EADDRINUSE
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producers.connection.local import FILES_DIR
from workers.cli.exits import PROCESS_STATUS, Failure, needs
from workers.cli.keys import auth as keys_or_none
from workers.cli.keys.auth import AskFor, Insecure
from workers.cli.models.references import MODEL, complete_model
from workers.cli.options import (
    Broker,
    CorsOrigin,
    Deterministic,
    Device,
    DraftModel,
    DType,
    FilesDir,
    FilesRedirect,
    Gpus,
    KvCacheBytes,
    KvCacheDType,
    LogLevel,
    MaxBatchedTokens,
    MaxFile,
    MaxNonPriorityStepTokens,
    MaxNumSeqs,
    MaxQueued,
    MaxQueuedPerTenant,
    MaxStepSeconds,
    MaxWorkerDeaths,
    MemoryShare,
    Prices,
    ProxyHeaders,
    Quantization,
    Speculate,
    SpeculateTokens,
    SpotMetadataUrl,
    SpotProvider,
    Store,
    Threads,
    WebhookAllow,
    check_spot,
    finite,
    health_ports,
    place,
    process_name,
    said_again,
    speculation,
)
from workers.cli.starting import (
    checked_level,
    look_at_files,
    look_at_servers,
    refusing_bad_urls,
    set_up_logging,
    store_of,
)
from workers.processes import PENSTOCK

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient
    from producers.gateway.batches.endpoints import LineEndpoints
    from producers.sweeper.sweeper import SweeperSettings


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
        str | None, typer.Option(callback=process_name, help="This process's name in leases and logs. Unset: HOST.PID.")
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="Seconds without a heartbeat after which other workers take its tasks."
        ),
    ] = 10.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds that running tasks may go on after SIGTERM."),
    ] = 30.0,
    max_worker_deaths: MaxWorkerDeaths = 3,
    max_step_seconds: MaxStepSeconds = 180.0,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve /livez and /readyz on this port. With --gpus, the first worker uses it and each further worker "
            "the next one. 0: any free port. Unset: no port.",
        ),
    ] = None,
    spot_provider: SpotProvider = None,
    spot_metadata_url: SpotMetadataUrl = None,
    files_dir: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            envvar="FILES_DIR",
            callback=place,
            help="The folder or s3://BUCKET/PREFIX for bodies of Celery messages that are too large for SQS. Unset: "
            "such messages are refused.",
        ),
    ] = None,
    max_num_seqs: MaxNumSeqs = None,
    max_batched_tokens: MaxBatchedTokens = None,
    max_non_priority_step_tokens: MaxNonPriorityStepTokens = None,
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
        typer.Option("--task-events", "-E", help="Send Celery's task events, as after `celery control enable_events`."),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model: take tasks from its queue, run them in the engine and publish their tokens."""
    check_spot(spot_provider, spot_metadata_url)
    if gpus is not None:
        raise typer.Exit(_one_for_each(context, gpus, name, drain_timeout))
    # Until it serves, nothing that it makes is garbage: to look for some takes a quarter of the imports' time.
    gc.disable()
    with needs("worker"):
        from engine.errors import EngineError
        from workers.errors import Refused
        from workers.runtime.worker import run_worker
        from workers.settings import WorkerSettings
    asked: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_batched_tokens,
        "unhurried_tokens": max_non_priority_step_tokens,
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
        store_of(broker, store),
        model,
        engine=engine,
        lease=lease,
        drain=drain_timeout,
        max_deaths=max_worker_deaths,
        step_limit=max_step_seconds,
        health_port=health_port,
        spot_notice=spot_provider,
        spot_endpoint=spot_metadata_url,
        events=events,
        files_dir=files_dir,
    )
    if name is not None:
        settings = replace(settings, name=name)
    try:
        status = run_worker(settings, checked_level(log_level))
    except (Refused, EngineError) as refusal:
        raise Failure(str(refusal)) from refusal
    raise typer.Exit(status)


def _one_for_each(context: typer.Context, asked: str, name: str | None, drain: float) -> int:
    """Run this command once for each GPU, with the other options unchanged. Returns the exit status."""
    import asyncio
    import os
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
        with suppress(OSError):  # nobody reads the output any more: go on serving
            typer.echo(f"{name} | {line}", err=True)

    each = programs(gpus, argv, _urls(context), name or f"{socket.gethostname()}.{os.getpid()}", ports)
    return asyncio.run(supervise(each, say, drain))


def _urls(context: typer.Context) -> dict[str, str]:
    """The servers' URLs by environment variable. They may hold passwords, so they stay off the command line."""
    found = {option.envvar: context.params.get(str(option.name)) for option in context.command.params}
    return {name: str(value) for name, value in found.items() if isinstance(name, str) and value is not None}


def gateway(
    broker: Broker,
    store: Store = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on. 0: any free port.")] = 8000,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds that open streams may go on after SIGTERM."),
    ] = 30.0,
    reader_lease: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="Seconds after a gateway died at which its open requests are cancelled."
        ),
    ] = 15.0,
    auth: AskFor = None,
    insecure: Insecure = False,
    max_queued: MaxQueued = None,
    max_queued_per_tenant: MaxQueuedPerTenant = None,
    cors_origin: CorsOrigin = None,
    proxy_headers: ProxyHeaders = None,
    files_dir: FilesDir = None,
    files_redirect: FilesRedirect = False,
    max_file: MaxFile = 2 << 30,
    webhook_allow: WebhookAllow = None,
    prices: Prices = None,
    await_model: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer /readyz with 503 until this model is published or a worker serves it. May be repeated."
        ),
    ] = None,
    log_level: LogLevel = "info",
    fd: Annotated[int | None, typer.Option(hidden=True, help="File descriptor of a listening socket.")] = None,
) -> None:
    """Serve the HTTP API: OpenAI's endpoints, tasks and metrics."""
    import logging

    with needs("gateway"):
        from producers.gateway import GatewaySettings, serve
    set_up_logging(log_level)
    listener = socket.socket(fileno=fd) if fd is not None else open_port(host, port, listens=False)
    address = listener.getsockname()[0]
    asks = keys_or_none.decided(auth, insecure, address)
    logging.getLogger("penstock").info("API keys: %s", keys_or_none.said(asks, address))
    settings = GatewaySettings(
        broker,
        store_of(broker, store),
        host,
        port,
        asks,
        drain=drain_timeout,
        reader_lease=reader_lease,
        max_queued=max_queued,
        max_queued_per_tenant=max_queued_per_tenant,
        cors_origins=tuple(cors_origin or ()),
        proxy_headers=tuple(proxy_headers or ()),
        awaited=tuple(await_model or ()),
        files_dir=str(files_dir or FILES_DIR),
        files_redirect=files_redirect,
        max_file=max_file,
        webhook_allow=tuple(webhook_allow or ()),
        prices=None if prices is None else str(prices),
    )
    with refusing_bad_urls():
        look_at_servers(broker, store)
        look_at_files(settings.files_dir)
        serve(settings, listener)


def sweeper(
    broker: Broker,
    store: Store = None,
    name: Annotated[
        str | None,
        typer.Option(callback=process_name, help="This process's name, which must be unique. Unset: made up."),
    ] = None,
    lease: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="Seconds without a heartbeat after which another sweeper leads."),
    ] = 5.0,
    compact_after: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Seconds between a task's settlement and its stream's compaction."),
    ] = 60.0,
    dead_letter_days: Annotated[
        float, typer.Option(min=0, callback=finite, help="Days that dead letters are kept.")
    ] = 14.0,
    usage_days: Annotated[
        float, typer.Option(min=1, callback=finite, help="Days that `penstock usage` looks back.")
    ] = 400.0,
    reader_lease: Annotated[
        float, typer.Option(min=1, callback=finite, help="The same as the gateways' --reader-lease.")
    ] = 15.0,
    files_dir: FilesDir = None,
    results_to_files: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Move results that take so many bytes, compacted, from the store to --files-dir. Unset: none.",
        ),
    ] = None,
    max_batch_lines: Annotated[
        int,
        typer.Option(min=1, help="Lines of one batch that are queued, or wait to be written, at a time."),
    ] = 20_000,
    log_level: LogLevel = "info",
) -> None:
    """Repair what dead processes left: unsent tasks, unsettled results, lost readers. Run batches. Compact streams.

    Any number may run: one leads, and another takes over within seconds when it dies.
    """
    import asyncio

    from producers.sweeper.sweeper import SweeperSettings
    from producers.sweeper.usage import Ages

    set_up_logging(log_level)
    settings = SweeperSettings(
        broker,
        store_of(broker, store),
        lease=lease,
        reader_lease=reader_lease,
        compact_after=compact_after,
        letters_kept=dead_letter_days * 24 * 3600,
        usage=Ages(kept=usage_days * 24 * 3600),
        files_dir=str(files_dir or FILES_DIR),
        results_to_files=results_to_files,
        batch_lines=max_batch_lines,
    )
    if name is not None:
        settings = replace(settings, name=name)
    with refusing_bad_urls():
        look_at_servers(broker, store)
        look_at_files(settings.files_dir)
        asyncio.run(sweep(settings))


async def sweep(settings: SweeperSettings) -> None:
    """Run a sweeper, as leader or in reserve, until SIGTERM or SIGINT."""
    import asyncio
    import signal
    from contextlib import suppress

    from producers.client.aio import AsyncClient
    from producers.sweeper.sweeper import lead

    async with AsyncClient(settings.broker, settings.store) as client:
        endpoints = _endpoints(client)
        task = asyncio.create_task(lead(client, settings, endpoints))
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
        with suppress(asyncio.CancelledError):
            await task
        if endpoints is not None:
            endpoints.close()


def _endpoints(client: AsyncClient) -> LineEndpoints | None:
    """The endpoints that batches are for; None where the gateway is not installed."""
    import logging

    try:
        from producers.gateway.batches.endpoints import LineEndpoints
    except ModuleNotFoundError as error:
        log = logging.getLogger(__name__)
        log.warning("batches are left to another sweeper: they need %s (pip install 'penstock[gateway]')", error.name)
        return None
    return LineEndpoints(client)


def open_port(host: str, port: int, *, listens: bool = True) -> socket.socket:
    """A listening socket. Port 0 takes any free port. Raises Failure if the address cannot be bound.

    `listens`: callers wait from now on. Otherwise they are refused until a server takes it, so that a proxy asks
    another gateway, and no caller who comes back waits for a start.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if listens:
            listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        other = "port with --port (0: any free)" if error.errno in (EADDRINUSE, EACCES) else "address with --host"
        raise Failure(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another {other}"
        ) from error
