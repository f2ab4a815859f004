"""Where one request or reply ends in a stream of bytes, by the Redis protocol (redis.io, RESP2 and RESP3)."""

from __future__ import annotations

_SIMPLE = b"+-:_#,("
_SIZED = b"$=!"
#: Aggregates, and how many frames follow for each unit of their length.
_NESTED = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2}


def frame_end(data: bytes | bytearray, start: int = 0) -> int | None:
    """The offset after the frame that begins at `start`; None while some of it is missing."""
    left, at = 1, start
    while left:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        kind = data[at]
        if kind in _SIZED:
            size = int(data[at + 1 : line])
            at = line + 2 if size < 0 else line + 2 + size + 2
            if at > len(data):
                return None
        elif kind in _NESTED:
            at, left = line + 2, left + max(0, int(data[at + 1 : line])) * _NESTED[kind]
        elif kind in _SIMPLE:
            at = line + 2
        else:
            raise ValueError(f"no RESP frame begins with {bytes(data[at : at + 20])!r}")
        left -= 1
    return at


def arguments(request: bytes | bytearray) -> list[bytes]:
    """A request's words: one whole frame, an array of bulk strings."""
    words: list[bytes] = []
    at = request.index(b"\r\n") + 2
    while at < len(request):
        line = request.index(b"\r\n", at)
        size = int(request[at + 1 : line])
        words.append(bytes(request[line + 2 : line + 2 + size]))
        at = line + 2 + size + 2
    return words
