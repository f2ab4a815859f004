"""Throttled warnings about retries: one every few seconds for each cause, not one for each try."""

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
    key = log.name, message, type(args[-1])
    now = time.monotonic()
    with _lock:
        due, unsaid = _said.get(key, (now, 0))
        if now < due:
            _said[key] = due, unsaid + 1
            return
        _said[key] = now + EVERY_S, 0
    if isinstance(args[-1], BaseException):
        args = (*args[:-1], said(args[-1]))
    if unsaid:
        message, args = f"{message} (and %d times more since that was last said)", (*args, unsaid)
    log.warning(message, *args, stacklevel=2)
