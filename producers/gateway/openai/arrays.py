"""JSON arrays that grow: what is kept of lists that are many times as large as objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Arrays:
    """Arrays by name. `size`: bytes."""

    __slots__ = ("_arrays", "size")

    def __init__(self, names: Sequence[str]) -> None:
        self._arrays = {name: bytearray() for name in names}
        self.size = 0

    def add(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append to each array."""
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
    """The members of an object that has the arrays of all parts, one after the other, by name."""
    for at, name in enumerate(names):
        yield b'%b"%b":[' % (b"," if at else b"", name.encode())
        filled = [part[name] for part in parts if part[name]]
        for place, array in enumerate(filled):
            yield b"," if place else b""
            yield array
        yield b"]"


def dumps(value: Any) -> bytes:
    """JSON as it is answered: compact, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
