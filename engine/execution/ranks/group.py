"""The lead's side of the followers' processes: starts them, waits until they have their shares, notices their ends.

A follower is lost when its socket closes, which the kernel does whatever ends it. Then all are: the exchange fails, so
that nobody waits for the lost one, and the others are killed. They end with the lead in the same way, and the kernel
kills them when the thread that started them ends (PR_SET_PDEATHSIG), which lives as long as the lead.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import DeviceLostError, EngineError, ErrorText
from engine.execution.ranks.runner import LeadModel
from engine.execution.ranks.stages import Chain, StagedModel
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.models.decoder import Decoder
from engine.models.shares import files_of
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: A follower that says nothing for this long, in seconds, while it starts and reads its weights does not come.
SILENCE_S: Final = 120.0
#: Seconds that an end may take before it is enforced.
_END_S: Final = 5.0
#: Seconds that the reason of a failure may take to arrive after the failure.
_REASON_S: Final = 1.0
#: The most bytes of a follower's message.
_LONGEST: Final = 1 << 16


@dataclass(slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    heard: float
    ready: bool = False
    error: str = ""
    unread: bytes = b""
    adapters: dict[int, str] = field(default_factory=dict)
    """The numbers of adapters that it was to load, with what went wrong."""


class Group:
    """The followers of a model's lead. Any thread may call its methods."""

    def __init__(self, folder: Path, config: EngineConfig, threads: int) -> None:
        """Start them; `wait` waits for them. `threads`: of each rank. Raises EngineError."""
        library = load_library()
        if library is None or config.kernels not in ("auto", "native"):
            raise EngineError(
                ErrorText.of(
                    "{tensor_parallel} and {pipeline_parallel} need native kernels: install penstock where a C++ "
                    "compiler is"
                )
            )
        #: Called once, on a thread of the group, when a follower is lost that had come.
        self.on_lost: Callable[[], None] | None = None
        #: Of each rank.
        self.threads = threads
        self._ranks = config.ranks
        self._of_stage, self.stage = config.tensor_parallel, Share(0, config.pipeline_parallel)
        self._followers: list[_Follower] = []
        self._changed = threading.Condition()
        self._lost = ""
        self._closing = False
        files = files_of(folder)
        stages = self.stage.ranks
        # The memory of each stage's sums, and of the link after each stage; that after the last one leads back here.
        self._memories = [shared_memory(self._of_stage) for _ in range(stages)]
        self._links = [shared_memory(2) for _ in range(stages if stages > 1 else 0)]
        #: All exchanges and links. This rank takes part in those of the first stage, and its links.
        self._exchanges = [Exchange(library, each, Share(0, self._of_stage), self._ranks) for each in self._memories]
        ends = [Share(int(i + 1 == stages), 2) for i in range(len(self._links))]
        self._exchanges += [
            Exchange(library, *each, processes=self._ranks) for each in zip(self._links, ends, strict=True)
        ]
        for each in self._exchanges:
            each.explain = self.check
        #: This rank's end of the first stage's sums. None if it has that stage for itself.
        self.exchange = self._exchanges[0] if self._of_stage > 1 else None
        self._chain: Chain | None = None
        self._setup: dict[str, Any] = {
            "folder": str(absolute(folder)),
            "files": files,
            "ranks": self._of_stage,
            "stages": stages,
            "threads": threads,
            "lead": os.getpid(),
            "dtype": config.dtype,
            "deterministic": config.deterministic,
            "kv_cache_dtype": config.kv_cache_dtype,
        }
        self._thread = threading.Thread(target=self._keep, name="penstock-ranks", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all followers have their shares. Raises EngineError, saying which has not come and why."""
        with self._changed:
            while not self._lost and not (self._followers and all(each.ready for each in self._followers)):
                self._changed.wait()
            if self._lost:
                raise EngineError(f"the model is not served: {self._lost}")

    def model_of(self, share: Decoder) -> LeadModel:
        """The model of all ranks, of this rank's share."""
        if self.stage.ranks == 1:
            return LeadModel(share, self.exchange)
        self._chain = Chain(self._exchanges[self.stage.ranks], self._exchanges[-1], self.check)
        return StagedModel(share, self.exchange, self._chain)

    def load_adapter(self, folder: Path, number: int) -> None:
        """Have all followers load the adapter in `folder`, as `number`. Raises EngineError."""
        message = json.dumps({"adapter": number, "folder": str(folder.resolve())}).encode() + b"\n"
        with self._changed:
            for each in self._followers:
                with suppress(OSError):  # it has ended, and then they are lost
                    each.socket.sendall(message)
            while not self._lost and not all(number in each.adapters for each in self._followers):
                self._changed.wait()
            errors = [f"rank {each.rank}: {why}" for each in self._followers if (why := each.adapters.pop(number, ""))]
            if self._lost or errors:
                raise EngineError(f"{folder} is not loaded: {self._lost or errors[0]}")

    def check(self) -> None:
        """Raise DeviceLostError if a rank has failed."""
        if any(each.failed for each in self._exchanges):
            with self._changed:
                self._changed.wait_for(lambda: self._lost, _REASON_S)
            raise DeviceLostError(self._lost or "a rank failed")

    def close(self) -> None:
        """End the followers, by force after some seconds."""
        with self._changed:
            self._closing = True
            followers = list(self._followers)
        for each in followers:
            _shut(each.socket)
        deadline = time.monotonic() + _END_S
        for each in followers:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
        self._thread.join()
        if self._chain is not None:
            self._chain.close()

    # ---- its thread

    def _keep(self) -> None:
        try:
            for rank in range(1, self._ranks):
                self._start(rank)
        except OSError as error:
            self._lose(f"rank {len(self._followers) + 1} could not be started: {error}")
        finally:
            for descriptor in self._memories + self._links:
                os.close(descriptor)
        with selectors.DefaultSelector() as selector:
            for each in self._followers:
                selector.register(each.socket, selectors.EVENT_READ, each)
            while selector.get_map():
                for key, _ in selector.select(1.0):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._ended(key.data)
                self._refuse_silence()
        for each in self._followers:
            each.process.wait()
            each.socket.close()

    def _start(self, rank: int) -> None:
        stage, own = divmod(rank, self._of_stage)
        setup = self._setup | {"rank": own, "stage": stage, "memory": self._memories[stage], "links": []}
        if stage and not own:
            setup["links"] = [self._links[stage - 1], self._links[stage]]
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "engine.execution.ranks.follower", str(theirs.fileno())]
        descriptors = (theirs.fileno(), self._memories[stage], *setup["links"])
        with theirs:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
            except OSError:
                ours.close()
                raise
        ours.sendall(json.dumps(setup).encode() + b"\n")
        with self._changed:
            self._followers.append(_Follower(rank, process, ours, time.monotonic()))
            if self._closing:
                _shut(ours)

    def _read(self, follower: _Follower) -> bool:
        """Read what a follower says. Returns False at its end."""
        try:
            data = follower.socket.recv(_LONGEST)
        except OSError:
            data = b""
        *lines, follower.unread = (follower.unread + data).split(b"\n")
        with self._changed:
            follower.heard = time.monotonic()
            for line in lines:
                said = json.loads(line)
                follower.ready |= "ready" in said
                if "adapter" in said:
                    follower.adapters[said["adapter"]] = said["wrong"]
                follower.error = said.get("error", follower.error)
            self._changed.notify_all()
        return bool(data)

    def _ended(self, follower: _Follower) -> None:
        if self._closing:
            with self._changed:
                self._lost = self._lost or "the engine is closed"
                self._changed.notify_all()
            return
        try:
            status = follower.process.wait(_REASON_S)
        except subprocess.TimeoutExpired:
            status = None
        why = follower.error or _end_of(status)
        self._lose(f"rank {follower.rank} of {self._ranks} (process {follower.process.pid}): {why}")

    def _refuse_silence(self) -> None:
        for each in self._followers:
            silent = time.monotonic() - each.heard
            if not each.ready and not self._lost and not self._closing and silent > SILENCE_S:
                self._lose(f"rank {each.rank} of {self._ranks} has said nothing for {silent:.0f} s, and is given up")

    def _lose(self, why: str) -> None:
        with self._changed:
            first, self._lost = not self._lost, self._lost or why
            came = all(each.ready for each in self._followers)
            self._changed.notify_all()
        for exchange in self._exchanges:
            exchange.fail()
        for each in self._followers:
            each.process.kill()
        if first:
            logger.error("The ranks of the model are lost: %s", why)
            if came and self.on_lost is not None:
                self.on_lost()


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _end_of(status: int | None) -> str:
    if status is None:
        return "its socket is closed"
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"
