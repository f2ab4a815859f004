"""The frames between a ConfinedProcess and its child: a length (HEADER bytes, big-endian), then that many bytes.

The bytes are JSON. In an answer, the first byte says what follows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

HEADER: Final = 4
#: UTF-8 text follows. A lone surrogate, which JSON may carry, is encoded as UTF-8 would encode it.
TEXT: Final = b"T"
#: JSON follows.
VALUE: Final = b"V"
#: JSON follows that says why there is no answer: {"stopped": why}, {"model": message} or {"request": message, "code":
#: code, "param": parameter or null, "fields": those of an ErrorText}.
REASON: Final = b"R"
#: The most characters of each text of a reason, because a template chooses the text of its errors.
LONGEST: Final = 1000
#: The most bytes of a reason. JSON may take 12 bytes for a character.
LONGEST_REASON: Final = 1 << 16


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER, "big") + data


def reason(named: Sequence[Sequence[int | str]] = (), **fields: str | None) -> bytes:
    """An answer's content that says why there is no answer. `named`: the fields that its message names."""
    texts = {name: text and text[:LONGEST] for name, text in fields.items()}
    return REASON + json.dumps(texts | ({"fields": named} if named else {})).encode()


def answer_of(data: bytes) -> tuple[bool, Any]:
    """Whether a frame's content is an answer, with the answer or the reason why there is none."""
    if data.startswith(TEXT):
        return True, data[len(TEXT) :].decode("utf-8", "surrogatepass")
    return data.startswith(VALUE), json.loads(data[1:])
