"""Finds the broker and store of the system on this machine, for callers that name none."""

from __future__ import annotations

import os
import re
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
#: The file in a data directory with its server's password. An `up` of an earlier release has none, and its server
#: lets in everybody on the machine.
PASSWORD: Final = "password"  # noqa: S105 - a file's name
HOST: Final = "127.0.0.1"
#: Text of a password file, as `secrets.token_urlsafe` writes it: no character of it means anything in a URL.
WELL_FORMED: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")


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


def store_of(broker: str, store: str | None) -> str:
    """The store's URL: `store`, else the broker's. Raises ValueError if that keeps no records."""
    from producers.connection.connect import SCHEMES, shown

    if (not store or store == broker) and broker.partition("://")[0] == "sqs":
        raise ValueError(
            f"the store is missing: {shown(broker)} carries messages alone. Give the Redis or Valkey server that holds "
            f"records and streams (--store or STORE_URL): {SCHEMES[0]}://HOST:PORT/DB"
        )
    return store or broker


def urls_in(data_dir: Path) -> tuple[str, str]:
    """The whole URLs of a data directory's broker and store. Raises ValueError as `servers` does."""
    store = _server_in(data_dir)
    return _broker_in(data_dir) or store, store


def server_url(port: int, password: str) -> str:
    """The URL of a data directory's server. `password`: empty where it asks for none."""
    return f"redis://:{password}@{HOST}:{port}/0" if password else f"redis://{HOST}:{port}/0"


def _broker_here() -> str:
    return _broker_in(DATA_DIR)


def _broker_in(data_dir: Path) -> str:
    """The broker's URL; empty if the server is both, or does not exist."""
    try:
        return (data_dir / BROKER).read_text().strip()
    except (OSError, ValueError):
        return ""


def _server_here() -> str:
    return _server_in(DATA_DIR)


def _server_in(data_dir: Path) -> str:
    _check_owner(data_dir)
    # The password first: a new port is written before its new password, so that no old port gets the new one.
    password = password_in(data_dir)
    file = data_dir / PORT
    try:
        return server_url(int(file.read_text()), password)
    except PermissionError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; run this as the user of its `penstock up`") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no server is given, and `penstock up` has not run in this directory ({file} holds no port): go to the "
            "directory of one, name its data directory (commands: --data-dir), or give a server's URL, such as in "
            "BROKER_URL; `penstock url` prints that of a `penstock up`"
        ) from error


def _check_owner(data_dir: Path) -> None:
    """Raise ValueError for another user's directory: its server may be a trap. Root may use all."""
    try:
        owner = data_dir.stat().st_uid
    except OSError:
        return  # it cannot be read either, and that raises
    if os.geteuid() not in (owner, 0):
        raise ValueError(
            f"the data directory {data_dir} and its server belong to another user (uid {owner}): run this as that "
            "user, or give a URL"
        )


def password_in(data_dir: Path) -> str:
    """The password of a data directory's server; empty where it has none. Raises ValueError if it cannot be read."""
    file = data_dir / PASSWORD
    try:
        password = file.read_text("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; run this as the user of its `penstock up`") from error
    if WELL_FORMED.fullmatch(password) is None:
        raise ValueError(f"{file} holds no password: the next start of `penstock up` writes a new one")
    return password
