"""Reads the body of a request for a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from producers.errors import shown
from producers.gateway.files import expiry
from producers.gateway.http.errors import Problem
from producers.gateway.openai.lines import URLS
from producers.store.batches import MAX_WINDOW_S

#: Most pairs of a batch's metadata, and the most characters of a name and of a text.
PAIRS, NAME, TEXT = 16, 64, 512
_WINDOW: Final = re.compile("([1-9][0-9]{0,4})([mhd])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 24 * 3600}
#: The body's JSON schema.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(URLS)},
        "completion_window": {
            "type": "string",
            "pattern": f"^{_WINDOW.pattern}$",
            "description": "such as 24h; 7d at most",
        },
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": PAIRS,
            "propertyNames": {"maxLength": NAME},
            "additionalProperties": {"type": "string", "maxLength": TEXT},
        },
        "output_expires_after": {"anyOf": [expiry.SCHEMA, {"type": "null"}]},
    },
    "additionalProperties": False,
}


def read(body: Mapping[str, Any]) -> tuple[int, dict[str, str | int]]:
    """The completion window (s), and the batch's fields (`producers.store.batches.create`). Raises Problem."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in SCHEMA["properties"]:
            known = ", ".join(SCHEMA["properties"])
            raise Problem(
                400, f"unknown parameter {shown(name)}; there are {known}", code="unknown_parameter", param=name
            )
    for name in SCHEMA["required"]:
        if name not in given:
            raise Problem(400, f"{name} is missing", code="missing_required_parameter", param=name)
    if given["endpoint"] not in tuple(URLS):
        raise _wrong("endpoint", given["endpoint"], f"one of {', '.join(URLS)}")
    if not isinstance(given["input_file_id"], str):
        raise _wrong("input_file_id", given["input_file_id"], "the id of a file")
    fields: dict[str, str | int] = {
        "endpoint": given["endpoint"],
        "input_file": given["input_file_id"],
        "completion_window": given["completion_window"],
    }
    window_s = _window(given["completion_window"])
    if "metadata" in given:
        fields["metadata"] = _metadata(given["metadata"])
    if "output_expires_after" in given:
        fields["output_kept"] = expiry.expires_after("output_expires_after", given["output_expires_after"])
    return window_s, fields


def _window(value: Any) -> int:
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 60 <= seconds <= MAX_WINDOW_S:
        raise _wrong("completion_window", value, "minutes, hours or days, such as 30m, 24h or 7d; 7 days at most")
    return seconds


def _metadata(value: Any) -> str:
    """The metadata as JSON."""
    if (
        not isinstance(value, dict)
        or len(value) > PAIRS
        or not all(len(name) <= NAME and isinstance(text, str) and len(text) <= TEXT for name, text in value.items())
    ):
        wanted = f"at most {PAIRS} texts by name; a name has up to {NAME} characters, a text up to {TEXT}"
        raise _wrong("metadata", value, wanted)
    return json.dumps(value)


def _wrong(name: str, value: Any, wanted: str) -> Problem:
    return Problem(400, f"{name} is {shown(value)}; it must be {wanted}", code="invalid_value", param=name)
