"""The process of a follower: `python -m engine.execution.ranks.follower SOCKET`, started by a Group.

It reads its setup from the socket, loads its share, says so, and does what the lead sends. It ends with the lead. A
signal to the whole group of processes, such as Ctrl-C or a service manager's SIGTERM, is the lead's, who drains first.
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
from typing import Any, Final

#: prctl(2)
_PR_SET_PDEATHSIG: Final = 1
#: The least seconds between two signs of life while weights are read.
_SIGN_S: Final = 1.0


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    lead = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(lead.makefile("rb").readline())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["lead"]:
        return  # it ended before the call
    threading.Thread(target=_end_with, args=(lead,), daemon=True).start()
    _say(lead, started=True)
    exchange = None
    try:
        # Only now, because this takes seconds.
        import torch

        from engine.execution.ranks.runner import follow
        from engine.kernels.native import load_library
        from engine.kernels.native.exchange import Exchange, Share
        from engine.models import load_model

        library = load_library()
        assert library is not None
        torch.set_num_threads(setup["threads"])
        exchange = Exchange(library, setup["memory"], Share(setup["rank"], setup["ranks"]))
        os.close(setup["memory"])
        share = load_model(
            setup["folder"],
            setup["dtype"],
            torch.device("cpu"),
            "native",
            deterministic=setup["deterministic"],
            kv_cache_dtype=setup["kv_cache_dtype"],
            progress=_Signs(lead),
            exchange=exchange,
        )
        share.kernels.use_threads(None)
        _say(lead, ready=True)
        follow(share, exchange)
    except BaseException as error:
        _say(lead, error=f"{type(error).__name__}: {error}")
        if exchange is not None:
            exchange.fail()
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


def _end_with(lead: socket.socket) -> None:
    """End this process, whatever it does, when the lead ends or closes the group."""
    try:
        while lead.recv(1):
            pass
    except OSError:
        pass
    os._exit(os.EX_OK)


if __name__ == "__main__":
    main()
