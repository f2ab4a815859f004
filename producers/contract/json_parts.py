"""Counts what is in a JSON text before it is parsed.

Python's parser holds the interpreter until it is done, and lists and keys take it a hundred times longer than text of
the same size, numbers ten times. So a text of more parts than any request needs is refused without being parsed.
"""

from __future__ import annotations

from typing import Final

#: Most lists, objects and strings of a text, names of members included: about 50 ms of the interpreter's time. 4,096
#: messages of text parts have two thirds of them.
MAX_PARTS: Final = 1 << 16
#: Texts of no more bytes have few enough parts.
SMALL: Final = 64 * 1024
#: Bytes that are counted in one go.
SLICE: Final = 256 * 1024


def count_parts(body: bytes, enough: int) -> int:
    """An upper bound of a JSON text's lists, objects and strings; the exact number if that is above `enough`."""
    count = body.count(b"[") + body.count(b"{") + body.count(b'"')
    if count <= enough:
        return count
    brackets, quotes = _outside_of_strings(body, b"[", b"{")
    return brackets + quotes // 2


def count_values(body: bytes, enough: int) -> int:
    """One more than a JSON text's commas: with the lists and objects they bound its values. An upper bound of that; the
    exact number if it is above `enough`."""
    commas = body.count(b",")
    return 1 + (commas if commas < enough else _outside_of_strings(body, b",")[0])


def _outside_of_strings(body: bytes, *signs: bytes) -> tuple[int, int]:
    """Count these characters in a JSON text outside of its strings, and the quotes around those."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    quotes = count = 0
    for at in range(0, len(plain), SLICE):
        texts = plain[at : at + SLICE].split(b'"')
        outside = b"".join(texts[quotes % 2 :: 2])
        count += sum(map(outside.count, signs))
        quotes += len(texts) - 1
    return count, quotes
