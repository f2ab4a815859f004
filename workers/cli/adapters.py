"""`penstock adapters`: the LoRA adapters that a system serves. They need its store, and no gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.commands import Commands
from workers.cli.exits import OPERATOR_STATUS, Failure, refusing, touching
from workers.cli.options import Broker, DataDir, Json, Store
from workers.cli.servers import answering, store_address
from workers.cli.terminal import aligned

if TYPE_CHECKING:
    from redis import Redis

app = Commands(
    "Models",
    OPERATOR_STATUS,
    "adapters",
    "LoRA adapters, which the workers of their base serve.",
)


@app.shown("penstock adapters add mine=path/to/adapter --base tiny-v2")
def add(
    named: Annotated[str, typer.Argument(metavar="NAME=PATH", help="The adapter's name, and its folder.")],
    base: Annotated[str, typer.Option(metavar="MODEL", help="The name of the model that it changes.")],
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Put a LoRA adapter, as PEFT saves one, into the store: all workers of the base serve it as NAME and BASE:NAME.

    Its configuration and shapes are checked; whether they fit the base is told by the first worker that loads it.
    """
    from engine.errors import ModelError
    from engine.text.adapter import read_adapter
    from producers.store.fleet import adapters

    name, _, path = named.partition("=")
    if not (name and path):
        raise Failure(f"{named} is not NAME=PATH")
    with refusing(ModelError):
        files = read_adapter(path)
    with touching(Path(path), "read"), _store(broker, store, data_dir) as client:
        adapter = adapters.add(client, name, base, files.version, files.rank, Path(path))
    typer.echo(json.dumps(asdict(adapter)) if as_json else f"{base}:{name} {adapter.version}")


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
