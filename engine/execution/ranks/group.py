"""The lead's side of the followers' processes: starts those of this machine, meets other machines, waits until all have
their shares, notices their ends.

A follower is lost when its socket closes, which the kernel does whatever ends it. Then all are: the exchange fails, so
that nobody waits for the lost one, and the others are killed. They end with the lead in the same way, and the kernel
kills them when the thread that started them ends (PR_SET_PDEATHSIG), which lives as long as the lead.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from engine.config import EngineConfig
from engine.errors import DeviceLostError, EngineError, ErrorText, message_of
from engine.execution.ranks.device import DeviceLead, backend_of
from engine.execution.ranks.meeting import Meeting, read_secret, shut
from engine.execution.ranks.nodes import Joined, Mirror, SocketLink, end_of, gather, start_follower, traits_of
from engine.execution.ranks.runner import LeadModel
from engine.execution.ranks.stages import Chain, Link, StagedModel
from engine.kernels.collectives import LOOPBACK, READY, Collectives, RanksStore
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.models.decoder import Decoder
from engine.models.shares import files_of
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: A follower that says nothing for this long, in seconds, while it starts and reads its weights does not come.
SILENCE_S: Final = 120.0
#: Seconds in which kernels are compiled and steps recorded on all devices.
COMPILE_S: Final = 600.0
#: Seconds that an end may take before it is enforced.
_END_S: Final = 5.0
#: Seconds that the reason of a failure may take to arrive after the failure.
_REASON_S: Final = 5.0
#: Seconds that the loss of a rank may take to be noticed after another has noticed it.
_CAUSE_S: Final = 8.0
#: Seconds between two looks at how far the ranks have come, and the weight of a look among all.
_LOOK_S: Final = 0.05
_LOOK_WEIGHT: Final = 0.02
#: The share of looks from which a rank is slow, and how many times the next one's it is.
_SLOW_SHARE, _SLOW_TIMES = 0.4, 2.0
#: Seconds after which a stage that should tell how busy it is, and does not, is: it is stopped, say.
_BUSY_S: Final = 3.0
#: The most bytes of a follower's message.
_LONGEST: Final = 1 << 16


@dataclass(slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes] | None
    """None: it is another machine's."""
    socket: socket.socket
    heard: float
    ready: bool = False
    types: str = ""
    """Its data types, once it is ready."""
    busy: float = 0.0
    """The share of the last second in which its stage had something to do, if it tells that."""
    error: str = ""
    lost: str = ""
    """How it says that others are lost."""
    unread: bytes = b""
    adapters: dict[int, str] = field(default_factory=dict)
    """The numbers of adapters that it was to load, with what went wrong."""

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        shut(self.socket)  # another machine's ends with its socket


class Group:
    """The followers of a model's lead. Any thread may call its methods."""

    def __init__(self, folder: Path, config: EngineConfig, threads: int, device: torch.device) -> None:
        """Start them; `wait` waits for them. `threads`: of each rank. `device`: of the model. Raises EngineError."""
        library = load_library()
        backend = backend_of(config, device)
        if library is None or (backend is None and config.kernels not in ("auto", "native")):
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
        self._folder, self._nodes, self._joined = folder, config.nodes, Joined()
        self._files = files_of(folder)
        stages = self.stage.ranks
        #: The ranks of this machine.
        self._own = self._ranks // self._nodes
        own_stages = max(1, stages // self._nodes)
        # The memory of each own stage's sums, and of the links between own stages; that after the last one leads back
        # here, unless the next stage is another machine's.
        self._memories = [shared_memory(self._of_stage) for _ in range(own_stages)]
        self._links = [shared_memory(2) for _ in range(own_stages - 1 + (self._nodes == 1 < stages))]
        ends = [Share(int(i + 1 == stages), 2) for i in range(len(self._links))]
        sums = [Exchange(library, each, Share(0, self._of_stage), self._own) for each in self._memories]
        links = [Exchange(library, memory, end, self._own) for memory, end in zip(self._links, ends, strict=True)]
        #: All exchanges and links. This rank takes part in those of the first stage, and its links.
        self._exchanges: list[Exchange | SocketLink | Collectives] = [*sums, *links]
        for each in self._exchanges:
            each.explain = self.check
        #: This rank's end of the first stage's sums. None if it has that stage for itself.
        self.exchange = sums[0] if self._of_stage > 1 else None
        #: This rank's links, to the second stage and from the last one.
        self._ends: tuple[Link | None, Link | None] = (links[0] if links else None, links[-1] if links else None)
        self._chain: Chain | None = None
        #: What sums on devices; `self.exchange` then has messages alone.
        self.collectives: Collectives | None = None
        #: This machine's, at which other ranks reach those of this one.
        self._address = LOOPBACK
        #: By what the ranks meet on devices.
        self._store = RanksStore(self._spread)
        if backend is not None:
            self.collectives = Collectives(Share(0, self._of_stage), backend, ordered=config.deterministic)
            self.collectives.explain = self.check
            self._exchanges.append(self.collectives)
        self._rounds: list[list[int]] = []
        #: By rank: the share of looks at which others waited for it.
        self._waits = dict.fromkeys(range(1, self._own if stages > 1 else self._ranks), 0.0)
        if stages > 1:  # of another machine's stages, their first ranks
            self._waits |= dict.fromkeys(range(self._own, self._ranks, self._of_stage), 0.0)
        self._mirrors: list[Mirror] = []
        #: What the first rank says that was not lost itself, and when.
        self._second_hand: tuple[str, float] | None = None
        self._meeting = None
        if self._nodes > 1:
            self._meeting = Meeting(config.ranks_address, read_secret(str(config.ranks_secret)))
        self._setup: dict[str, Any] = {
            "ranks": self._of_stage,
            "stages": stages,
            "dtype": config.dtype,
            "deterministic": config.deterministic,
            "kv_cache_dtype": config.kv_cache_dtype,
            "kernels": config.kernels if backend is not None else "native",
            "quantization": config.quantization,
            "device": device.type,
            "backend": backend,
        }
        self._thread = threading.Thread(target=self._keep, name="penstock-ranks", daemon=True)
        self._thread.start()

    def wait(self, types: str) -> None:
        """Wait until all followers have their shares. `types`: types_of this rank's. Raises EngineError, saying which
        has not come, or has others, and why."""
        with self._changed:
            while not self._lost and not (self._followers and all(each.ready for each in self._followers)):
                self._changed.wait()
            if self._lost:
                raise EngineError(f"the model is not served: {self._lost}")
        for each in self._followers:
            if each.types != types:
                why = f"{self._named(each)}: its data types are {each.types!r}, and the lead's {types!r}"
                raise EngineError(f"the model is not served: {why}")

    def model_of(self, share: Decoder) -> LeadModel:
        """The model of all ranks, of this rank's share."""
        if self.collectives is not None:
            assert self.exchange is not None
            with self.in_time("to connect the ranks"):
                self._store.set(READY, b"")
                self.collectives.connect(self._store, share.device, self._address)
            return DeviceLead(share, self.exchange, self.collectives)
        if self.stage.ranks == 1:
            return LeadModel(share, self.exchange)
        after, back = self._ends
        assert after is not None
        assert back is not None
        self._chain = Chain(after, back, self.check)
        return StagedModel(share, self.exchange, self._chain)

    def _spread(self, key: str, value: bytes, source: _Follower | None = None) -> None:
        """Tell all followers, but for the `source`, what a rank has set."""
        message = json.dumps({"key": key, "value": value.hex()}).encode() + b"\n"
        with self._changed:
            for each in self._followers:
                if each is not source:
                    with suppress(OSError):  # it has ended, which is noticed
                        each.socket.sendall(message)

    def load_adapter(self, folder: Path, version: str, number: int) -> None:
        """Have all followers load the adapter in `folder`, of this version, as `number`. Raises EngineError."""
        told = {"adapter": number, "folder": str(folder.resolve()), "version": version}
        message = json.dumps(told).encode() + b"\n"
        with self._changed:
            for each in self._followers:
                with suppress(OSError):  # it has ended, and then they are lost
                    each.socket.sendall(message)
            while not self._lost and not all(number in each.adapters for each in self._followers):
                self._changed.wait()
            errors = [f"rank {each.rank}: {why}" for each in self._followers if (why := each.adapters.pop(number, ""))]
            if self._lost or errors:
                raise EngineError(f"{folder} is not loaded: {self._lost or errors[0]}")

    def _looks(self) -> bool:
        """Look at whom the others wait for. Returns False if no rank has moved, and none is waited for."""
        rounds = [each.rounds() for each in self._exchanges if isinstance(each, Exchange)]
        moved, self._rounds = rounds != self._rounds, rounds
        # A stage at work keeps others waiting while the lead waits for the last one.
        ends = self._chain is not None and self._chain.waits
        waited: dict[int, float] = {}
        for i, each in enumerate(rounds):
            behind = [(each[0] - each[own]) % (1 << 32) for own in range(1, len(each))]
            if i < len(self._memories):
                # The stage's first rank is further.
                slower = (i * self._of_stage + own + 1 for own, by in enumerate(behind) if 0 < by < 1 << 31)
                waited |= dict.fromkeys(slower, 1.0)
            elif ends and behind[0] < 1 << 31 and (stage := i - len(self._memories) + 1) < self.stage.ranks:
                # Who waits for a message is one further than its sender.
                waited[stage * self._of_stage] = 1.0
        if ends:
            waited |= {each.rank: self._busy(each) for each in list(self._followers) if each.process is None}
        if moved or waited:
            for rank in self._waits:
                self._waits[rank] += _LOOK_WEIGHT * (waited.get(rank, 0.0) - self._waits[rank])
        return moved or bool(waited)

    @staticmethod
    def _busy(follower: _Follower) -> float:
        return 1.0 if time.monotonic() - follower.heard > _BUSY_S else follower.busy

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the followers' processes on this machine."""
        return tuple(each.process.pid for each in list(self._followers) if each.process is not None)

    @property
    def slow_rank(self) -> str:
        """The rank for which the others wait most of the time, in words; empty if none stands out."""
        order = sorted(self._waits, key=self._waits.__getitem__, reverse=True)
        if not order or self._waits[order[0]] < _SLOW_SHARE:
            return ""
        if len(order) > 1 and self._waits[order[0]] < _SLOW_TIMES * self._waits[order[1]]:
            return ""
        slow = next((each for each in list(self._followers) if each.rank == order[0]), None)
        if slow is None:  # it has not started
            return ""
        return f"the others wait for {self._named(slow)} at {self._waits[order[0]]:.0%} of looks"

    @contextmanager
    def in_time(self, doing: str) -> Iterator[None]:
        """Give the ranks up, and raise EngineError, if the block takes longer than SILENCE_S; where kernels may be
        compiled in it, COMPILE_S."""
        limit = SILENCE_S if self.collectives is None else COMPILE_S
        late = threading.Timer(limit, lambda: self._lose(f"{doing} takes more than {limit:.0f} s{self._who()}"))
        late.daemon = True
        late.start()
        try:
            yield
        except DeviceLostError as error:
            raise EngineError(f"the model is not served: {error}") from error
        finally:
            late.cancel()

    def _who(self) -> str:
        why = self.slow_rank
        return f": {why}" if why else ""

    def check(self) -> None:
        """Raise DeviceLostError if a rank has failed."""
        if any(each.failed for each in self._exchanges):
            with self._changed:
                self._changed.wait_for(lambda: self._lost, _REASON_S + _CAUSE_S)
            raise DeviceLostError(self._lost or "a rank failed")

    def close(self) -> None:
        """End the followers, by force after some seconds."""
        with self._changed:
            self._closing = True
            followers = list(self._followers)
            lost = bool(self._lost) or any(each.failed for each in self._exchanges)
        self._joined.close(lost=lost)
        for each in followers:
            shut(each.socket)
        deadline = time.monotonic() + _END_S
        for process in (each.process for each in followers if each.process is not None):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join()
        self._joined.close(lost=lost)  # the last of them may have come meanwhile
        if self._mirrors and self.exchange is not None:
            self.exchange.fail()
            for mirror in self._mirrors:
                mirror.close()
        if self._chain is not None:
            self._chain.close()
        if self.collectives is not None:
            self.collectives.fail()

    # ---- its thread

    def _keep(self) -> None:
        try:
            if self._meeting is not None:
                self._gather(self._meeting)
            for rank in range(1, self._ranks):
                self._start(rank)
        except EngineError as error:
            self._lose(message_of(error))
        except OSError as error:
            self._lose(f"rank {len(self._followers) + 1} could not be started: {error}")
        finally:
            if self._meeting is not None:
                self._meeting.close()
            for descriptor in self._memories + self._links:
                os.close(descriptor)
        with selectors.DefaultSelector() as selector:
            for each in self._followers:
                selector.register(each.socket, selectors.EVENT_READ, each)
            while selector.get_map():
                # More often while steps run, to see whom the others wait for.
                for key, _ in selector.select(_LOOK_S if self._looks() else 1.0):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._ended(key.data)
                self._refuse_silence()
                self._take_second_hand(_CAUSE_S)
        self._take_second_hand(0.0)
        for each in self._followers:
            if each.process is not None:
                each.process.wait()
            each.socket.close()

    def _gather(self, meeting: Meeting) -> None:
        """Wait for the other machines. Raises EngineError."""
        part = {**self._setup, "nodes": self._nodes}
        staged = self.stage.ranks > 1
        joined = gather(
            meeting, self._nodes, self._own, traits_of(self._folder), part, lambda: self._closing, staged=staged
        )
        self._joined = joined
        if self.collectives is not None:
            self._address = joined.nodes[1].getsockname()[0]
        if not staged:
            assert self.exchange is not None
            self._mirrors = [
                Mirror(self.exchange, own, node * self._own + own, end)
                for node, ends in joined.sums.items()
                for own, end in ends.items()
            ]
            return
        assert joined.after is not None
        assert joined.back is not None
        back = SocketLink(joined.back)
        after = SocketLink(joined.after)
        for link in (back, after):
            link.explain = self.check
            self._exchanges.append(link)
        self._ends = (after if len(self._memories) == 1 else self._ends[0], back)

    def _start(self, rank: int) -> None:
        stage, own = divmod(rank, self._of_stage)
        process = None
        if rank < self._own:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    process = self._process(rank, stage, own, theirs)
                except OSError:
                    ours.close()
                    raise
        else:
            ours = self._joined.ranks[rank]
        with suppress(OSError):  # it has ended, which is noticed
            ours.sendall(json.dumps({**self._setup, "rank": own, "stage": stage}).encode() + b"\n")
        with self._changed:
            self._followers.append(_Follower(rank, process, ours, time.monotonic()))
            if self._closing:
                shut(ours)

    def _process(self, rank: int, stage: int, own: int, control: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process of a rank of this machine."""
        links: list[tuple[str, int]] = []
        if stage and not own:
            links = [("memory", each) for each in self._links[stage - 1 : stage + 1]]
            if len(links) == 1:
                assert self._joined.after is not None
                links.append(("socket", self._joined.after.fileno()))
        local = {"folder": str(absolute(self._folder)), "files": self._files, "threads": self.threads, "index": rank}
        local |= {"processes": self._own, "address": self._address, "memory": self._memories[stage]}
        local |= {"links": links, "tells": False}
        return start_follower(control, local, [self._memories[stage], *(number for _, number in links)])

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
                follower.types = said.get("types", follower.types)
                follower.busy = said.get("busy", follower.busy)
                if "key" in said:
                    value = bytes.fromhex(said["value"])
                    self._store.learn(said["key"], value)
                    self._spread(said["key"], value, follower)
                if "adapter" in said:
                    follower.adapters[said["adapter"]] = said["wrong"]
                follower.error = said.get("error", follower.error)
                follower.lost = said.get("lost", follower.lost)
            self._changed.notify_all()
        if follower.error and not self._closing:  # its process may take long to end
            self._lose(f"{self._named(follower)}: {follower.error}")
        if follower.lost and self._second_hand is None:
            self._second_hand = f"{self._named(follower)}: {follower.lost}", time.monotonic()
        return bool(data)

    def _take_second_hand(self, after: float) -> None:
        """Lose the group for what a rank says of others, once it was said `after` seconds ago."""
        if self._second_hand is not None and not self._lost and not self._closing:
            why, since = self._second_hand
            if time.monotonic() - since >= after:
                self._lose(why)

    def _named(self, follower: _Follower) -> str:
        whose = f"on node {follower.rank // self._own}"
        if follower.process is not None:
            whose = f"process {follower.process.pid}"
        return f"rank {follower.rank} of {self._ranks} ({whose})"

    def _ended(self, follower: _Follower) -> None:
        if self._closing:
            with self._changed:
                self._lost = self._lost or "the engine is closed"
                self._changed.notify_all()
            return
        if self._lost or follower.lost:
            return
        if follower.process is None:
            why = self._told_by(follower.rank // self._own, follower.rank)
        else:
            try:
                why = end_of(follower.process.wait(_REASON_S))
            except subprocess.TimeoutExpired:
                why = end_of(None)
        self._lose(f"{self._named(follower)}: {why}")

    def _told_by(self, node: int, rank: int) -> str:
        """How a node says that its rank has ended."""
        end = self._joined.nodes[node]
        end.settimeout(_REASON_S)
        try:
            lines = end.recv(_LONGEST).decode().splitlines()
        except OSError:
            lines = []
        told = [json.loads(line) for line in lines if line.startswith("{")]
        return next((each["end"] for each in told if each.get("rank") == rank), "its connection is lost")

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
            each.kill()
        for end in self._joined.nodes.values():
            shut(end)
        if first:
            logger.error("The ranks of the model are lost: %s", why)
            if came and self.on_lost is not None:
                self.on_lost()
