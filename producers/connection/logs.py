"""Lines of logs: text, or with `PENSTOCK_LOG_FORMAT=json` an object a line.

What a line is about comes as `extra` of the call (`subject`): the task, its trace and its tenant. Text ends with the
trace alone, since messages name the task.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

#: The environment's name of the format.
FORMAT: Final = "PENSTOCK_LOG_FORMAT"
FORMATS: Final = ("text", "json")
#: Fields of a line that say what it is about.
SUBJECT: Final = ("task_id", "trace_id", "tenant", "request_id")


def subject(
    task_id: str | None = None, trace_id: str | None = None, tenant: str | None = None, request_id: str | None = None
) -> dict[str, str]:
    """The `extra` of a line, without what is not known."""
    values = zip(SUBJECT, (task_id, trace_id, tenant, request_id), strict=True)
    return {name: value for name, value in values if value}


class TextLines(logging.Formatter):
    """`prefix`: begins each line."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(f"{prefix.replace('%', '%%')}%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        trace_id = getattr(record, "trace_id", None)
        return line if trace_id is None else f"{line} trace={trace_id}"


class JsonLines(logging.Formatter):
    """`time` is RFC 3339 in UTC, `error` a traceback. Texts are cut at MAX_TEXT characters."""

    MAX_TEXT: Final = 16_384

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[: self.MAX_TEXT],
        }
        line |= {name: value for name in SUBJECT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-self.MAX_TEXT :]
        return json.dumps(line)


def set_up(level: str, prefix: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Log from this level on, in the environment's format. `prefix`: begins each line of text. Raises ValueError for
    an unknown format."""
    name = environment.get(FORMAT, "").strip().lower() or "text"
    if name not in FORMATS:
        raise ValueError(f"{FORMAT} is {name!r}; it must be text or json")
    handler = logging.StreamHandler()
    handler.setFormatter(TextLines(prefix) if name == "text" else JsonLines())
    logging.basicConfig(level=level, handlers=[handler])
