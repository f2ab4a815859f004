"""Sums over the ranks of a model by torch.distributed: NCCL between GPUs; gloo through the host's memory, between ranks
on CPUs or on a GPU that they share.

On CPUs with native kernels the ranks use shared memory instead (native/exchange.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, distributed

from engine.errors import DeviceLostError
from engine.kernels.native.exchange import Share

#: Seconds for which the ranks wait for each other when they connect, and in a sum, where one may compile kernels.
_CONNECT, _SUM = timedelta(seconds=60), timedelta(seconds=600)


class Collectives:
    """One rank's end. All ranks call the same methods in the same order, with equal shapes and dtypes; rank 0 leads.

    No method waits for a GPU; with NCCL all can be recorded in CUDA graphs. They raise DeviceLostError once a rank has
    failed, with gloo when they are called, with NCCL if it has been noticed by then.
    """

    def __init__(self, share: Share, backend: str, *, ordered: bool = False) -> None:
        """`backend`: "nccl" or "gloo". `ordered`: sums are of all parts in the ranks' order, in fp32, so that a row
        has the same bits beside any others."""
        self.share, self.backend, self._ordered = share, backend, ordered
        #: Raises DeviceLostError with the reason why a rank has failed, if that can be known.
        self.explain: Callable[[], None] = lambda: None
        self.failed = False
        self._group: Any = None

    @property
    def identity(self) -> str:
        """Differs between ways of summing that may give other bits."""
        return f"{self.share.ranks} ranks by {self.backend}"

    def connect(self, store: Path, device: torch.device) -> None:
        """Meet the other ranks, by the file `store`. `device`: this rank's. Raises DeviceLostError."""
        rank, ranks = self.share.rank, self.share.ranks
        try:
            meeting = distributed.FileStore(str(store), ranks)
            meeting.set_timeout(_CONNECT)
            self._group = (_nccl if self.backend == "nccl" else _gloo)(meeting, rank, ranks)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        self.sum(torch.zeros(ranks, device=device))  # NCCL connects with the first one

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, to the same bits on each. May overwrite `x`."""
        if self._ordered:
            parts = self.gather(x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part
            return total.to(x.dtype)
        x = x.contiguous()
        self._run(x, lambda group: group.allreduce([x]))
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x`, contiguous, with that of rank 0."""
        self._run(x, lambda group: group.broadcast([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """What each rank has: [ranks, *shape of `x`]."""
        x = x.contiguous()
        every = x.new_empty(self.share.ranks, *x.shape)
        if self.backend == "nccl":
            self._run(x, lambda group: group._allgather_base(every, x))
        else:
            self._run(x, lambda group: group.allgather([list(every.unbind())], [x]))
        return every

    def fail(self) -> None:
        """End all waiting of this rank, for good. Any thread may call it."""
        self.failed = True
        if self._group is not None:
            with suppress(RuntimeError, NotImplementedError):  # gloo's is not there in every release
                self._group.abort()

    def _run(self, x: Tensor, begin: Callable[[Any], Any]) -> None:
        if x.is_meta:
            return  # kernels are compiled ahead, by one process
        if self.failed:
            raise self._lost()
        try:
            begin(self._group).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception | None = None) -> DeviceLostError:
        self.failed = True
        self.explain()
        return DeviceLostError(f"a rank of the model has failed{'' if error is None else f': {error}'}")


def _gloo(store: Any, rank: int, ranks: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = _SUM
    options._devices = [distributed.ProcessGroupGloo.create_device(interface=_LOOPBACK)]
    return distributed.ProcessGroupGloo(store, rank, ranks, options)


#: The network interface of ranks on one machine.
_LOOPBACK: Final = "lo"


def _nccl(store: Any, rank: int, ranks: int) -> Any:
    # A Group notices a lost rank. NCCL's watchdog would end this process before its tasks are given back.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _SUM
    return distributed.ProcessGroupNCCL(store, rank, ranks, options)
