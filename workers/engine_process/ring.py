"""Memory that a worker shares with its engine's process: a ring of records, and the names of the step under way.

    engine ─▶ `name`: requests of the steps under way, before the launch ─▶ steps ─▶ `write`: what they made ─▶ wake
    front  ◀─ `read`: whole records, in order, also those of an engine that has died since

A record is there once its last byte is: `tail` moves after the bytes. A record that is larger than the room that is
free comes in parts, and the reader hands it out when it has all of them. Whoever dies leaves nothing half done: the
reader drops the beginning of a record that has no end, and names are written beside the ones that hold, which a single
word then exchanges.

Linux only: the memory is anonymous, and comes to the engine's process by fork(2).
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

#: Bytes of the ring: some hundred steps of 256 sequences. Records that are larger pass through in parts.
RING_BYTES: Final = 4 << 20
#: The most requests that are named; of more it is only known that it may be any.
MAX_NAMES: Final = 1 << 14
#: Pause (s) of a writer that finds the ring full.
FULL_S: Final = 0.001

#: Words (8 bytes) of the head, each in a cache line of its own.
_TAIL, _HEAD, _SLOT, _SINCE, _BEAT = (8 * line for line in range(5))
_SLOTS: Final = 4096
_SLOT_BYTES: Final = 8 * (1 + MAX_NAMES)
_RING: Final = _SLOTS + 2 * _SLOT_BYTES
_LENGTH: Final = struct.Struct("=q")


class Ring:
    """Made before the fork; both processes use the same object. `write` is for any thread of the writer, `name` for one
    thread, `read` for one thread of the reader. Times are monotonic, which all processes of a machine share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RING + RING_BYTES)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[:_SLOTS].cast("q")
        self._times = self._bytes[:_SLOTS].cast("d")
        self._lock = threading.Lock()
        self._unread = bytearray()

    # ---- the engine's process

    def write(self, record: bytes, wake: Callable[[], None]) -> None:
        """Append a record and `wake` the reader. Waits while there is no room."""
        data = memoryview(_LENGTH.pack(len(record)) + record)
        with self._lock:
            while data:
                tail = self._words[_TAIL]
                room = RING_BYTES - (tail - self._words[_HEAD])
                if room == 0:
                    time.sleep(FULL_S)
                    continue
                at = tail % RING_BYTES
                count = min(room, len(data), RING_BYTES - at)
                self._bytes[_RING + at : _RING + at + count] = data[:count]
                data = data[count:]
                _order()
                self._words[_TAIL] = tail + count
                wake()

    def name(self, numbers: Sequence[int]) -> None:
        """Name the requests of the steps under way, whose launch comes next; () if there is none."""
        slot = 1 - self._words[_SLOT]
        at = _SLOTS + slot * _SLOT_BYTES
        known = numbers if len(numbers) <= MAX_NAMES else ()
        data = array("q", (len(numbers), *known)).tobytes()
        self._bytes[at : at + len(data)] = data
        _order()
        self._words[_SLOT] = slot
        self.since = time.monotonic() if numbers else 0.0

    @property
    def since(self) -> float:
        """When the step under way began; 0.0 while there is none."""
        return self._times[_SINCE]

    @since.setter
    def since(self, at: float) -> None:
        self._times[_SINCE] = at

    @property
    def beat(self) -> float:
        """When the engine's process last showed that it runs; 0.0 before it has."""
        return self._times[_BEAT]

    @beat.setter
    def beat(self, at: float) -> None:
        self._times[_BEAT] = at

    # ---- the front

    def read(self) -> list[bytes]:
        """The records that are whole by now, in order."""
        head, tail = self._words[_HEAD], self._words[_TAIL]
        _order()
        while head < tail:
            at = head % RING_BYTES
            count = min(tail - head, RING_BYTES - at)
            self._unread += self._bytes[_RING + at : _RING + at + count]
            head += count
        _order()
        self._words[_HEAD] = head
        records, start, unread = [], 0, self._unread
        while len(unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, start)
            end = start + _LENGTH.size + length
            if len(unread) < end:
                break
            records.append(bytes(memoryview(unread)[start + _LENGTH.size : end]))
            start = end
        if start:
            self._unread = unread[start:]
        return records

    @property
    def unread(self) -> int:
        """The bytes that were written and not read yet."""
        return self._words[_TAIL] - self._words[_HEAD]

    def names(self) -> Sequence[int] | None:
        """The requests of the steps under way; None if it may be any."""
        at = _SLOTS + self._words[_SLOT] * _SLOT_BYTES
        words = self._bytes[at : at + _SLOT_BYTES].cast("q")
        count = words[0]
        return None if count > MAX_NAMES else words[1 : 1 + count].tolist()


_FENCE = threading.Lock()


def _order() -> None:
    """Let what was read and written before be so for the other process, too, before what comes: a lock that is released
    and taken is a full fence. Processors of the x86 kind need none."""
    with _FENCE:
        pass
    with _FENCE:
        pass
