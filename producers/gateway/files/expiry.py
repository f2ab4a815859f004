"""OpenAI's `expires_after`: the time for which a file is kept."""

from __future__ import annotations

from typing import Any, Final

from producers.gateway.http.errors import wrong

MIN_S: Final = 3600
MAX_S: Final = 30 * 24 * 3600
#: Its JSON schema.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": MIN_S, "maximum": MAX_S},
    },
    "additionalProperties": False,
}


def expires_after(name: str, value: Any) -> int:
    """The seconds of the parameter `name`, an object with `anchor` and `seconds`. Raises Problem."""
    wanted = f'{{"anchor": "created_at", "seconds": an integer from {MIN_S} to {MAX_S}}}'
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or set(value) != {"anchor", "seconds"}
        or value["anchor"] != "created_at"
        or type(seconds) is not int
        or not MIN_S <= seconds <= MAX_S
    ):
        raise wrong(name, value, wanted)
    return seconds
