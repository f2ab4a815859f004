"""The lead's side of the followers' processes: starts those of this machine, connects to those of others, waits until
all have loaded their shares, and ends the group when one is lost.

    Group's thread: connect to other nodes -> start the processes of this one -> read what each sends on its socket:
                    imported, bytes read, ready, adapter loaded, error, busy      -> `wait`, `load_adapter` wait for
                    these sample the exchanges' rounds: for which rank do others wait?  -> `slow_rank`

A follower is lost when its socket closes, which the kernel does whatever ends its process. Then the group is lost: the
exchanges fail, so that no rank waits for the lost one, and the other followers are killed. A follower ends with the
lead in the same way. The kernel also kills it when the thread that started it ends (PR_SET_PDEATHSIG), and that thread
lives as long as the lead.
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
from engine.execution.placement import step_limits
from engine.execution.ranks.device import DeviceLead, backend_of
from engine.execution.ranks.meeting import Meeting, read_secret, shut
from engine.execution.ranks.nodes import Joined, Mirror, SocketLink, end_of, gather, start_follower, traits_of
from engine.execution.ranks.runner import LeadModel, max_message
from engine.execution.ranks.stages import Chain, Link, StagedModel
from engine.kernels.collectives import LOOPBACK, READY, Collectives, Communicators, RanksStore
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Exchange, Share, shared_memory
from engine.models.decoder import Decoder
from engine.models.shares import files_of
from engine.text.gguf import absolute

logger = logging.getLogger("penstock.engine")

#: Seconds of silence after which a follower that is starting or reading its weights is given up.
SILENCE_S: Final = 120.0
#: Seconds within which all devices must have compiled their kernels and recorded their steps.
COMPILE_S: Final = 600.0
#: Seconds that a follower has to end by itself before it is killed.
_END_S: Final = 5.0
#: Seconds that the reason of a failure may take to arrive after the failure.
_REASON_S: Final = 5.0
#: Seconds for which the first cause of a loss is waited for after another rank has reported it at second hand.
_CAUSE_S: Final = 8.0
#: Seconds between two samples of the ranks' rounds, and the weight of a sample in the moving average.
_SAMPLE_S: Final = 0.05
_SAMPLE_WEIGHT: Final = 0.02
#: A rank is slow if others wait for it at this share of samples, and at so many times the share of the next rank.
_SLOW_SHARE, _SLOW_TIMES = 0.4, 2.0
#: Seconds of silence after which a stage that should report how busy it is counts as busy: it may be stopped.
_BUSY_S: Final = 3.0
#: The maximum length of a follower's message, in bytes.
_MAX_MESSAGE: Final = 1 << 16


@dataclass(slots=True)
class _Follower:
    """A follower as the lead knows it: its process or machine, and what it has reported."""

    rank: int
    process: subprocess.Popen[bytes] | None
    """None if it runs on another machine."""
    socket: socket.socket
    last_heard: float
    """When it last sent something, by time.monotonic."""
    ready: bool = False
    types: str = ""
    """types_of its share, once it is ready."""
    busy: float = 0.0
    """The share of the last second in which its stage worked, if it reports that."""
    error: str = ""
    lost: str = ""
    """Its report that other ranks are lost: a reason at second hand."""
    unread: bytes = b""
    """The beginning of a line whose end has not come yet."""
    adapters: dict[int, str] = field(default_factory=dict)
    """The error of each adapter that it was to load, by the adapter's number; empty if it is loaded."""

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        shut(self.socket)  # another machine's ends with its socket


class Group:
    """The followers of a model's lead. Any thread may call its methods."""

    def __init__(self, folder: Path, config: EngineConfig, threads: int, device: torch.device) -> None:
        """Begin to start the followers; `wait` waits for them. `folder`: the model's. `threads`: of each rank.
        `device`: of the model. Raises EngineError if these ranks cannot compute on that device, or the port is in
        use."""
        library = load_library()
        backend = backend_of(config, device)
        if library is None or (backend is None and config.kernels not in ("auto", "native")):
            raise EngineError(
                ErrorText.of(
                    "{tensor_parallel} and {pipeline_parallel} need native kernels: install penstock where a C++ "
                    "compiler is"
                )
            )
        #: Called once, on a thread of the group, when a follower is lost after all were ready.
        self.on_lost: Callable[[], None] | None = None
        #: The number of threads of each rank.
        self.threads = threads
        self._ranks = config.ranks
        self.stage = Share(0, config.pipeline_parallel)
        # Ranks on devices all get the same messages, whatever their stage: their messages are those of a single stage.
        self._stage_ranks, self._stages = config.tensor_parallel, config.pipeline_parallel
        if backend is not None:
            self._stage_ranks, self._stages = config.ranks, 1
        self._followers: list[_Follower] = []
        self._changed = threading.Condition()
        self._lost = ""
        self._closing = False
        self._folder, self._nodes, self._joined = folder, config.nodes, Joined()
        self._files = files_of(folder)
        stages = self._stages
        #: The number of ranks on each machine.
        self._local_ranks = self._ranks // self._nodes
        stages_here = max(1, stages // self._nodes)
        # The memory of the sums of each stage on this machine, and of the links after these stages. The last link leads
        # back to the lead; with several machines the last stage here is linked by a socket instead.
        self._memories = [shared_memory(self._stage_ranks) for _ in range(stages_here)]
        self._links = [shared_memory(2) for _ in range(stages_here - 1 + (self._nodes == 1 < stages))]
        ends = [Share(int(i + 1 == stages), 2) for i in range(len(self._links))]
        sums = [Exchange(library, each, Share(0, self._stage_ranks), self._local_ranks) for each in self._memories]
        links = [
            Exchange(library, memory, end, self._local_ranks) for memory, end in zip(self._links, ends, strict=True)
        ]
        #: All exchanges and links of this machine; the lead itself uses its stage's and its own links alone.
        self._exchanges: list[Exchange | SocketLink | Communicators] = [*sums, *links]
        for each in self._exchanges:
            each.explain = self.explain
        #: The lead's end of the first stage's sums. None if the lead is the stage's only rank.
        self.exchange = sums[0] if self._stage_ranks > 1 else None
        #: The lead's links, to the second stage and from the last one.
        self._lead_links: tuple[Link | None, Link | None] = (links[0] if links else None, links[-1] if links else None)
        self._chain: Chain | None = None
        #: The sums of ranks on devices; `self.exchange` then carries messages alone.
        self.communicators: Communicators | None = None
        #: The address at which ranks of other machines reach those of this one.
        self._address = LOOPBACK
        #: Where ranks on devices find each other's addresses.
        self._store = RanksStore(self._spread)
        if backend is not None:
            self.communicators = Communicators(
                0, config.tensor_parallel, config.pipeline_parallel, backend, ordered=config.deterministic
            )
            self.communicators.explain = self.explain
            self._exchanges.append(self.communicators)
        self._rounds: list[list[int]] = []
        #: By rank: the moving average of the share of samples at which others waited for it.
        visible = max(self._local_ranks, self._stage_ranks)  # of other stages on other machines, the first ranks alone
        self._waits = dict.fromkeys([*range(1, visible), *range(visible, self._ranks, self._stage_ranks)], 0.0)
        self._mirrors: list[Mirror] = []
        #: The first report at second hand that ranks are lost, and when it came, by time.monotonic.
        self._second_hand: tuple[str, float] | None = None
        self._meeting = None
        if self._nodes > 1:
            self._meeting = Meeting(config.ranks_address, read_secret(str(config.ranks_secret)))
        self._setup: dict[str, Any] = {
            "ranks": self._stage_ranks,
            "stages": stages,
            "of_stage": config.tensor_parallel,
            "dtype": config.dtype,
            "deterministic": config.deterministic,
            "kv_cache_dtype": config.kv_cache_dtype,
            "kernels": config.kernels if backend is not None else "native",
            "quantization": config.quantization,
            "device": device.type,
            "backend": backend,
            "step": {"length": config.max_model_len, "block_size": config.block_size},
        }
        self._setup["step"] |= dict(zip(("sequences", "tokens"), step_limits(device, config), strict=True))
        self._thread = threading.Thread(target=self._run, name="penstock-ranks", daemon=True)
        self._thread.start()

    @property
    def sums(self) -> Exchange | Collectives | None:
        """The lead's end of its stage's sums. None if the lead is the stage's only rank."""
        return self.exchange if self.communicators is None else self.communicators.sums

    def wait(self, types: str) -> None:
        """Wait until all followers have loaded their shares. `types`: types_of the lead's share. Raises EngineError
        naming the rank that is lost, and why, or whose data types differ."""
        with self._changed:
            while not self._lost and not (self._followers and all(each.ready for each in self._followers)):
                self._changed.wait()
            if self._lost:
                raise EngineError(f"the model is not served: {self._lost}")
        for each in self._followers:
            if each.types != types:
                reason = f"{self._name_of(each)}: its data types are {each.types!r}, and the lead's {types!r}"
                raise EngineError(f"the model is not served: {reason}")

    def model_of(self, share: Decoder) -> LeadModel:
        """The model of all ranks. `share`: the lead's. Raises EngineError if ranks on devices do not connect in
        time."""
        if self.communicators is not None:
            assert self.exchange is not None
            with self.in_time("to connect the ranks"):
                self._store.set(READY, b"")
                self.communicators.connect(self._store, share.device, self._address)
            return DeviceLead(share, self.exchange, self.communicators)
        if self._stages == 1:
            return LeadModel(share, self.exchange)
        after, back = self._lead_links
        assert after is not None
        assert back is not None
        for each in self._exchanges:
            if isinstance(each, Exchange | SocketLink):
                each.max_message = max_message(share, **self._setup["step"])
        self._chain = Chain(after, back, self.explain)
        return StagedModel(share, self.exchange, self._chain)

    def _spread(self, key: str, value: bytes, source: _Follower | None = None) -> None:
        """Send a value that a rank has set in its store to all followers but the `source`."""
        message = json.dumps({"key": key, "value": value.hex()}).encode() + b"\n"
        with self._changed:
            for each in self._followers:
                if each is not source:
                    with suppress(OSError):  # it has ended, which the selector will show
                        each.socket.sendall(message)

    def load_adapter(self, folder: Path, version: str, number: int) -> None:
        """Make all followers load the adapter in `folder`, of this version, as `number`. Raises EngineError naming a
        rank that cannot."""
        arguments = {"adapter": number, "folder": str(folder.resolve()), "version": version}
        message = json.dumps(arguments).encode() + b"\n"
        with self._changed:
            for each in self._followers:
                with suppress(OSError):  # it has ended, and the group will be lost
                    each.socket.sendall(message)
            while not self._lost and not all(number in each.adapters for each in self._followers):
                self._changed.wait()
            errors = {each.rank: each.adapters.pop(number, "") for each in self._followers}
            failed = [f"rank {rank}: {error}" for rank, error in errors.items() if error]
            if self._lost or failed:
                raise EngineError(f"{folder} is not loaded: {self._lost or failed[0]}")

    def _observe_waits(self) -> bool:
        """Sample for which ranks others wait, for `slow_rank`. Returns False if no rank has moved and none is waited
        for: no step runs."""
        rounds = [each.rounds() for each in self._exchanges if isinstance(each, Exchange)]
        moved, self._rounds = rounds != self._rounds, rounds
        # A stage at work keeps others waiting while the lead waits for the last one.
        lead_waits = self._chain is not None and self._chain.waits
        waited_for: dict[int, float] = {}
        for i, (first, *others) in enumerate(rounds):
            behind = [(first - other) % (1 << 32) for other in others]
            if i < len(self._memories):
                # The stage's first rank has come further than these.
                ranks = enumerate(behind, i * self._stage_ranks + 1)
                waited_for |= {rank: 1.0 for rank, by in ranks if 0 < by < 1 << 31}
            elif lead_waits and behind[0] < 1 << 31 and (stage := i - len(self._memories) + 1) < self._stages:
                # The receiver, which waits for a message, is one round ahead of the sender.
                waited_for[stage * self._stage_ranks] = 1.0
        if lead_waits:
            remote = (each for each in list(self._followers) if each.process is None)
            waited_for |= {each.rank: self._busy(each) for each in remote if not each.rank % self._stage_ranks}
        if moved or waited_for:
            for rank in self._waits:
                self._waits[rank] += _SAMPLE_WEIGHT * (waited_for.get(rank, 0.0) - self._waits[rank])
        return moved or bool(waited_for)

    @staticmethod
    def _busy(follower: _Follower) -> float:
        return 1.0 if time.monotonic() - follower.last_heard > _BUSY_S else follower.busy

    @property
    def processes(self) -> tuple[int, ...]:
        """The process ids of the followers on this machine."""
        return tuple(each.process.pid for each in list(self._followers) if each.process is not None)

    @property
    def slow_rank(self) -> str:
        """A description of the rank for which the others wait most of the time; empty if no rank stands out."""
        order = sorted(self._waits, key=self._waits.__getitem__, reverse=True)
        if not order or self._waits[order[0]] < _SLOW_SHARE:
            return ""
        if len(order) > 1 and self._waits[order[0]] < _SLOW_TIMES * self._waits[order[1]]:
            return ""
        slow = next((each for each in list(self._followers) if each.rank == order[0]), None)
        if slow is None:  # it has not started
            return ""
        return f"the others wait for {self._name_of(slow)} at {self._waits[order[0]]:.0%} of looks"

    @contextmanager
    def in_time(self, doing: str) -> Iterator[None]:
        """A context that ends the group, and raises EngineError, if its block takes longer than SILENCE_S, or COMPILE_S
        for ranks on devices, which may compile kernels in it. `doing`: what the block does, for the message."""
        limit = SILENCE_S if self.communicators is None else COMPILE_S
        late = threading.Timer(limit, lambda: self._lose(f"{doing} takes more than {limit:.0f} s{self._slow_suffix()}"))
        late.daemon = True
        late.start()
        try:
            yield
        except DeviceLostError as error:
            raise EngineError(f"the model is not served: {error}") from error
        finally:
            late.cancel()

    def _slow_suffix(self) -> str:
        """`slow_rank` after a colon, or nothing."""
        reason = self.slow_rank
        return f": {reason}" if reason else ""

    def check(self, error: BaseException | None = None) -> None:
        """Raise DeviceLostError if a rank has failed. `error`: with which the lead's step has failed, if it has."""
        if any(each.failed for each in self._exchanges):
            if error is not None and not isinstance(error, DeviceLostError):
                self._lose(f"rank 0 of {self._ranks} (the lead): {type(error).__name__}: {error}")
            self.explain()
            raise DeviceLostError("a rank failed")

    def explain(self) -> None:
        """Raise DeviceLostError with the reason why ranks have failed, if it becomes known in some seconds."""
        with self._changed:
            if self._changed.wait_for(lambda: self._lost, _REASON_S + _CAUSE_S):
                raise DeviceLostError(self._lost)

    def close(self) -> None:
        """End the followers, and kill those that have not ended after `_END_S`."""
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
        self._joined.close(lost=lost)  # the last node may have connected meanwhile
        if self._mirrors and self.exchange is not None:
            self.exchange.fail()
            for mirror in self._mirrors:
                mirror.close()
        if self._chain is not None:
            self._chain.close()
        if self.communicators is not None:
            self.communicators.fail()

    # ---- its thread

    def _run(self) -> None:
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
                # Short waits while steps run, to sample for whom the others wait.
                for key, _ in selector.select(_SAMPLE_S if self._observe_waits() else 1.0):
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
        """Connect to the other machines. Raises EngineError naming the node that has not come, or differs."""
        part = {**self._setup, "nodes": self._nodes}
        joined = gather(
            meeting,
            self._nodes,
            self._local_ranks,
            traits_of(self._folder, native=self.communicators is None),
            part,
            lambda: self._closing,
            stages=self._stages,
        )
        self._joined = joined
        if self.communicators is not None:
            self._address = joined.nodes[1].getsockname()[0]
        if joined.sums:
            assert self.exchange is not None
            self._mirrors = [
                Mirror(self.exchange, i, node * self._local_ranks + i, end)
                for node, ends in joined.sums.items()
                for i, end in ends.items()
            ]
        if self._stages == 1:
            return
        assert joined.after is not None
        assert joined.back is not None
        back = SocketLink(joined.back)
        after = SocketLink(joined.after)
        for link in (back, after):
            link.explain = self.explain
            self._exchanges.append(link)
        self._lead_links = (after if len(self._memories) == 1 else self._lead_links[0], back)

    def _start(self, rank: int) -> None:
        stage, rank_in_stage = divmod(rank, self._stage_ranks)
        process = None
        if rank < self._local_ranks:
            lead_end, follower_end = socket.socketpair()
            with follower_end:
                try:
                    process = self._process(rank, stage, rank_in_stage, follower_end)
                except OSError:
                    lead_end.close()
                    raise
        else:
            lead_end = self._joined.ranks[rank]
        with suppress(OSError):  # it has ended, which the selector will show
            lead_end.sendall(json.dumps({**self._setup, "rank": rank_in_stage, "stage": stage}).encode() + b"\n")
        with self._changed:
            self._followers.append(_Follower(rank, process, lead_end, time.monotonic()))
            if self._closing:
                shut(lead_end)

    def _process(self, rank: int, stage: int, rank_in_stage: int, control: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process of a rank of this machine."""
        links: list[tuple[str, int]] = []
        if stage and not rank_in_stage:
            links = [("memory", each) for each in self._links[stage - 1 : stage + 1]]
            if len(links) == 1:
                assert self._joined.after is not None
                links.append(("socket", self._joined.after.fileno()))
        local = {"folder": str(absolute(self._folder)), "files": self._files, "threads": self.threads, "index": rank}
        local |= {"processes": self._local_ranks, "address": self._address, "memory": self._memories[stage]}
        local |= {"links": links, "tells": False}
        return start_follower(control, local, [self._memories[stage], *(number for _, number in links)])

    def _read(self, follower: _Follower) -> bool:
        """Read what a follower has sent. Returns False once its socket is closed."""
        try:
            data = follower.socket.recv(_MAX_MESSAGE)
        except OSError:
            data = b""
        *lines, follower.unread = (follower.unread + data).split(b"\n")
        with self._changed:
            follower.last_heard = time.monotonic()
            for line in lines:
                try:
                    self._report(follower, json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    follower.error = f"it sends no report, but {line[:100]!r}"
            if len(follower.unread) > _MAX_MESSAGE:
                follower.error = f"it sends a message of more than {_MAX_MESSAGE} bytes"
            self._changed.notify_all()
        if follower.error and not self._closing:  # its process may take long to end
            self._lose(f"{self._name_of(follower)}: {follower.error}")
        if follower.lost and self._second_hand is None:
            self._second_hand = f"{self._name_of(follower)}: {follower.lost}", time.monotonic()
        return bool(data)

    def _report(self, follower: _Follower, message: dict[str, Any]) -> None:
        """Take what a follower reports. Raises what its parts raise where they are not of that kind."""
        follower.ready |= "ready" in message
        follower.types = message.get("types", follower.types)
        follower.busy = message.get("busy", follower.busy)
        if "key" in message:
            value = bytes.fromhex(message["value"])
            self._store.learn(message["key"], value)
            self._spread(message["key"], value, follower)
        if "adapter" in message:
            follower.adapters[message["adapter"]] = message["failure"]
        follower.error = message.get("error", follower.error)
        follower.lost = message.get("lost", follower.lost)

    def _take_second_hand(self, after: float) -> None:
        """Lose the group for a reason at second hand, `after` seconds after its report, if no first cause has come."""
        if self._second_hand is not None and not self._lost and not self._closing:
            reason, since = self._second_hand
            if time.monotonic() - since >= after:
                self._lose(reason)

    def _name_of(self, follower: _Follower) -> str:
        whose = f"on node {follower.rank // self._local_ranks}"
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
            reason = self._reported_end(follower.rank // self._local_ranks, follower.rank)
        else:
            try:
                reason = end_of(follower.process.wait(_REASON_S))
            except subprocess.TimeoutExpired:
                reason = end_of(None)
        self._lose(f"{self._name_of(follower)}: {reason}")

    def _reported_end(self, node: int, rank: int) -> str:
        """The end of a rank of another machine, or its node's own error, as the node reports it."""
        end = self._joined.nodes[node]
        end.settimeout(_REASON_S)
        try:
            lines = end.recv(_MAX_MESSAGE).decode().splitlines()
        except OSError:
            lines = []
        reports = [json.loads(line) for line in lines if line.startswith("{")]
        # The node may have failed to connect to another one, which the lead does not wait for.
        errors = [line for line in lines if not line.startswith("{")] or ["its connection is lost"]
        return next((each["end"] for each in reports if each.get("rank") == rank), errors[0])

    def _refuse_silence(self) -> None:
        for each in self._followers:
            silent = time.monotonic() - each.last_heard
            if not each.ready and not self._lost and not self._closing and silent > SILENCE_S:
                self._lose(f"rank {each.rank} of {self._ranks} has said nothing for {silent:.0f} s, and is given up")

    def _lose(self, reason: str) -> None:
        with self._changed:
            first, self._lost = not self._lost, self._lost or reason
            all_ready = all(each.ready for each in self._followers)
            self._changed.notify_all()
        for exchange in self._exchanges:
            exchange.fail()
        for each in self._followers:
            each.kill()
        for end in self._joined.nodes.values():
            shut(end)
        if first:
            logger.error("The ranks of the model are lost: %s", reason)
            if all_ready and self.on_lost is not None:
                self.on_lost()
