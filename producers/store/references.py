"""References to blobs from elsewhere: from results whose blocks were moved to a blob."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from producers.store.blobs import Blobs, open_blobs

#: Most places whose connections are kept.
MAX_PLACES: Final = 8


@dataclass(frozen=True, slots=True)
class Reference:
    """The place and name of a blob. `ends`: for a result, where each of its blocks ends (bytes)."""

    place: str
    name: str
    ends: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Begin and size of each block of a result."""
        return [(start, end - start) for start, end in zip((0, *self.ends), self.ends, strict=False)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, raw: str | bytes) -> Self:
        """Raises ValueError, KeyError or TypeError for an unreadable reference."""
        values: Mapping[str, Any] = json.loads(raw)
        return cls(str(values["place"]), str(values["name"]), tuple(int(end) for end in values["ends"]))


class Places:
    """The blobs that references name. Threads may share it.

    `location`: where they all are, whatever the references say, for a process that has a setting: it may have the same
    folder under another name, or reach the bucket by another endpoint. None: where each reference says.
    """

    def __init__(self, location: str | None = None) -> None:
        self.location = location
        self._open: dict[str, Blobs] = {}
        self._lock = threading.Lock()

    def block(self, reference: Reference, number: int) -> bytes | None:
        """A block of a result; None behind its last one. Blocks.

        Raises BlobNotFound, OSError, ValueError for a bad place, and AwsNotInstalled.
        """
        if number >= len(reference.ends):
            return None
        return self.at(reference.place).read(reference.name, *reference.blocks[number])

    def at(self, location: str) -> Blobs:
        """Raises as `open_blobs`."""
        location = self.location or location
        with self._lock:
            if location not in self._open:
                if len(self._open) >= MAX_PLACES:
                    self._open.clear()
                self._open[location] = open_blobs(location)
            return self._open[location]
