"""Ids that sort by time: those of files and batches."""

from __future__ import annotations

import hashlib
import secrets


def timed_id(prefix: str, ms: int, seed: str | None = None) -> str:
    """An id such as `file-` or `batch_` and 32 hexadecimal digits, which sorts by `ms`, the unix time.

    With a seed it is a function of time and seed, so that who makes the thing twice gives it the same id.
    """
    rest = secrets.token_hex(10) if seed is None else hashlib.sha256(f"{prefix}:{seed}".encode()).hexdigest()[:20]
    return f"{prefix}{ms:012x}{rest}"
