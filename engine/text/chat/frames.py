"""The frames between `engine.text.chat.confined` and its child: a length (HEADER bytes, big-endian), then that many
bytes.

The bytes are JSON. In an answer, the first byte says whether the text follows, or JSON with the reason why there is
none.
"""

from __future__ import annotations

from typing import Final

HEADER: Final = 4
#: UTF-8 follows. A lone surrogate, which JSON may carry, is encoded as UTF-8 would encode it.
TEXT: Final = b"T"
#: JSON follows: {"stopped": why} or {"model": message} or {"request": message, "code": code}.
REASON: Final = b"R"
#: The most characters of each such text, because a template chooses the text of its errors.
LONGEST: Final = 1000
#: The most bytes of such an answer. JSON may take 12 bytes for a character.
LONGEST_REASON: Final = 1 << 16


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER, "big") + data
