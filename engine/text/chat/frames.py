"""What goes between `engine.text.chat.confined` and its child: a length (HEADER bytes, big-endian), then so many bytes.

Those are JSON, but for an answer, whose first byte says what follows: the text, or JSON that says why there is none.
"""

from __future__ import annotations

from typing import Final

HEADER: Final = 4
#: UTF-8 follows, in which a lone surrogate, which JSON may carry, is what UTF-8 would make of it.
TEXT: Final = b"T"
#: JSON follows: {"stopped": why} or {"model": message} or {"request": message, "code": code}.
REASON: Final = b"R"
#: Characters of each of those; a template chooses the words of its errors.
LONGEST: Final = 1000
#: Bytes of the longest such answer, in which JSON may write a character in 12.
LONGEST_REASON: Final = 1 << 16


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER, "big") + data
