"""What is wrong with a server, by the error that it gave: the place that tells passing trouble from a call's own."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from redis import exceptions as redis


class Trouble(Enum):
    """What becomes of a call that failed so. None of them says anything of the call itself."""

    AWAY = "away"
    """Not reached, starting, failing over or busy: the same call may do in a moment. It may have been done."""
    FULL = "full"
    """Memory or disk are full: nothing new is taken until there is room. It was not done."""
    DENIED = "denied"
    """Wrong password, or not allowed to this user: until somebody changes that. It was not done."""
    UNUSABLE = "unusable"
    """Not a kind of server that can be used."""


#: For programs, in errors that callers are shown.
CODES: Final[dict[Trouble | None, str]] = {
    Trouble.FULL: "storage_full",
    Trouble.DENIED: "access_denied",
    Trouble.UNUSABLE: "unusable_server",
}


class UnusableServer(redis.RedisError):
    """A cluster, a Sentinel or a version too old; the message says what to use instead."""


class NotPrimary(redis.ConnectionError):
    """A replica: given by mistake, or a primary that was demoted, or a failover that is not over."""


#: The word that a server's error begins with, or that stands in a script's error.
_WORDS: Final = {
    Trouble.FULL: "OOM|MISCONF",
    Trouble.DENIED: "NOPERM|NOAUTH|WRONGPASS|DENIED",
    Trouble.AWAY: "READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|BUSY|TRYAGAIN|NOSCRIPT|UNBLOCKED",
}
_PATTERNS: Final = [(trouble, re.compile(rf"(?:^|-)(?:{words})\b")) for trouble, words in _WORDS.items()]
#: redis-py takes the word off these errors' texts. The first that fits counts.
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
#: What SCRIPT KILL and a user's own ACL make of a script that runs.
_SAID: Final = (
    ("killed by user", Trouble.AWAY),
    ("user executing the script can't", Trouble.DENIED),
    ("ACL failure in script", Trouble.DENIED),
)


def said(error: BaseException) -> str:
    """What it says, or its name where it says nothing. redis-py's `repr` does not hold what was said."""
    return str(error) or type(error).__name__


def trouble(error: BaseException) -> Trouble | None:
    """None where the error is the call's own: the same call would fail again on any server."""
    for classes, found in _CLASSES:
        if isinstance(error, classes):
            return found
    text = str(error)
    for found, pattern in _PATTERNS:
        if pattern.search(text):
            return found
    return next((found for words, found in _SAID if words in text), None)
