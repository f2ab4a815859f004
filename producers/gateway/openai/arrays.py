"""Growing JSON arrays as bytes. Python lists of the same values would be many times as large."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Arrays:
    """JSON arrays by name. `size`: bytes of all."""

    __slots__ = ("_arrays", "size")

    def __init__(self, names: Sequence[str]) -> None:
        self._arrays = {name: bytearray() for name in names}
        self.size = 0

    def add(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append each list's values to its array."""
        for name, values in lists.items():
            if values:
                array = self._arrays[name]
                before = len(array)
                array += b"," if array else b""
                array += dumps(values)[1:-1]
                self.size += len(array) - before

    def __getitem__(self, name: str) -> bytearray:
        return self._arrays[name]


def joined(names: Sequence[str], *parts: Arrays) -> Iterator[bytes | bytearray]:
    """The members of a JSON object in which each array joins those of all parts."""
    for at, name in enumerate(names):
        yield b'%b"%b":[' % (b"," if at else b"", name.encode())
        filled = [part[name] for part in parts if part[name]]
        for index, array in enumerate(filled):
            yield b"," if index else b""
            yield array
        yield b"]"


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
