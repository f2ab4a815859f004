"""Log lines about what is tried again and again: not one a try, but one every few seconds for each cause."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from producers.connection.trouble import said

#: No two lines about one cause within this (s).
EVERY_S: Final = 5.0

_lock = threading.Lock()
#: By logger, message and kind of cause: when the next may be said, and how many were not.
_said: dict[tuple[str, str, type], tuple[float, int]] = {}


def complain(log: logging.Logger, message: str, *args: object) -> None:
    """Warn, unless the same was said a moment ago. The last argument is the cause: another kind of it is news; one that
    says nothing is named."""
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
