"""A system of its own to do harm to: servers, links, processes.

broker, store <- links <- worker-1, worker-2, gateway, sweeper, clients;   gateway <- links <- clients
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.chaos import clock
from tests.chaos.holders import make_holders
from tests.chaos.links import Links
from tests.chaos.processes import Keeper, Running, Slot, guarded
from tests.chaos.servers import Server
from tests.chaos.sqs import Sqs
from tests.chaos.sweeper_process import HASTY
from tests.processes import free_port
from tests.waiting import within
from tests.warm import Forked
from workers.processes import PENSTOCK
from workers.trials.chaos.checker.case import Journal, Violation, journal_path
from workers.trials.chaos.checker.rest import workers_of
from workers.trials.chaos.checker.store import Stores
from workers.trials.chaos.client import SETTINGS, Settings
from workers.trials.chaos.injector import Handle, Healing
from workers.trials.chaos.load import WITHOUT_CELERY, Load
from workers.trials.chaos.plan import Fault
from workers.trials.chaos.senders import Holder
from workers.trials.chaos.trial import unended

#: Whoever takes longer than this hangs (s): beyond the drain time to stop; to come up.
HAND_BACK_S = 60.0
BOOT_S = 120.0
#: A lease that stands for so long (s) beyond its own time is a fault.
IDLE_S = 60.0
#: A server that says nothing for so long (s) is away. A disk may be slow to sync what is written.
SILENT_S = 10.0

_DOUBLE = """
local held, found = redis.call('KEYS', 'penstock:inflight:*'), {}
for _, name in ipairs(held) do
  for _, packed in ipairs(redis.call('HVALS', name)) do
    local e = cmsgpack.unpack(packed)
    found[#found + 1] = { e[2], e[4] }
  end
end
for _, name in ipairs(redis.call('KEYS', 'penstock:queue:*')) do
  if redis.call('TYPE', name).ok == 'list' then
    for _, raw in ipairs(redis.call('LRANGE', name, 0, -1)) do
      found[#found + 1] = { name, raw }
    end
  end
end
for k, one in ipairs(found) do
  redis.call(k % 2 == 0 and 'LPUSH' or 'RPUSH', one[1], one[2])
end
return #found
"""
_SHUFFLE = """
math.randomseed(tonumber(ARGV[1]))
for _, name in ipairs(redis.call('KEYS', 'penstock:queue:*')) do
  if redis.call('TYPE', name).ok == 'list' then
    local found = redis.call('LRANGE', name, 0, -1)
    for k = #found, 2, -1 do
      local other = math.random(k)
      found[k], found[other] = found[other], found[k]
    end
    redis.call('DEL', name)
    redis.call('RPUSH', name, unpack(found))
  end
end
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """How big the stage is, and what runs on it; a plan carries it, so that it can be replayed."""

    engine: str = "stub"
    lease: float = 2.0
    drain: float = 1.0
    workers: int = 2
    clients: int = 1
    gateways: int = 1
    servers: int = 2
    seqs: int = 16
    step: float = 0.01
    open_tasks: int = 12
    variants: int = 40
    longest: int = 120
    max_deaths: int = 10
    settable_clocks: bool = False
    deterministic: bool = False
    forked: bool = False
    """Processes are forked from one that has imported everything, instead of being executed. Not with a real engine:
    torch does not fork well."""
    hasty: bool = False
    """Whoever sweeps has little patience, and readers of a killed gateway are soon gone."""
    sqs: bool = False
    """The broker is on SQS, whose proxy puts in `AWS_FAULTS`; its books are on the store, the one server."""
    keys: bool = False
    """Gateways ask for API keys, and clients have several of several tenants, with limits."""

    def load(self, seed: int) -> Load:
        if self.sqs:
            return Load(seed, "stub", self.variants, self.longest, ids=600, ways=WITHOUT_CELERY)
        if self.engine == "stub":
            # Below the token that kills the stub engine.
            return Load(seed, "stub", self.variants, self.longest, ids=600)
        return Load(seed, "tiny", self.variants, self.longest)


class Stage:
    """Start it with `up`, end it with `down`; a `Scene` and its `Clients`, as `workers.trials.chaos.trial` has them."""

    def __init__(self, shape: Shape, seed: int, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.shape, self.seed, self.folder, self._say = shape, seed, folder, say
        self.journals, self.logs = folder / "journals", folder / "logs"
        for path in (self.journals, self.logs):
            path.mkdir(parents=True)
        self.journal = Journal(self.journals, "stage")
        self.links = Links()
        self._clocks: dict[str, clock.Clock] = {}
        names = ("broker", "store")[: shape.servers]
        self.servers = {name: Server(name, folder / name, self._clock(name)) for name in names}
        self.broker, self.store = self.servers["broker"], self.servers[names[-1]]
        self.redis = {
            name: Redis.from_url(server.url, decode_responses=True, socket_timeout=SILENT_S)
            for name, server in (("broker", self.broker), ("store", self.store))
        }
        self.sqs = Sqs(self.store.url, seed) if shape.sqs else None
        self.slots: dict[str, Slot] = {}
        self.holders: tuple[Holder, ...] = ()
        self.gateways: list[int] = []
        self._keeper = Keeper(self.slots)

    # ---- up and down ------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Returns when all but the clients are of use."""
        if self.sqs is not None:
            self.sqs.up()
        if self.shape.keys:
            self.holders = make_holders(self.store.url, self.journal, self.shape.longest)
        for number in range(1, self.shape.workers + 1):
            self._slot(f"worker-{number}", "worker", self._serves)
        for number in range(1, self.shape.gateways + 1):
            port = free_port()
            self.gateways.append(port)
            self._slot(f"gateway-{number}", "gateway", lambda _, port=port: _answers(port))
        self._slot("sweeper", "sweeper", lambda _: True)
        self._keeper.start()
        if not within(lambda: all(slot.ready for slot in self.slots.values()), BOOT_S):
            late = [slot.name for slot in self.slots.values() if not slot.ready]
            raise RuntimeError(f"not up: {late}; see {self.logs}")

    def start_clients(self) -> None:
        for number in range(1, self.shape.clients + 1):
            name = f"client-{number}"
            self._slot(name, "client", lambda process, name=name: self._writes(name, process))

    def _serves(self, process: str) -> bool:
        """Whether a worker has its lease, and has said that it is ready: before, it does not heed a signal."""
        slot, _, generation = process.rpartition(".g")
        log = self.logs / f"{slot}.{int(generation):04d}.log"
        with contextlib.suppress(RedisError):
            leases = self.redis["broker"].scan_iter(f"penstock:lease:{process}.*", count=1000)
            return any(leases) and b" ready." in log.read_bytes()
        return False

    def _writes(self, name: str, process: str) -> bool:
        """Whether a client process has begun its journal."""
        return journal_path(self.journals, name, int(process.rpartition(".g")[2])).exists()

    def end_clients(self, seconds: float) -> list[Violation]:
        if self.sqs is not None:
            self._say(f"SQS: {self.sqs.calm()}")
        return [unended(name, "did not read all its tasks to their ends") for name in self._stop("client", seconds)]

    def run_quietly(self, variants: Sequence[int], seconds: float) -> list[Violation]:
        within(lambda: all(slot.ready for slot in self.slots.values() if slot.running), BOOT_S)
        settings = replace(self._client("quiet-1", 0), variants=tuple(variants), step=1, open_tasks=8)
        argv, env = _python("workers.trials.chaos.client"), {SETTINGS: settings.text()}
        process = self._start(argv, env, self.logs / "quiet.log")
        ended = within(lambda: process.poll() is not None, seconds) and process.poll() == 0
        return [] if ended else [unended("the run in quiet", "did not come to its end")]

    def end(self, broker: Redis, stores: Stores) -> list[Violation]:
        """Stop everything; what is left then, no worker may have left. Returns who did not stop in time."""
        if self.sqs is not None:
            stores.leftovers += self.sqs.left()
        late = [
            name
            for role in ("worker", "gateway", "sweeper")
            for name in self._stop(role, self.shape.drain + HAND_BACK_S)
        ]
        # One that could not hand back in time leaves both, and the lease lapses.
        within(lambda: not workers_of(broker), self.shape.lease + IDLE_S)
        stores.leftovers += [f"{about['incarnation']}: a lease" for about in workers_of(broker)]
        stores.leftovers += [f"an incarnation: {name}" for name in self._booked(broker)]
        return [unended(name, f"did not stop within its drain time and {HAND_BACK_S:g} s") for name in late]

    def _booked(self, broker: Redis) -> list[str]:
        """Incarnations of workers that ended well, and that are in the books all the same."""
        workers = [slot for slot in self.slots.values() if slot.role == "worker"]
        clean = tuple(f"{slot.process}." for slot in workers if slot.code == 0)
        # One whose lease lapsed while its process lived on is left to whoever reaps next.
        said = "".join(log.read_text() for log in self.logs.glob("worker-*.log"))
        books = [name for name in map(str, broker.hkeys("penstock:incarnations")) if name.startswith(clean)]
        return [name for name in books if f"The lease of {name} lapsed" not in said]

    def _stop(self, role: str, seconds: float) -> list[str]:
        """All of a role, for good. Names of those that did not end by themselves."""
        stopping = [slot for slot in self.slots.values() if slot.role == role]
        within(lambda: all(slot.ready for slot in stopping), BOOT_S)  # before, a signal finds nobody to heed it
        for slot in stopping:
            slot.retire()
        late = [slot.name for slot in stopping if not slot.stop(seconds)]
        for slot in stopping:
            slot.look()
        return late

    def down(self) -> None:
        """Everything ends, in whatever state it is."""
        for slot in self.slots.values():
            slot.stop(0.5)
        if self._keeper.is_alive():
            self._keeper.stop()
            for slot in self.slots.values():
                slot.look()
        if self.sqs is not None:
            self.sqs.down()
        for server in self.servers.values():
            server.stop()
        for redis in self.redis.values():
            redis.close()
        self.links.close()
        self.journal.close()

    def _slot(self, name: str, role: str, serves: Any) -> None:
        urls = {server: self._link(name, server) for server in ("broker", "store")}
        preload = clock_of.env if (clock_of := self._clock(name) if role == "worker" else None) else {}

        line = {"worker": self._worker, "gateway": self._gateway, "sweeper": self._sweeper, "client": self._reader}[
            role
        ]

        def make(generation: int) -> tuple[Sequence[str], Mapping[str, str], str]:
            process = f"{name}.g{generation}"
            argv, env = line(name, process, urls)
            return argv, {**env, **preload}, process

        self.slots[name] = Slot(name, role, make, serves, self.journal, self.logs, self._start)

    @property
    def _start(self) -> Callable[[Sequence[str], Mapping[str, str], Path], Running]:
        return Forked if self.shape.forked else guarded

    def _link(self, name: str, server: str) -> str:
        if server == "broker" and self.sqs is not None:
            return self.sqs.url
        one = self.broker if server == "broker" else self.store
        link = f"{name}>{one.name}"
        if link in self.links.by_name:
            return f"redis://127.0.0.1:{self.links.by_name[link].port}/0"
        return f"redis://127.0.0.1:{self.links.add(link, one.port)}/0"

    def _clock(self, name: str) -> clock.Clock | None:
        if not self.shape.settable_clocks:
            return None
        return self._clocks.setdefault(name, clock.Clock(self.folder / f"{name}.clock"))

    # ---- command lines ----------------------------------------------------------------------------------------

    def _worker(self, name: str, process: str, urls: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        shape = self.shape
        if shape.engine == "stub":
            settings = {**urls, "model": "stub", "engine_factory": "tests.stub_engine:load", "name": process}
            settings |= {"lease": shape.lease, "drain": shape.drain, "max_deaths": shape.max_deaths}
            settings |= {"reader_lease": HASTY["reader_lease"]} if shape.hasty else {}
            env = {"STUB_STEP_S": str(shape.step), "STUB_SEQS": str(shape.seqs)}
            return _python("tests.worker_process", json.dumps(settings)), env
        argv = [*PENSTOCK, "worker", "--model", "tiny", "--name", process, "--lease", str(shape.lease)]
        argv += [
            "--drain-timeout",
            str(shape.drain),
            "--max-worker-deaths",
            str(shape.max_deaths),
            "--dtype",
            "float32",
        ]
        argv += ["--threads", "1", "--max-num-seqs", str(shape.seqs), "--kv-cache-bytes", str(128 << 20)]
        argv += ["--deterministic"] if shape.deterministic else []
        return argv, _urls(urls)

    def _gateway(self, name: str, process: str, urls: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        port = self.gateways[int(name.rpartition("-")[2]) - 1]
        argv = [*PENSTOCK, "gateway", "--port", str(port), "--drain-timeout", str(self.shape.drain)]
        argv += ["--reader-lease", str(HASTY["reader_lease"])] if self.shape.hasty else []
        argv += ["--auth", "keys"] if self.shape.keys else []
        return argv, _urls(urls)

    def _sweeper(self, name: str, process: str, urls: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        if self.shape.hasty:
            return _python("tests.chaos.sweeper_process", json.dumps(urls)), {}
        return [*PENSTOCK, "sweeper"], _urls(urls)

    def _reader(self, name: str, process: str, urls: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        settings = self._client(name, int(name.rpartition("-")[2]) - 1)
        settings = replace(settings, number=int(process.rpartition(".g")[2]))
        return _python("workers.trials.chaos.client"), {SETTINGS: settings.text()}

    def _client(self, name: str, first: int) -> Settings:
        number = first % self.shape.gateways
        link = f"{name}>gateway-{number + 1}"
        if link not in self.links.by_name:
            self.links.add(link, self.gateways[number])
        return Settings(
            name,
            str(self.journals),
            f"http://127.0.0.1:{self.links.by_name[link].port}",
            self._link(name, "broker"),
            self._link(name, "store"),
            self.shape.load(self.seed),
            first=first,
            step=self.shape.clients,
            open_tasks=self.shape.open_tasks,
            holders=self.holders,
        )

    # ---- faults -----------------------------------------------------------------------------------------------

    @property
    def handles(self) -> Mapping[str, Handle]:
        """Processes and servers, by name."""
        return {**self.slots, **self.servers}

    def fits(self, fault: Fault) -> bool:
        """What is hit is up, and one worker is left: with none, streams wait for one to start, which shows nothing."""
        if fault.target in self.servers:
            return self.servers[fault.target].up
        slot = self.slots.get(fault.target)
        if slot is None:
            return True
        if slot.role == "worker":
            return slot.ready and any(
                other.ready for other in self.slots.values() if other.role == "worker" and other is not slot
            )
        return slot.ready

    def begin(self, fault: Fault) -> Healing | None:
        kind, target = fault.kind, fault.target
        if target in self.links.by_name:
            self.links.make(target, kind, fault.amount)
            return None if kind == "cut" else lambda: self.links.make(target, "ok")
        if kind == "clock":
            self._clocks[target].set(fault.amount)
            return None
        if kind in ("double", "shuffle"):
            with contextlib.suppress(RedisError):
                self.redis["broker"].eval(
                    _DOUBLE if kind == "double" else _SHUFFLE, 0, random.Random(f"{fault.at}").getrandbits(30)
                )
            return None
        server = self.servers[target]
        if kind == "restart":
            server.kill()
            return server.start
        if kind == "full":
            server.fill_disk()
            return server.free_disk
        raise ValueError(f"no {kind} is known here that {target} could suffer")

    def after(self, fault: Fault) -> None:
        """The keeper sees to it."""


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _urls(urls: Mapping[str, str]) -> dict[str, str]:
    return {"BROKER_URL": urls["broker"], "STORE_URL": urls["store"]}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
