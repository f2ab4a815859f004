"""Classifies a server's errors: trouble of the server itself, or the call's own error."""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import Final

from redis import exceptions as redis


class Trouble(Enum):
    """Kinds of a server's trouble. None of them is the fault of the call."""

    AWAY = "away"
    """Unreachable, starting, failing over or busy: a retry may succeed soon. The call may have been done."""
    FULL = "full"
    """Memory or disk is full: no writes until space is free. The call was not done."""
    DENIED = "denied"
    """Wrong password or missing permission, until an operator changes it. The call was not done."""
    UNUSABLE = "unusable"
    """A kind of server that Penstock cannot use."""


#: Error codes in callers' errors, for programs.
CODES: Final[dict[Trouble | None, str]] = {
    Trouble.FULL: "storage_full",
    Trouble.DENIED: "access_denied",
    Trouble.UNUSABLE: "unusable_server",
}


async def sleep_unless_cancelled(seconds: float) -> None:
    """`asyncio.sleep` for a loop that goes on after a server's trouble. Raises CancelledError also where its task was
    cancelled before: redis-py makes an error of its own of that while it ends a WATCH, and the loop would go on.

    Not for a task in which an `asyncio.TaskGroup` may have failed: before Python 3.13 that counts as a cancellation.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


class UnusableServer(redis.RedisError):
    """The server is a cluster, a Sentinel or too old; the message says what to use instead."""


class NotPrimary(redis.ConnectionError):
    """The server is a replica: named by mistake, a demoted primary, or an unfinished failover."""


#: Codes that a server's error begins with, or that a script's error contains.
_CODES: Final = {
    Trouble.FULL: "OOM|MISCONF",
    Trouble.DENIED: "NOPERM|NOAUTH|WRONGPASS|DENIED",
    Trouble.AWAY: "READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|BUSY|TRYAGAIN|NOSCRIPT|UNBLOCKED",
}
_PATTERNS: Final = [(trouble, re.compile(rf"(?:^|-)(?:{codes})\b")) for trouble, codes in _CODES.items()]
#: Exception classes from whose text redis-py strips the code. The first match counts.
_CLASSES: Final = (
    (UnusableServer, Trouble.UNUSABLE),
    ((redis.AuthenticationError, redis.AuthorizationError, redis.NoPermissionError), Trouble.DENIED),
    (redis.OutOfMemoryError, Trouble.FULL),
    (
        (
            redis.ConnectionError,
            redis.TimeoutError,
            redis.ReadOnlyError,
            redis.ClusterDownError,
            redis.TryAgainError,
            redis.NoScriptError,
            OSError,
        ),
        Trouble.AWAY,
    ),
)
#: Texts of errors that SCRIPT KILL or an ACL raises in a running script.
_TEXTS: Final = (
    ("killed by user", Trouble.AWAY),
    ("user executing the script can't", Trouble.DENIED),
    ("ACL failure in script", Trouble.DENIED),
)


def error_text(error: BaseException) -> str:
    """The error's text, or its class's name without one. redis-py's `repr` lacks the text."""
    return str(error) or type(error).__name__


def fault(server: str, error: BaseException) -> str:
    """The server's fault, in words: it does not answer, or its error."""
    away = trouble(error) is Trouble.AWAY and not isinstance(error, NotPrimary)
    return f"{server} does not answer" if away else f"{server} cannot be used: {error_text(error)}"


def trouble(error: BaseException) -> Trouble | None:
    """The server's trouble that an error shows; None for the call's own error, which any server would repeat.

    An error may have its own as the attribute `trouble`, as those of `producers.connection.aws` have.
    """
    if hasattr(error, "trouble"):
        of_error: Trouble | None = error.trouble
        return of_error
    for classes, kind in _CLASSES:
        if isinstance(error, classes):
            return kind
    text = str(error)
    for kind, pattern in _PATTERNS:
        if pattern.search(text):
            return kind
    return next((kind for part, kind in _TEXTS if part in text), None)
