"""Finds the broker and store of the system on this machine, for callers that name none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: The default data directory of `penstock up`.
DATA_DIR: Final = Path(".penstock")
#: The default folder for files' content, of gateways and sweepers.
FILES_DIR: Final = DATA_DIR / "files"
#: The file in a data directory with the port of its server, which listens on HOST.
PORT: Final = "port"
#: The file in a data directory with the broker's URL, where its server is the store alone.
BROKER: Final = "broker"
HOST: Final = "127.0.0.1"


def servers(broker: str | None, store: str | None) -> tuple[str, str]:
    """URLs of the broker and the store; the store is the broker unless given.

    Without a `broker`: BROKER_URL and STORE_URL, else those of `penstock up` in the current directory. The store of its
    broker on SQS is found there, too. Raises ValueError if none of these exists, and as `store_of`.
    """
    if broker is None:
        broker, store = os.environ.get("BROKER_URL"), store or os.environ.get("STORE_URL")
    if not broker:
        here = _server_here()
        return _broker_here() or here, store or here
    if not store and broker == _broker_here():
        store = _server_here()
    return broker, store_of(broker, store)


def the_store(store: str | None, data_dir: Path | None) -> str:
    """The store's URL, for who needs no broker: the one given, else that of a data directory, else as of `servers`.

    Raises ValueError if there is none, or both are given.
    """
    if store is not None and data_dir is not None:
        raise ValueError("give the store's URL or a data directory, not both")
    if data_dir is not None:
        return _server_in(data_dir)
    return store or os.environ.get("STORE_URL") or servers(None, None)[1]


def store_of(broker: str, store: str | None) -> str:
    """The store's URL: the broker's unless given. Raises ValueError if that keeps no records."""
    from producers.connection.connect import SCHEMES, shown

    if (not store or store == broker) and broker.partition("://")[0] == "sqs":
        raise ValueError(
            f"the store is missing: {shown(broker)} carries messages alone. Give the Redis or Valkey server that holds "
            f"records and streams (--store or STORE_URL): {SCHEMES[0]}://HOST:PORT/DB"
        )
    return store or broker


def _broker_here() -> str:
    """Empty: the server here is both, or there is none."""
    try:
        return (DATA_DIR / BROKER).read_text().strip()
    except (OSError, ValueError):
        return ""


def _server_here() -> str:
    return _server_in(DATA_DIR)


def _server_in(data_dir: Path) -> str:
    file = data_dir / PORT
    try:
        return f"redis://{HOST}:{int(file.read_text())}/0"
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no server is given, and `penstock up` has not run in this directory ({file} holds no port): give a URL, "
            "or set BROKER_URL; `penstock up` prints its own"
        ) from error
