"""The store that a command is about: a server that is named, or that of a data directory here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.admin.dlq import answering
from workers.cli.exits import Failure

if TYPE_CHECKING:
    from redis.asyncio import Redis

DataDir = Annotated[
    Path | None, typer.Option(help="The data directory of a `penstock up` on this machine. Unset: .penstock.")
]
KeyStore = Annotated[
    str | None,
    typer.Option(
        help="The Redis or Valkey server that holds records and keys. Unset: STORE_URL, else BROKER_URL, else that of "
        "--data-dir."
    ),
]


def with_store(store: str | None, data_dir: Path | None, work: Callable[[Redis], Awaitable[None]]) -> None:
    """Run `work` with the store. Raises Failure for a bad URL, a server that does not answer, and what is refused."""
    import asyncio

    from producers.connection.connect import connect_async
    from producers.connection.local import the_store
    from producers.errors import PenstockError

    async def within() -> None:
        client = connect_async(url)
        try:
            await client.execute_command("PING")
            await work(client)
        finally:
            await client.aclose()

    try:
        url = the_store(store, data_dir)
        with answering(url):
            asyncio.run(within())
    except (ValueError, PenstockError) as error:
        raise Failure(str(error)) from error
