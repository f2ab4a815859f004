"""When a delivery that failed is tried again (the schedule of standardwebhooks.com)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Final

#: Longest wait (s) that a receiver's Retry-After is granted.
MAX_RETRY_AFTER_S: Final = 24 * 3600.0
#: A wait is up to this much longer than the schedule says, so that retries do not come all at once.
JITTER: Final = 0.2


def next_delay(schedule: Sequence[float], tries: int, retry_after_s: float | None) -> float | None:
    """Seconds until the next try after `tries` failed ones; None if that was the last.

    A Retry-After makes it later, never sooner.
    """
    if tries >= len(schedule):
        return None
    asked = min(retry_after_s or 0.0, MAX_RETRY_AFTER_S)
    return max(schedule[tries], asked) * random.uniform(1.0, 1.0 + JITTER)  # noqa: S311 - spreads load


def retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header (RFC 9110, 10.2.3) asks for: a number or a date. None for anything else."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # such as a year of twenty digits
        return None
    return max(0.0, at - time.time())
