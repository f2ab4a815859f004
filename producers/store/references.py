"""References to blobs from elsewhere: from results whose blocks were moved to a blob, and from messages' bodies."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from producers.store.blobs import Blobs, open_blobs

#: Most places whose connections are kept.
MOST: Final = 8


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
        """Raises ValueError, KeyError or TypeError for what is none."""
        said: Mapping[str, Any] = json.loads(raw)
        return cls(str(said["place"]), str(said["name"]), tuple(int(end) for end in said["ends"]))


class Places:
    """The blobs that references name. Threads may share it.

    `own`: where they all are, whatever the references say, for a process that was told: it may have the same folder
    under another name, or reach the bucket by another endpoint. None: where each reference says.
    """

    def __init__(self, own: str | None = None) -> None:
        self.own = own
        self._open: dict[str, Blobs] = {}
        self._lock = threading.Lock()

    def block(self, reference: Reference, number: int) -> bytes | None:
        """A block of a result; None behind its last one. Blocks.

        Raises BlobNotFound, OSError, ValueError for a bad place, and AwsNotInstalled.
        """
        if number >= len(reference.ends):
            return None
        return self.at(reference.place).read(reference.name, *reference.blocks[number])

    def at(self, place: str) -> Blobs:
        """Raises as `open_blobs`."""
        place = self.own or place
        with self._lock:
            if place not in self._open:
                if len(self._open) >= MOST:
                    self._open.clear()
                self._open[place] = open_blobs(place)
            return self._open[place]
