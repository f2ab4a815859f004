"""`penstock sources`: the process that makes tasks and batches of what comes from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from producers.connection.local import FILES_DIR
from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, refusing
from workers.cli.options import Broker, FilesDir, HealthPort, LogLevel, Store, finite
from workers.cli.starting import look_at_files, look_at_servers, set_up_logging, store_of, use_secrets_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from producers.sources.source import SourceSettings
    from workers.runtime.health import Health


app = Commands("Processes", PROCESS_STATUS)


@app.shown("penstock sources --broker redis://10.0.0.5:6379/0 --config sources.toml")
def sources(
    broker: Broker,
    config: Annotated[
        Path | None, typer.Option(help="The TOML file with a table for each source (docs/use/sources.md).")
    ] = None,
    watch_folder: Annotated[
        list[Path] | None,
        typer.Option(help="A folder whose inbox/ gets files of requests; results go to its outbox/. May be repeated."),
    ] = None,
    store: Store = None,
    files_dir: FilesDir = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds for giving back what was taken, after SIGTERM.")
    ] = 25.0,
    health_port: HealthPort = None,
    log_level: LogLevel = "info",
) -> None:
    """Make tasks and batches of messages, files, bucket events and schedules, until SIGTERM. Any number may run."""
    import asyncio

    from producers.sources.settings import BadSources, parse, read
    from workers.runtime.health import Health

    set_up_logging(log_level)
    use_secrets_key(None)
    folders = {f"folder{number}": str(path) for number, path in enumerate(watch_folder or (), 1)}
    if config is None and not folders:
        raise Failure("there is no source: name a file with --config, or a folder with --watch-folder")
    with refusing(BadSources):
        found = read(config) if config is not None else {}
        found |= {name: parse(name, {"type": "folder", "folder": path}) for name, path in folders.items()}
    health = Health(health_port)
    with refusing(ValueError):
        look_at_servers(broker, store)
        files = str(files_dir or FILES_DIR)
        look_at_files(files)
        asyncio.run(_run(found, broker, store_of(broker, store), files, drain_timeout, health))


async def _run(
    found: Mapping[str, SourceSettings], broker: str, store: str, files_dir: str, drain_s: float, health: Health
) -> None:
    """Run the sources until SIGTERM or SIGINT. Ends the process if they do not end in time."""
    import asyncio
    import logging
    import os
    import secrets
    import socket

    from producers.client.aio import AsyncClient
    from producers.sources.runner import Sources
    from producers.sources.source import Context
    from producers.store import epoch
    from workers.runtime.signals import when_told

    log = logging.getLogger(__name__)
    async with AsyncClient(broker, store) as client:
        context = Context(client, store, f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}", files_dir)
        sources = Sources([settings.source(name, context) for name, settings in found.items()])
        health.serve(sources, asyncio.get_running_loop())
        stop = asyncio.Event()
        when_told(stop.set)
        log.info("sources: %s", ", ".join(f"{name} ({settings.type})" for name, settings in found.items()))
        watching = asyncio.create_task(epoch.watch(client.store, stop.set))
        running = asyncio.create_task(sources.run())
        await stop.wait()
        watching.cancel()
        running.cancel()
        await asyncio.wait((running,), timeout=drain_s)
        if not running.done():  # a thread may wait for a server that never answers: no other end is sure
            log.error("stopped at once: the drain took more than %g s", drain_s)
            os._exit(Exit.TASK_FAILED)
