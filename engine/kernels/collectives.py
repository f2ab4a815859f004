"""Sums over the ranks of a model by torch.distributed: NCCL between GPUs; gloo through the host's memory, between ranks
on CPUs or on a GPU that they share.

    RanksStore      addresses, by the ranks' sockets with their lead -> the ranks connect to each other
    Collectives     one group of ranks: sums and gathers of a stage, or broadcasts from one stage to the next
    Communicators   all groups that a rank is in

On CPUs with native kernels the ranks use shared memory instead (native/exchange.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from engine.errors import DeviceLostError
from engine.kernels.native.exchange import Share

#: The times for which ranks wait for each other when they connect, and in a sum, where one may compile kernels.
_CONNECT, _SUM = timedelta(seconds=60), timedelta(seconds=600)
#: The key that the lead sets in their RanksStore once all ranks have their shares, and are to connect.
READY: Final = "ready"
#: The address at which ranks of one machine wait for each other.
LOOPBACK: Final = "127.0.0.1"
#: ioctl(2)'s request for the address of an interface (netdevice(7)).
_SIOCGIFADDR: Final = 0x8915


class RanksStore(distributed.Store):  # type: ignore[misc]  # it has no types
    """A torch.distributed.Store by which ranks find each other: values by key. A value that one sets goes to all, by
    the sockets that they have with their lead.

    Any thread may call its methods."""

    def __init__(self, publish: Callable[[str, bytes], None] = lambda key, value: None) -> None:
        """`publish`: sends a key and value that this rank sets to the others, which `learn` it."""
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def learn(self, key: str, value: bytes) -> None:
        """Store a value that another rank has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Store a value, and send it to all ranks."""
        self.learn(key, value)
        self._publish(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. `timeout`: None waits without limit. Raises TimeoutError."""
        seconds = None if timeout is None else timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), seconds):
                raise TimeoutError(f"{', '.join(keys)} is not set in {seconds:.0f} s")

    def get(self, key: str) -> bytes:
        """The value of a key, once a rank has set it. Raises TimeoutError if none does within `_CONNECT`."""
        self.wait([key], _CONNECT)
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._values for key in keys)


class Collectives:
    """One rank's end of a group. All its ranks call the same methods in the same order, with equal shapes and dtypes;
    rank 0 leads. Tensors are on the rank's device, of any shape and dtype.

    No method waits for a GPU; with NCCL all can be recorded in CUDA graphs. They raise DeviceLostError once a rank has
    failed, with gloo when they are called, with NCCL if it has been noticed by then; torch.OutOfMemoryError stays
    one.
    """

    def __init__(self, share: Share, backend: str, *, ordered: bool = False, name: str = "") -> None:
        """`share`: this rank's number, and the number of ranks. `backend`: "nccl" or "gloo". `ordered`: parts are
        added in the ranks' order, in fp32, so that a row has the same bits beside any others. `name`: differs between
        groups that meet by one store."""
        self.share, self.backend, self._ordered, self._name = share, backend, ordered, name
        #: Raises DeviceLostError with the reason why a rank has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        self.failed = False
        self._group: Any = None

    @property
    def identity(self) -> str:
        """A text that differs between ways of summing that may give other bits, for an engine's fingerprint."""
        return f"{self.share.ranks} ranks by {self.backend}"

    def connect(self, store: RanksStore, device: torch.device, address: str = LOOPBACK) -> None:
        """Connect to the other ranks of the group, within a minute. `store`: common to all. `device`: this rank's.
        `address`: of this machine, IPv4, at which the others reach it. Raises DeviceLostError."""
        rank, ranks = self.share.rank, self.share.ranks
        try:
            addresses = distributed.PrefixStore(self._name, store)
            self._group = (_nccl if self.backend == "nccl" else _gloo)(addresses, rank, ranks, address)
            self.sum(torch.zeros(ranks, device=device))  # NCCL connects with the first one
        except (RuntimeError, ValueError, TimeoutError) as error:
            reason = f"rank {rank} of {ranks} does not reach the others from {address}"
            if address != LOOPBACK:
                reason += " (is there a firewall between the machines?)"
            raise self._lost(f"{reason}: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, of its shape and dtype, to the same bits on each. May overwrite `x`."""
        if self._ordered:
            parts = self.gather(x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            return total.to(x.dtype)
        x = x.contiguous()
        self._begin(x, lambda group: group.allreduce([x]))()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x`, contiguous, with that of rank 0. Returns it."""
        self.begin_broadcast(x)()
        return x

    def begin_broadcast(self, x: Tensor) -> Callable[[], None]:
        """Begin a broadcast behind the device's work so far. Returns a function that lets the device's later work wait
        for it. With NCCL, work between the two goes on beside it."""
        return self._begin(x, lambda group: group.broadcast([x]))

    def gather(self, x: Tensor) -> Tensor:
        """The values of all ranks: [ranks, *shape of `x`]."""
        x = x.contiguous()
        by_rank = x.new_empty(self.share.ranks, *x.shape)
        if self.backend == "nccl":
            self._begin(x, lambda group: group._allgather_base(by_rank, x))()
        else:
            self._begin(x, lambda group: group.allgather([list(by_rank.unbind())], [x]))()
        return by_rank

    def fail(self) -> None:
        """End all waiting of this rank, for good. Any thread may call it."""
        self.failed = True
        if self._group is not None:
            with suppress(RuntimeError, NotImplementedError):  # gloo's is not there in every release
                self._group.abort()

    def _begin(self, x: Tensor, begin: Callable[[Any], Any]) -> Callable[[], None]:
        if x.is_meta:
            return lambda: None  # kernels are compiled ahead, by one process
        if self.failed:
            raise self._lost()
        work = self._guarded(lambda: begin(self._group))

        def wait() -> None:
            self._guarded(work.wait)

        return wait

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception | str | None = None) -> DeviceLostError:
        self.failed = True
        self.explain()
        return DeviceLostError(f"a rank of the model has failed{'' if error is None else f': {error}'}")


class Communicators:
    """A rank's ends of all its groups: `sums`, of its stage, None if it is the stage's only rank; and its links
    `before` and `after`, with the neighbouring stages, and `back`, each None where there is none.

    A link is a group of two whose first rank sends by a broadcast, which gloo, unlike its send, has for a GPU's memory.
    Rank i of a stage has links with rank i of its neighbours. `back` is from the last stage's first rank to the lead.
    """

    def __init__(self, rank: int, ranks: int, stages: int, backend: str, *, ordered: bool = False) -> None:
        """`rank`: among all, stage after stage. `ranks`: of a stage. `backend`, `ordered`: see Collectives."""
        share = Share(rank % ranks, ranks)
        self.stage = Share(rank // ranks, stages)
        last = self.stage.rank + 1 == stages
        self.sums = None
        if ranks > 1:
            self.sums = Collectives(share, backend, ordered=ordered, name=f"stage {self.stage.rank}")
        self.before = Collectives(Share(1, 2), backend, name=f"into {rank}") if self.stage.rank else None
        self.after = None if last else Collectives(Share(0, 2), backend, name=f"into {rank + ranks}")
        self.back = None
        if stages > 1 and share.rank == 0 and (last or rank == 0):
            self.back = Collectives(Share(int(rank == 0), 2), backend, name="back")
        # Each stage meets the one before it first.
        groups = (self.sums, self.before, self.after, self.back)
        self._groups = [group for group in groups if group is not None]

    def connect(self, store: RanksStore, device: torch.device, address: str = LOOPBACK) -> None:
        """Connect all groups, one after another. See Collectives.connect."""
        for group in self._groups:
            group.connect(store, device, address)

    @property
    def failed(self) -> bool:
        """Whether a rank of any group is known to have failed."""
        return any(group.failed for group in self._groups)

    @property
    def explain(self) -> Callable[[], None]:
        """See Collectives.explain."""
        return self._groups[0].explain

    @explain.setter
    def explain(self, explain: Callable[[], None]) -> None:
        for group in self._groups:
            group.explain = explain

    def fail(self) -> None:
        """See Collectives.fail."""
        for group in self._groups:
            group.fail()


def _gloo(store: Any, rank: int, ranks: int, address: str) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = _CONNECT
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
    group = distributed.ProcessGroupGloo(store, rank, ranks, options)
    group._set_default_timeout(_SUM)
    return group


def _nccl(store: Any, rank: int, ranks: int, address: str) -> Any:
    # A Group notices a lost rank. NCCL's watchdog would end this process before its tasks are given back.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if interface := interface_of(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _SUM
    return distributed.ProcessGroupNCCL(store, rank, ranks, options)


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; empty if none is known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
