"""The process of a follower: `python -m engine.execution.ranks.follower SOCKET`, started by a Group.

It reads its setup from the socket, loads its share, says so, and does what the lead sends. It ends with the lead. A
signal to the whole group of processes, such as Ctrl-C, a closed terminal's SIGHUP or a service manager's SIGTERM, is
the lead's, who drains first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    from engine.adapters import Adapter
    from engine.kernels.native.exchange import Exchange
    from engine.models.decoder import Decoder

#: prctl(2)
_PR_SET_PDEATHSIG: Final = 1
#: The least seconds between two signs of life while weights are read.
_SIGN_S: Final = 1.0


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    lead = socket.socket(fileno=int(sys.argv[1]))
    told = lead.makefile("rb")
    setup = json.loads(told.readline())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["lead"]:
        return  # it ended before the call
    listener = _Listener(lead, told)
    listener.start()
    _say(lead, started=True)
    ends: list[Exchange] = []
    try:
        # Only now, because this takes seconds.
        import torch

        from engine.errors import ModelError
        from engine.execution.ranks.runner import follow
        from engine.execution.ranks.stages import lead_stage
        from engine.execution.threads import on_nodes_of
        from engine.kernels.native import load_library
        from engine.kernels.native.exchange import Exchange, Share
        from engine.models import load_model
        from engine.models.shares import files_of

        folder = Path(setup["folder"])
        if files_of(folder) != setup["files"]:
            raise ModelError(f"{folder}: its files have changed since the lead looked; start again")
        library = load_library()
        assert library is not None
        torch.set_num_threads(setup["threads"])
        rank, stage = Share(setup["rank"], setup["ranks"]), Share(setup["stage"], setup["stages"])
        every = rank.ranks * stage.ranks
        memories = zip([setup["memory"], *setup["links"]], (rank, Share(1, 2), Share(0, 2)), strict=False)
        for memory, share in memories:
            ends.append(Exchange(library, memory, share, every))
            os.close(memory)
        exchange = ends[0] if rank.ranks > 1 else None
        with on_nodes_of(stage.rank * rank.ranks + rank.rank, every):
            model = load_model(
                folder,
                setup["dtype"],
                torch.device("cpu"),
                "native",
                deterministic=setup["deterministic"],
                kv_cache_dtype=setup["kv_cache_dtype"],
                progress=_Signs(lead),
                exchange=exchange,
                stage=stage,
                processes=every,
            )
            model.kernels.use_threads(None)
            listener.share = model
            _say(lead, ready=True)
            if setup["links"]:
                _, before, after = ends
                lead_stage(model, exchange, before, after, listener.adapters)
            else:
                follow(model, ends[0], listener.adapters)
    except BaseException as error:
        _say(lead, error=f"{type(error).__name__}: {error}")
        for end in ends:
            end.fail()
        raise


class _Signs:
    """Tells the lead, now and then, that weights are being read."""

    def __init__(self, lead: socket.socket) -> None:
        self._lead, self._last = lead, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last > _SIGN_S:
            self._last = time.monotonic()
            _say(self._lead, read=done)


def _say(lead: socket.socket, **said: Any) -> None:
    try:
        lead.sendall(json.dumps(said).encode() + b"\n")
    except OSError:
        os._exit(os.EX_OK)  # the lead has ended


class _Listener(threading.Thread):
    """Does what the lead says on the socket, and ends this process, whatever it does, when that is closed: when the
    lead ends or closes the group."""

    def __init__(self, lead: socket.socket, told: BinaryIO) -> None:
        super().__init__(daemon=True)
        self._lead, self._told = lead, told
        #: This rank's part of the model, once it is loaded.
        self.share: Decoder | None = None
        #: The loaded adapters by number.
        self.adapters: dict[int, Adapter] = {}

    def run(self) -> None:
        try:
            for line in self._told:
                asked = json.loads(line)
                self._load(asked["adapter"], asked["folder"])
        finally:
            os._exit(os.EX_OK)

    def _load(self, number: int, folder: str) -> None:
        from engine.adapters import load_adapter
        from engine.errors import EngineError

        wrong = ""
        try:
            assert self.share is not None
            self.adapters[number] = load_adapter(folder, self.share)
        except (EngineError, OSError, RuntimeError, ValueError, MemoryError) as error:
            wrong = f"{type(error).__name__}: {error}"
        _say(self._lead, adapter=number, wrong=wrong)


if __name__ == "__main__":
    main()
