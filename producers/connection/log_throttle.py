"""Throttled warnings about retries: one every few seconds for each cause, not one for each try.

`warn_throttled` is for our own warnings; `Throttle` filters loggers of libraries, which log each try.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from producers.connection.trouble import error_text

#: Shortest time (s) between two lines about one cause.
EVERY_S: Final = 5.0

_lock = threading.Lock()
#: (logger, message, kind of cause) -> (time from which the next line is allowed, number of suppressed lines).
_logged: dict[tuple[str, str, type], tuple[float, int]] = {}


def warn_throttled(log: logging.Logger, message: str, *args: object, extra: Mapping[str, str] | None = None) -> None:
    """Log a warning, unless the same one was logged within EVERY_S.

    The last argument is the cause: another kind of cause is logged at once. An exception without text appears as its
    class's name. `extra`: what it is about (`producers.connection.logs`).
    """
    suppressed = _suppressed((log.name, message, type(args[-1])))
    if suppressed is None:
        return
    if isinstance(args[-1], BaseException):
        args = (*args[:-1], error_text(args[-1]))
    if suppressed:
        message, args = f"{message} (and %d times more since that was last said)", (*args, suppressed)
    log.warning(message, *args, stacklevel=2, extra=extra)


class Throttle(logging.Filter):
    """Drops a library's warning, or worse, that it logged within EVERY_S, whatever its arguments."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        suppressed = _suppressed((record.name, str(record.msg), kind or type(None)))
        if suppressed:
            record.msg = f"{record.msg} (and {suppressed} times more since that was last said)"
        return suppressed is not None


def _suppressed(key: tuple[str, str, type]) -> int | None:
    """The number of suppressed lines of a cause; None if it must not be logged now."""
    now = time.monotonic()
    with _lock:
        due, suppressed = _logged.get(key, (now, 0))
        if now < due:
            _logged[key] = due, suppressed + 1
            return None
        _logged[key] = now + EVERY_S, 0
    return suppressed
