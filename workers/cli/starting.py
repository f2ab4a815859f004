"""What commands share that run a process: its log, a look at its servers, and errors in their URLs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workers.cli.exits import Failure


def look_at_servers(broker: str, store: str | None) -> None:
    """Check broker and store. Raises ServerRefused for an unusable server; waits for one that does not answer."""
    from producers.store.servers import check_server

    for url, role in {store or broker: "store", broker: "broker"}.items():
        check_server(url, role, must_answer=False)


@contextmanager
def refusing_bad_urls() -> Iterator[None]:
    """Within it, a bad URL or an unusable server raises Failure."""
    from producers.store.servers import ServerRefused

    try:
        yield
    except (ValueError, ServerRefused) as error:
        raise Failure(str(error)) from error


def set_up_logging(level: str) -> None:
    """Log from this level on. Raises Failure for an unknown one."""
    import logging

    logging.basicConfig(level=checked_level(level), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def checked_level(name: str) -> str:
    """The log level as Python's logging names it. Raises Failure for an unknown one."""
    if name.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Failure(f"--log-level is {name!r}; it must be debug, info, warning or error")
    return name.upper()
