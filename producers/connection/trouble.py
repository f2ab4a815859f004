"""Classifies a server's errors: trouble of the server itself, or the call's own error."""

from __future__ import annotations

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


class UnusableServer(redis.RedisError):
    """The server is a cluster, a Sentinel or too old; the message says what to use instead."""


class NotPrimary(redis.ConnectionError):
    """The server is a replica: named by mistake, a demoted primary, or an unfinished failover."""


#: Words that a server's error begins with, or that a script's error contains.
_WORDS: Final = {
    Trouble.FULL: "OOM|MISCONF",
    Trouble.DENIED: "NOPERM|NOAUTH|WRONGPASS|DENIED",
    Trouble.AWAY: "READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|BUSY|TRYAGAIN|NOSCRIPT|UNBLOCKED",
}
_PATTERNS: Final = [(trouble, re.compile(rf"(?:^|-)(?:{words})\b")) for trouble, words in _WORDS.items()]
#: Exception classes whose text redis-py strips of that word. The first match counts.
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
_SAID: Final = (
    ("killed by user", Trouble.AWAY),
    ("user executing the script can't", Trouble.DENIED),
    ("ACL failure in script", Trouble.DENIED),
)


def said(error: BaseException) -> str:
    """The error's text, or its class's name without one. redis-py's `repr` lacks the text."""
    return str(error) or type(error).__name__


def fault(server: str, error: BaseException) -> str:
    """What is wrong with the server, in words: it does not answer, or what it says where it does, and refuses."""
    away = trouble(error) is Trouble.AWAY and not isinstance(error, NotPrimary)
    return f"{server} does not answer" if away else f"{server} cannot be used: {said(error)}"


def trouble(error: BaseException) -> Trouble | None:
    """The server's trouble that an error shows; None for the call's own error, which any server would repeat.

    An error that knows its own says it as `trouble`, as those of `producers.connection.aws` do.
    """
    if hasattr(error, "trouble"):
        own: Trouble | None = error.trouble
        return own
    for classes, found in _CLASSES:
        if isinstance(error, classes):
            return found
    text = str(error)
    for found, pattern in _PATTERNS:
        if pattern.search(text):
            return found
    return next((found for words, found in _SAID if words in text), None)
