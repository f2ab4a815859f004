"""The choices of a batch: endpoints, completion windows, metadata."""

from __future__ import annotations

import re
from typing import Any, Final

#: Paths that a batch's lines may be for. The first is that of a batch whose lines name none.
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Longest completion window (s), and the shortest.
MAX_WINDOW_S: Final = 7 * 24 * 3600
MIN_WINDOW_S: Final = 60
WINDOW: Final = re.compile("([1-9][0-9]{0,4})([mhd])")
#: What a completion window has to be, for errors.
WINDOW_FORM: Final = "minutes, hours or days, such as 30m, 24h or 7d; 7 days at most"
#: Most pairs of a batch's metadata, and the most characters of a name and of a text.
PAIRS, NAME, TEXT = 16, 64, 512
METADATA_FORM: Final = f"at most {PAIRS} texts by name; a name has up to {NAME} characters, a text up to {TEXT}"
_SECONDS: Final = {"m": 60, "h": 3600, "d": 24 * 3600}


def window_s(value: Any) -> int | None:
    """The seconds of a completion window such as "24h"; None for what is none."""
    found = WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    return seconds if MIN_WINDOW_S <= seconds <= MAX_WINDOW_S else None


def is_metadata(value: Any) -> bool:
    """Whether a batch may have this metadata."""
    return (
        isinstance(value, dict)
        and len(value) <= PAIRS
        and all(
            isinstance(name, str) and len(name) <= NAME and isinstance(text, str) and len(text) <= TEXT
            for name, text in value.items()
        )
    )
