"""Sums and messages between the ranks of a model, through memory that they share (ranks.h).

    memory: a page with the round of each rank | two slots of SLOT bytes for each rank, used in turn

All ranks go through the same rounds. In a round a rank may write its slot; then it raises its round, which wakes the
others that wait for it (by futex), and waits itself for the ranks whose slots it reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.errors import DeviceLostError
from engine.kernels.native.library import Library, Pool

#: The bytes before the slots, kHead of ranks.h, and of an Arrived, which begins with the rank's round.
_HEAD: Final = 4096
_LINE: Final = 64
_ROUND: Final = struct.Struct("=I")
#: The bytes of a slot. Longer sums and messages go through it in parts; pages that are never written take no memory.
SLOT: Final = 1 << 21
#: The bytes of the longest message that is accepted before the size of steps is known.
MAX_MESSAGE: Final = 1 << 26
#: The time in microseconds for which a rank polls for the others before it sleeps, where each has a core of its own.
_SPIN_US: Final = 50


def shared_memory(ranks: int) -> int:
    """Make the memory of an exchange between `ranks` ranks. Returns the descriptor of its file, which has no name."""
    descriptor = os.memfd_create("penstock-ranks")
    os.ftruncate(descriptor, _HEAD + 2 * ranks * SLOT)
    return descriptor


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one rank holds and computes: part `rank` of `ranks` equal ones."""

    rank: int
    ranks: int

    def of(self, count: int) -> range:
        """This rank's part of `count` consecutive items."""
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


def check_length(length: int, most: int) -> None:
    """Raise DeviceLostError if a message of `length` bytes is announced, and `most` are accepted."""
    if not 0 <= length <= most:
        raise DeviceLostError(f"a message of {length} bytes is announced; a step of this model has {most} at most")


#: All of a model.
WHOLE: Final = Share(0, 1)


class Exchange:
    """One rank's end. All ranks call the same methods in the same order, with equal sizes; rank 0 leads.

    Once a rank has failed, every method raises DeviceLostError on all ranks.
    """

    def __init__(self, library: Library, memory: int, share: Share, processes: int | None = None) -> None:
        """`memory`: the descriptor of `shared_memory`. `processes`: how many processes compute at the same time on this
        machine; None: as many as ranks."""
        self.share = share
        #: Raises DeviceLostError with the reason why the exchange has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        #: The bytes of the longest message that `receive` accepts.
        self.max_message = MAX_MESSAGE
        self._library = library
        self._memory = mmap.mmap(memory, 0)
        # A rank that polls keeps another from computing where there are more ranks than cores.
        cores = len(os.sched_getaffinity(0))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        spin = _SPIN_US if (processes or share.ranks) <= cores else 0
        self.address: int = library.exchange(address, share.rank, share.ranks, SLOT, spin)
        # Not at the end of the process, when a thread may still wait in it.
        weakref.finalize(self, library.free_exchange, self.address).atexit = False

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return bool(self._library.ranks_failed(self.address))

    def fail(self) -> None:
        """End all waiting of all ranks, for good. Any thread may call it."""
        self._library.fail_ranks(self.address)

    def rounds(self) -> list[int]:
        """The number of rounds that each rank has completed, modulo 2**32. Any thread may call it."""
        return [_ROUND.unpack_from(self._memory, _LINE * (1 + rank))[0] for rank in range(self.share.ranks)]

    def check(self) -> None:
        """Raise DeviceLostError if a rank has failed."""
        if self.failed:
            self.explain()
            raise DeviceLostError("a rank of the model has failed, and the others wait for it no more")

    def sum(self, pool: Pool, x: Tensor) -> Tensor:
        """Add up `x`, contiguous fp32, in place over all ranks: to the same bits on each."""
        self._library.sum(self.address, pool.address, x.data_ptr(), x.numel())
        self.check()
        return x

    def send(self, message: bytes | memoryview) -> None:
        """Send a message from rank 0 to the others."""
        if not isinstance(message, bytes):
            message = bytes(message)
        self._library.send(self.address, message, len(message))
        self.check()

    def receive(self) -> memoryview:
        """Wait, without limit, for rank 0's next message."""
        length = self._library.receive(self.address, 0)
        self.check()
        check_length(length, self.max_message)
        message = bytearray(length)
        if length:
            self._library.take(self.address, 0, (ctypes.c_char * length).from_buffer(message), length)
        self.check()
        return memoryview(message)

    def carry(self, rank: int, end: socket.socket) -> None:
        """Send what `rank`, of this machine, writes to another machine, until the exchange or the socket fails; then
        fail both. For a thread of its own; the exchange may be any rank's end."""
        self._library.carry(self.address, rank, end.fileno())

    def deliver(self, rank: int, end: socket.socket) -> None:
        """Write into this machine's memory what `rank`, of another machine, writes there. See `carry`."""
        self._library.deliver(self.address, rank, end.fileno())

    def gather(self, part: Tensor) -> Tensor | None:
        """On rank 0, the `part` of each rank: [ranks, *shape of `part`]. None on the others, which do not wait."""
        part = part.contiguous()
        by_rank = torch.empty(self.share.ranks, *part.shape, dtype=part.dtype) if self.share.rank == 0 else None
        self._library.gather(
            self.address, 0, part.data_ptr(), part.nbytes, None if by_rank is None else by_rank.data_ptr()
        )
        self.check()
        return by_rank
