"""`penstock adapters`: the LoRA adapters that a system serves. They need its store, and no gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import message_of
from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, refusing, touching
from workers.cli.options import Broker, DataDir, Json, Store
from workers.cli.servers import answering, store_address
from workers.cli.terminal import aligned, note

if TYPE_CHECKING:
    from redis import Redis

    from engine.text.adapter import AdapterFiles

app = Commands(
    "Models",
    OPERATOR_STATUS,
    "adapters",
    "LoRA adapters, which the workers of their base serve.",
)


@app.shown("penstock adapters add mine=path/to/adapter --base tiny-v2")
def add(
    named: Annotated[
        str,
        typer.Argument(
            metavar="NAME=PATH", help="The adapter's name, and its folder, or a hub's: hf://OWNER/NAME[@REVISION]."
        ),
    ],
    base: Annotated[str, typer.Option(metavar="MODEL", help="The name of the model that it changes.")],
    total_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="PENSTOCK_ADAPTERS_BYTES",
            help="The most bytes that all adapters of the store take together, in its server's memory. Unset: 4 GiB.",
        ),
    ] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Put a LoRA adapter, as PEFT saves one, into the store: all workers of the base serve it as NAME and BASE:NAME.

    Its configuration and shapes are checked; whether they fit the base is told by the first worker that loads it.
    """
    from producers.store.fleet import adapters
    from workers.library.reference import HUB

    name, _, location = named.partition("=")
    if not (name and location):
        raise Failure(f"{named} is not NAME=PATH")
    with ExitStack() as stack:
        if location.startswith(HUB):
            # What the store refuses is not downloaded first.
            client = stack.enter_context(_store(broker, store, data_dir))
            adapters.check(client, name, base)
            folder = stack.enter_context(_pulled(location, quiet=as_json))
            files = _read(folder, location)
        else:
            folder = Path(location)
            files = _read(folder, location)
            client = stack.enter_context(_store(broker, store, data_dir))
        with touching(folder, "read"):
            most = adapters.MAX_TOTAL_BYTES if total_bytes is None else total_bytes
            adapter = adapters.add(client, name, base, files.version, files.rank, folder, most)
    typer.echo(json.dumps(asdict(adapter)) if as_json else f"{base}:{name} {adapter.version}")


@contextmanager
def _pulled(location: str, *, quiet: bool) -> Iterator[Path]:
    """The folder of a hub's adapter, as long as the context lasts. Raises Refused."""
    from producers.store.fleet.adapters import MAX_BYTES
    from workers.library import LocalModels
    from workers.library.hub import HubModel, pulled_adapter

    say = (lambda line: None) if quiet else note
    with pulled_adapter(HubModel.parse(location), LocalModels.default(), MAX_BYTES, say, quiet=quiet) as folder:
        yield folder


def _read(folder: Path, location: str) -> AdapterFiles:
    """The description of the adapter in `folder`, which came from `location`. Raises Failure."""
    from engine.errors import ModelError
    from engine.text.adapter import read_adapter

    try:
        return read_adapter(folder)
    except ModelError as error:
        raise Failure(message_of(error).replace(str(folder), location)) from error


@app.shown("penstock adapters ls --json", "ls")
def listed(broker: Broker = None, store: Store = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the adapters of a store."""
    from producers.store.fleet import adapters

    with _store(broker, store, data_dir) as client:
        stored = sorted(adapters.all_of(client).values(), key=lambda adapter: adapter.name)
    if as_json:
        typer.echo(json.dumps([asdict(adapter) for adapter in stored]))
        return
    columns = ("name", "base", "version", "rank", "size", "added")
    table = [columns]
    for adapter in stored:
        added = datetime.fromtimestamp(adapter.added, UTC).strftime("%Y-%m-%d %H:%M")
        size = f"{adapter.size / 1e6:.1f} MB"
        table.append((adapter.name, adapter.base, adapter.version, str(adapter.rank), size, added))
    for line in aligned(table, len(columns)) if stored else ["There are no adapters."]:
        typer.echo(line)


@app.shown("penstock adapters rm mine", "rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of adapters.")],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Remove adapters. Tasks that run with them go on; those that wait fail unless their worker has it loaded."""
    from producers.store.fleet import adapters

    with _store(broker, store, data_dir) as client:
        for name in names:
            adapter = adapters.remove(client, name)
            typer.echo(json.dumps(asdict(adapter)) if as_json else f"{adapter.base}:{name} {adapter.version} removed")


@contextmanager
def _store(broker: str | None, store: str | None, data_dir: Path | None) -> Iterator[Redis]:
    """The store that a command's options name. Raises Failure if it does not answer, and for what is refused."""
    from producers.connection.connect import connect
    from producers.errors import PenstockError

    with refusing(ValueError, PenstockError):
        url = store_address(broker, store, data_dir)
        with answering(url), connect(url) as client:
            client.ping()
            yield client
