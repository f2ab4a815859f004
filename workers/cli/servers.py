"""The servers that operators' commands are about: those that are named, or those of a data directory here.

with system(broker, store) as (client, loop):
    found = loop.run(client.models())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workers.cli.exits import Exit, Failure, refusing

if TYPE_CHECKING:
    from asyncio import Runner

    from redis.asyncio import Redis

    from producers.client.aio import AsyncClient


@contextmanager
def system(broker: str | None, store: str | None) -> Iterator[tuple[AsyncClient, Runner]]:
    """A client, and the loop that runs its calls. Raises Failure for a bad URL, and a server that does not answer."""
    from asyncio import Runner

    from producers.client.aio import AsyncClient
    from producers.connection.local import servers

    with refusing(ValueError):
        urls = servers(broker, store)
        with answering(*urls), Runner() as loop:
            client = AsyncClient(*urls)
            try:
                loop.run(client.ping())
                yield client, loop
            finally:
                loop.run(client.aclose())


@contextmanager
def records(store: str | None, data_dir: Path | None) -> Iterator[tuple[Redis, Runner]]:
    """The store, and the loop that runs its calls. Raises Failure as `system` does, and for what is refused."""
    from asyncio import Runner

    from producers.connection.connect import connect_async
    from producers.connection.local import the_store
    from producers.errors import PenstockError

    with refusing(ValueError, PenstockError):
        url = the_store(store, data_dir)
        with answering(url), Runner() as loop:
            client = connect_async(url)
            try:
                loop.run(client.execute_command("PING"))
                yield client, loop
            finally:
                loop.run(client.aclose())


@contextmanager
def answering(*urls: str) -> Iterator[None]:
    """Within it, a server that does not answer, or refuses, raises Failure."""
    from producers.client.steps import FAILURES
    from producers.connection.connect import shown
    from producers.connection.trouble import Trouble, error_text, trouble

    try:
        yield
    except FAILURES as error:
        where = " or ".join(dict.fromkeys(shown(url) for url in urls))
        if (found := trouble(error)) is not Trouble.AWAY:
            # A full one may have room soon.
            status = Exit.UNREACHABLE if found is Trouble.FULL else Exit.REFUSED
            raise Failure(f"{where} refused: {error_text(error)}", status) from error
        raise Failure(f"no answer from {where} ({error_text(error)})", Exit.UNREACHABLE) from error
