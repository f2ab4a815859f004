"""W3C Trace Context (w3.org/TR/trace-context): which trace of its caller a task belongs to.

Penstock makes no spans of its own. It keeps the caller's `traceparent` in the record, and names its trace in views and
log lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: version "-" trace id "-" parent id "-" flags; a later version may add more after another "-".
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?"
)


def trace_id(traceparent: Any) -> str | None:
    """The trace of a `traceparent`; None for one that the specification tells to ignore."""
    found = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if found is None or (found[1] == "00" and found[3] is not None):
        return None
    return found[2]


def trace_fields(traceparent: Any) -> dict[str, str]:
    """The record's fields for a caller's `traceparent`: none for a bad one, since tracing fails no task."""
    return {} if trace_id(traceparent) is None else {"traceparent": traceparent}


def trace_suffix(fields: Mapping[str, Any]) -> str:
    """The end of a log line about a task with these fields: ` trace=...`, or nothing."""
    found = trace_id(fields.get("traceparent"))
    return "" if found is None else f" trace={found}"
