"""The process of a follower: `python -m engine.execution.ranks.follower LOCAL`, started by a Group or a Node.

    socket: the lead's setup, one JSON line -> load this rank's share -> report `ready` -> repeat each step of the lead
            later lines: adapters to load   -> load them, report `adapter`

LOCAL is JSON of this machine's part: the descriptor of the `socket` to the lead; `parent`, the process that started
this one; `folder` and its `files` (files_of); `threads`; the `index` of the rank among the machine's `processes`; the
machine's `address`; the descriptor of the `memory` of its stage's sums; `links`, as pairs of kind and descriptor; and
`tells`: whether to report how busy the stage is, which the lead cannot see on another machine. The setup is the same on
all machines.

A follower ends with the lead. It ignores signals to the whole group of processes, such as Ctrl-C, a closed terminal's
SIGHUP or a service manager's SIGTERM, because the lead drains first.
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
    from engine.execution.ranks.stages import BusyLink, Link
    from engine.kernels.collectives import Communicators, RanksStore
    from engine.models.decoder import Decoder

#: prctl(2)
_PR_SET_PDEATHSIG: Final = 1
#: Seconds between two reports while weights are read, and between two of how busy a stage is.
_SIGN_S: Final = 1.0


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    local = json.loads(sys.argv[1])
    lead = socket.socket(fileno=local["socket"])
    lines = lead.makefile("rb")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != local["parent"]:
        return  # the parent ended before the call
    try:
        setup = json.loads(lines.readline())
    except (OSError, ValueError):
        return  # the lead has ended, as below
    listener = _Listener(lead, lines)
    listener.start()
    _report(lead, started=True)
    ends: list[Link | Communicators] = []
    try:
        # Only now, because this takes seconds.
        import torch

        from engine.errors import ModelError
        from engine.execution.ranks.device import device_of, follow_on_device
        from engine.execution.ranks.nodes import SocketLink
        from engine.execution.ranks.runner import follow, max_message, types_of
        from engine.execution.ranks.stages import BusyLink, lead_stage
        from engine.execution.threads import on_nodes_of
        from engine.kernels.collectives import READY, Communicators, RanksStore
        from engine.kernels.native import load_library
        from engine.kernels.native.exchange import Exchange, Share
        from engine.models import load_model
        from engine.models.shares import files_of

        _report(lead, imported=True)  # which may have taken a minute on a busy machine
        folder = Path(local["folder"])
        if files_of(folder) != local["files"]:
            raise ModelError(f"{folder}: its files have changed since the lead looked; start again")
        library = load_library()
        assert library is not None
        torch.set_num_threads(local["threads"])
        rank, stage = Share(setup["rank"], setup["ranks"]), Share(setup["stage"], setup["stages"])
        processes = local["processes"]
        exchange = None
        if rank.ranks > 1:
            exchange = Exchange(library, local["memory"], rank, processes)
            ends.append(exchange)
        os.close(local["memory"])
        links: list[Link] = []
        for (kind, descriptor), end in zip(local["links"], (Share(1, 2), Share(0, 2)), strict=False):
            if kind == "socket":
                links.append(SocketLink(socket.socket(fileno=descriptor)))
            else:
                links.append(Exchange(library, descriptor, end, processes))
                os.close(descriptor)
        ends += links
        on_devices = None
        device = device_of(setup["device"], local["index"])
        if setup["backend"] is not None:
            on_devices = Communicators(
                rank.rank,
                setup["of_stage"],
                rank.ranks // setup["of_stage"],
                setup["backend"],
                ordered=setup["deterministic"],
            )
            ends.append(on_devices)
            stage = on_devices.stage
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with on_nodes_of(local["index"], processes):
            model = load_model(
                folder,
                setup["dtype"],
                device,
                setup["kernels"],
                setup["quantization"],
                deterministic=setup["deterministic"],
                kv_cache_dtype=setup["kv_cache_dtype"],
                progress=_Signs(lead),
                exchange=exchange if on_devices is None else on_devices.sums,
                stage=stage,
                processes=processes,
            )
            model.kernels.use_threads(None)
            for end_of_messages in (exchange, *links):
                if isinstance(end_of_messages, Exchange | SocketLink):
                    end_of_messages.max_message = max_message(model, **setup["step"])
            listener.share = model
            listener.store = RanksStore(lambda key, value: _report(lead, key=key, value=value.hex()))
            _report(lead, ready=True, types=types_of(model))
            if on_devices is not None:
                assert exchange is not None
                listener.store.wait([READY])
                on_devices.connect(listener.store, device, local["address"])
                follow_on_device(model, exchange, on_devices, listener.adapters)
            if exchange is None or links:
                before, after = BusyLink(links[0]), links[1]
                if local["tells"]:
                    threading.Thread(target=_report_busy, args=(lead, before), daemon=True).start()
                lead_stage(model, exchange, before, after, listener.adapters)
            else:
                follow(model, exchange, listener.adapters)
    except BaseException as error:
        from engine.errors import DeviceLostError

        # DeviceLostError: another rank failed first, and the lead has, or will have, the first cause.
        _report(lead, **{"lost" if isinstance(error, DeviceLostError) else "error": f"{type(error).__name__}: {error}"})
        for each in ends:
            each.fail()
        raise


class _Signs:
    """The progress of reading weights, reported to the lead every `_SIGN_S`: it gives up a silent follower."""

    def __init__(self, lead: socket.socket) -> None:
        self._lead, self._last = lead, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last > _SIGN_S:
            self._last = time.monotonic()
            _report(self._lead, read=done)


def _report_busy(lead: socket.socket, link: BusyLink) -> None:
    """Report to the lead, every `_SIGN_S`, in what share of the time this stage worked."""
    worked, last = link.worked_s(), time.monotonic()
    while True:
        time.sleep(_SIGN_S)
        before, since = worked, last
        worked, last = link.worked_s(), time.monotonic()
        _report(lead, busy=round((worked - before) / (last - since), 2))


def _report(lead: socket.socket, **message: Any) -> None:
    try:
        lead.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        os._exit(os.EX_OK)  # the lead has ended


class _Listener(threading.Thread):
    """Loads the adapters that the lead names on the socket. Ends this process, whatever its other threads do, when the
    socket is closed: the lead has ended, or closed the group."""

    def __init__(self, lead: socket.socket, lines: BinaryIO) -> None:
        super().__init__(daemon=True)
        self._lead, self._lines = lead, lines
        #: This rank's part of the model, once it is loaded.
        self.share: Decoder | None = None
        #: Where it finds the other ranks' addresses, once the model is loaded.
        self.store: RanksStore | None = None
        #: The loaded adapters by number.
        self.adapters: dict[int, Adapter] = {}

    def run(self) -> None:
        try:
            for line in self._lines:
                order = json.loads(line)
                if "key" in order:
                    assert self.store is not None
                    self.store.learn(order["key"], bytes.fromhex(order["value"]))
                    continue
                self._load(order["adapter"], order["folder"], order["version"])
        finally:
            os._exit(os.EX_OK)

    def _load(self, number: int, folder: str, version: str) -> None:
        from engine.adapters import load_adapter
        from engine.errors import EngineError

        failure = ""
        try:
            assert self.share is not None
            adapter = load_adapter(folder, self.share)
            if adapter.version != version:
                raise EngineError(f"its files are version {adapter.version}, and the lead's {version}")
            self.adapters[number] = adapter
        except (EngineError, OSError, RuntimeError, ValueError, MemoryError) as error:
            failure = f"{type(error).__name__}: {error}"
        _report(self._lead, adapter=number, failure=failure)


if __name__ == "__main__":
    main()
