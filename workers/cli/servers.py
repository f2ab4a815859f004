"""The servers of a command: those that are named, or those of a data directory here. And the start of a process.

with system(broker, store) as (client, loop):
    models = loop.run(client.models())

Commands that run a process check its servers, open its port and set up its log before they serve.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EADDRINUSE
from pathlib import Path
from typing import TYPE_CHECKING

from workers.cli.exits import Exit, Failure, refusing

if TYPE_CHECKING:
    from asyncio import Runner

    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis

    from producers.client.aio import AsyncClient


def addresses(broker: str | None, store: str | None, data_dir: Path | None) -> tuple[str, str]:
    """URLs of the broker and the store that --broker, --store and --data-dir name.

    A data directory goes before the environment's URLs, and excludes the options. With neither, the servers of the
    `penstock up` in this directory are found. Raises Failure where there are none, or no store.
    """
    from producers.connection.local import servers, urls_in

    with refusing(ValueError):
        if data_dir is None:
            return servers(broker, store)
        if broker not in (None, os.environ.get("BROKER_URL")) or store not in (None, os.environ.get("STORE_URL")):
            raise Failure("give --data-dir, or --broker and --store, not both: a data directory has its own servers")
        return urls_in(data_dir)


def store_address(broker: str | None, store: str | None, data_dir: Path | None) -> str:
    """The store's URL, for commands that need no broker. Raises Failure as `addresses` does."""
    return store if store and data_dir is None else addresses(broker, store, data_dir)[1]


def files_of(files_dir: str | None, data_dir: Path | None) -> str:
    """The place of files that --files-dir names; without it, the folder in the data directory."""
    from producers.connection.local import DATA_DIR, FILES_DIR

    return files_dir or str((data_dir or DATA_DIR) / FILES_DIR.name)


@contextmanager
def system(broker: str | None, store: str | None, data_dir: Path | None = None) -> Iterator[tuple[AsyncClient, Runner]]:
    """A client of the servers that a command's options name, and the loop that runs its calls.

    Raises Failure as `addresses` does, and for a server that does not answer."""
    from asyncio import Runner

    from producers.client.aio import AsyncClient

    with refusing(ValueError):
        urls = addresses(broker, store, data_dir)
        with answering(*urls), Runner() as loop:
            client = AsyncClient(*urls)
            try:
                loop.run(client.ping())
                yield client, loop
            finally:
                loop.run(client.aclose())


@contextmanager
def records(broker: str | None, store: str | None, data_dir: Path | None) -> Iterator[tuple[Redis, Runner]]:
    """The store that a command's options name, and the loop that runs its calls. Raises Failure as `system` does, and
    for what is refused."""
    from asyncio import Runner

    from producers.connection.connect import connect_async
    from producers.errors import PenstockError

    with refusing(ValueError, PenstockError):
        url = store_address(broker, store, data_dir)
        with answering(url), Runner() as loop:
            client = connect_async(url)
            try:
                loop.run(client.execute_command("PING"))
                yield client, loop
            finally:
                loop.run(client.aclose())


@contextmanager
def open_store(broker: str | None, store: str | None, data_dir: Path | None) -> Iterator[BlockingRedis]:
    """The store that a command's options name, for calls that block. Raises Failure as `records` does."""
    from workers.connect import connect

    with refusing(ValueError):
        url = store_address(broker, store, data_dir)
        with answering(url), connect(url) as client:
            yield client


@contextmanager
def answering(*urls: str) -> Iterator[None]:
    """Turns errors of a server that does not answer, or refuses, into Failure."""
    from producers.client.steps import FAILURES
    from producers.connection.connect import shown
    from producers.connection.trouble import Trouble, error_text, trouble

    try:
        yield
    except FAILURES as error:
        where = " or ".join(dict.fromkeys(shown(url) for url in urls))
        if (kind := trouble(error)) is not Trouble.AWAY:
            # A full one may have room soon.
            status = Exit.UNREACHABLE if kind is Trouble.FULL else Exit.REFUSED
            raise Failure(f"{where} refused: {error_text(error)}", status) from error
        raise Failure(f"no answer from {where} ({error_text(error)})", Exit.UNREACHABLE) from error


def look_at_servers(broker: str, store: str, process: str) -> None:
    """Check broker and store for a process of this role. Raises Refused for an unusable server, or one whose user lacks
    rights; waits for one that does not answer."""
    from workers.connect import check_servers

    check_servers(broker, store, must_answer=False, process=process)


def look_at_files(location: str) -> None:
    """Check the place of files. Raises Failure for one that cannot be used; one that does not answer is logged."""
    from producers.store.servers import ServerRefused, check_files

    with refusing(ServerRefused):
        check_files(location)


def use_secrets_key(file: Path | None) -> None:
    """Encrypt and read secrets with the keys of this file from now on, here and in processes that are started.

    None: the file that the environment names, if any. Raises Failure for a file that cannot be used.
    """
    from producers.contract.sealing import KEY_FILE, keyring
    from producers.errors import SecretUnreadable

    if file is not None:
        os.environ[KEY_FILE] = str(file.absolute())
    with refusing(SecretUnreadable):
        keyring()


def set_up_logging(level: str, prefix: str = "") -> None:
    """Log from this level on, each line after the prefix. Raises Failure for an unknown level, or format in
    the environment."""
    import logging

    from producers.connection import logs

    with refusing(ValueError):
        logs.set_up(checked_level(level), prefix)
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it logs where the credentials of each client are from


@contextmanager
def changes_logged_to(file: Path) -> Iterator[None]:
    """Meanwhile, log what this process changes (`producers.store.access.audit`) into a file, and not on the terminal.
    The file is made with the first line. A line that cannot be written is told on stderr, and fails nothing."""
    import logging

    class Changes(logging.FileHandler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                super().emit(record)
            except OSError:  # the file cannot be made
                self.handleError(record)

    handler = Changes(file, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("penstock.audit")
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.removeHandler(handler)
        handler.close()


def checked_level(name: str) -> str:
    """The log level as Python's logging names it. Raises Failure for an unknown one."""
    if name.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Failure(f"--log-level is {name!r}; it must be debug, info, warning or error")
    return name.upper()


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
        why = f"{error.strerror or error}{', perhaps by another `penstock up`' if error.errno == EADDRINUSE else ''}"
        raise Failure(f"cannot listen on {host} port {port}: {why}; choose another {other}") from error
