"""Reads the body of a request for a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from producers.contract.batch import (
    ENDPOINTS,
    METADATA_FORM,
    NAME,
    PAIRS,
    TEXT,
    WINDOW,
    WINDOW_FORM,
    is_metadata,
    window_s,
)
from producers.gateway.files import expiry
from producers.gateway.http.errors import check_given, unknown_parameter, wrong

#: The body's JSON schema.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {
            "type": "string",
            "pattern": f"^{WINDOW.pattern}$",
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
            raise unknown_parameter(name, f"there are {', '.join(SCHEMA['properties'])}")
    check_given(given, *SCHEMA["required"])
    if given["endpoint"] not in ENDPOINTS:
        raise wrong("endpoint", given["endpoint"], f"one of {', '.join(ENDPOINTS)}")
    if not isinstance(given["input_file_id"], str):
        raise wrong("input_file_id", given["input_file_id"], "the id of a file")
    fields: dict[str, str | int] = {
        "endpoint": given["endpoint"],
        "input_file": given["input_file_id"],
        "completion_window": given["completion_window"],
    }
    seconds = window_s(given["completion_window"])
    if seconds is None:
        raise wrong("completion_window", given["completion_window"], WINDOW_FORM)
    if "metadata" in given:
        if not is_metadata(given["metadata"]):
            raise wrong("metadata", given["metadata"], METADATA_FORM)
        fields["metadata"] = json.dumps(given["metadata"])
    if "output_expires_after" in given:
        fields["output_kept"] = expiry.expires_after("output_expires_after", given["output_expires_after"])
    return seconds, fields
