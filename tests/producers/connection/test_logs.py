"""Lines of logs: text that ends with the trace, or JSON with what the line is about."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from producers.connection.logs import JsonLines, TextLines, set_up, subject

ABOUT = subject("t1", "4bf9", "acme")


def record(message: str, *args: object, error: BaseException | None = None, **extra: str) -> logging.LogRecord:
    logger = logging.getLogger("x.y")
    info = None if error is None else (type(error), error, error.__traceback__)
    return logger.makeRecord("x.y", logging.WARNING, __file__, 1, message, args, info, extra=extra)


def test_text_ends_with_the_trace() -> None:
    assert (
        TextLines("up | ").format(record("%d%% of %s", 5, "it", **ABOUT)).endswith("WARNING x.y: 5% of it trace=4bf9")
    )
    assert TextLines("50% | ").format(record("done")).startswith("50% | ")


def test_a_traceback_follows_the_trace() -> None:
    try:
        raise ValueError("bad")
    except ValueError as caught:
        first, *others = TextLines().format(record("it failed", error=caught, **ABOUT)).splitlines()
    assert first.endswith("it failed trace=4bf9")
    assert others[-1] == "ValueError: bad"


def test_json_is_an_object_a_line_whatever_the_message() -> None:
    try:
        raise ValueError("one\ntwo")
    except ValueError as caught:
        line = JsonLines().format(record('say "%s"\n\ud800', "hi", error=caught, **ABOUT))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("error").endswith("ValueError: one\ntwo")
    assert datetime.fromisoformat(fields.pop("time")).tzinfo is not None
    assert fields == {
        "level": "warning",
        "logger": "x.y",
        "message": 'say "hi"\n\ud800',
        "task_id": "t1",
        "trace_id": "4bf9",
        "tenant": "acme",
    }


def test_a_long_message_is_cut() -> None:
    assert len(JsonLines().format(record("x" * 1_000_000))) < 20_000


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="PENSTOCK_LOG_FORMAT is 'xml'; it must be text or json"):
        set_up("INFO", environment={"PENSTOCK_LOG_FORMAT": "xml"})
