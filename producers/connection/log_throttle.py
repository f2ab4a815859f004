"""Throttled warnings about retries: one every few seconds for each cause, not one for each try.

`warn_throttled` is for our own; `Throttle` is a filter for loggers of libraries, which log each try.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from producers.connection.trouble import said

#: Least time (s) between two lines about one cause.
EVERY_S: Final = 5.0

_lock = threading.Lock()
#: (logger, message, kind of cause) -> (time from which the next line is allowed, number of suppressed lines).
_said: dict[tuple[str, str, type], tuple[float, int]] = {}


def warn_throttled(log: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless the same one was logged within EVERY_S.

    The last argument is the cause: another kind of cause is logged at once. An exception without text is shown by its
    name.
    """
    unsaid = _unsaid((log.name, message, type(args[-1])))
    if unsaid is None:
        return
    if isinstance(args[-1], BaseException):
        args = (*args[:-1], said(args[-1]))
    if unsaid:
        message, args = f"{message} (and %d times more since that was last said)", (*args, unsaid)
    log.warning(message, *args, stacklevel=2)


class Throttle(logging.Filter):
    """Drops a library's warning, or worse, that it logged within EVERY_S, whatever its arguments."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        unsaid = _unsaid((record.name, str(record.msg), kind or type(None)))
        if unsaid:
            record.msg = f"{record.msg} (and {unsaid} times more since that was last said)"
        return unsaid is not None


def _unsaid(key: tuple[str, str, type]) -> int | None:
    """How often a cause was not logged since it was last; None if it is not to be logged now."""
    now = time.monotonic()
    with _lock:
        due, unsaid = _said.get(key, (now, 0))
        if now < due:
            _said[key] = due, unsaid + 1
            return None
        _said[key] = now + EVERY_S, 0
    return unsaid
