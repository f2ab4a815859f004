"""The whole system on one machine, as child processes of this one.

    start:  valkey (unless one is given) -> gateway, workers, sweeper, webhooks, sources -> wait until all serve
    stop:   gateway stops listening -> workers drain -> sweeper, webhooks, sources, the gateway's streams end -> valkey

Once all run, a child that dies is restarted. A worker that was told to drain, or that drained for a spot notice, stays
stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from engine.execution.threads import threads_of_each
from producers.admin.fleet import read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import is_redis
from producers.connection.local import HOST
from workers.cli.client import Gateway
from workers.cli.exits import Exit, Failure
from workers.cli.gpus.choice import Chosen
from workers.cli.local import embedded
from workers.cli.processes import open_port
from workers.connect import check_servers
from workers.errors import Refused
from workers.library import Found
from workers.processes import PENSTOCK
from workers.processes.supervisor import HAND_BACK_S, TOLD, Child, Program, ended
from workers.runtime.signals import coming

STREAMS_END_S: Final = 5.0
WEBHOOKS_DRAIN_S: Final = 5.0
SOURCES_DRAIN_S: Final = 10.0
VALKEY_STOP_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to run. With `gpus`, each worker gets one."""

    models: tuple[Found, ...]
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    broker: str | None = None
    store: str | None = None
    workers: int = 1
    gpus: tuple[Chosen, ...] = ()
    drain: float = 30.0
    log_level: str = "warning"
    worker_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    webhooks_options: tuple[str, ...] = ()
    health_ports: tuple[int | None, ...] = ()
    """A port for each worker, in the order of models and their workers; empty: no ports."""
    files_dir: str | None = None
    sources: Path | None = None
    """The configuration of event sources; None: there are none."""

    @property
    def embedded(self) -> bool:
        """Whether it has a server of its own in `data_dir`: as both, or as the store of a broker on SQS."""
        return self.store is None and (self.broker is None or not is_redis(self.broker))

    @property
    def files(self) -> tuple[str, str]:
        """The option with the place of files, which all processes share."""
        return "--files-dir", str(self.files_dir or self.data_dir / "files")


@dataclass(slots=True)
class System:
    """The running system. Call `start`, then `stop`, also after a failed start. `say(name, line)` gets all output."""

    plan: Plan
    say: Callable[[str, str], None]
    broker: str = field(init=False, default="")
    store: str = field(init=False, default="")
    port: int = field(init=False, default=0)
    _data: embedded.DataDir | None = field(init=False, default=None)
    _listener: socket.socket | None = field(init=False, default=None)
    _valkey: Child | None = field(init=False, default=None)
    _gateway: Child | None = field(init=False, default=None)
    _workers: list[Child] = field(init=False, default_factory=list)
    _sweeper: Child | None = field(init=False, default=None)
    _webhooks: Child | None = field(init=False, default=None)
    _sources: Child | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        """The gateway's URL for callers on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.plan.host, self.plan.host)  # noqa: S104 - compared
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def children(self) -> list[Child]:
        """The children that were started."""
        every = (self._valkey, self._gateway, *self._workers, self._sweeper, self._webhooks, self._sources)
        return [child for child in every if child is not None]

    async def start(self) -> None:
        """Start all processes and wait until they serve. Raises Failure if one cannot start or dies before that."""
        plan = self.plan
        # The port first: it is the most frequent obstacle, and nothing runs yet.
        self._listener = open_port(plan.host, plan.port)
        self.port = self._listener.getsockname()[1]
        self.broker, self.store = plan.broker or "", plan.store or ""
        if plan.embedded:
            self._data = await embedded.open_data_dir(plan.data_dir)
            port = self._data.port()
            self._data.tell(plan.broker)
            self.store = f"redis://{HOST}:{port}/0"
            self._valkey = Child(embedded.valkey(self._data, port), self.say)
            await self._valkey.start()
            await embedded.started(self._valkey, self._data, port)
        self.broker, self.store = self.broker or self.store, self.store or self.broker
        try:
            await asyncio.to_thread(check_servers, self.broker, self.store, ())
        except Refused as refused:
            raise Failure(str(refused)) from refused
        self._gateway = Child(self._gateway_program(), self.say)
        await self._gateway.start()
        for program in self._worker_programs():
            child = Child(program, self.say)
            self._workers.append(child)
            await child.start()
        self._sweeper = Child(self._sweeper_program(), self.say)
        await self._sweeper.start()
        self._webhooks = Child(self._webhooks_program(), self.say)
        await self._webhooks.start()
        if plan.sources is not None:
            self._sources = Child(self._sources_program(plan.sources), self.say)
            await self._sources.start()
        await self._all_serve()
        for worker in self._workers:
            worker.give_up = lambda status, deaths: TOLD if status == 0 else None
        for child in self.children:
            child.restart = True

    async def stop(self) -> None:
        """Stop all processes in order. Running tasks may end; the rest is handed back to the queue."""
        self._stop_listening()
        if self._gateway is not None:
            self._gateway.order(signal.SIGTERM)
        await asyncio.gather(*(child.stop(self.plan.drain + HAND_BACK_S) for child in self._workers))
        if self._sweeper is not None:
            await self._sweeper.stop(STREAMS_END_S)
        if self._webhooks is not None:  # the last events of the workers that drained; the rest waits in the outbox
            await self._webhooks.stop(WEBHOOKS_DRAIN_S + STREAMS_END_S)
        if self._sources is not None:
            await self._sources.stop(SOURCES_DRAIN_S + STREAMS_END_S)
        if self._gateway is not None:
            await self._gateway.stop(STREAMS_END_S)
        await self._stop_valkey()

    def hasten(self) -> None:
        """Make the workers hand back their running tasks now, while the system stops."""
        for child in self._workers:
            child.order(signal.SIGQUIT)

    async def kill(self) -> None:
        """Kill all processes. Running tasks return to the queue at the next start."""
        self._stop_listening()
        others = [child for child in self.children if child is not self._valkey]
        await asyncio.gather(*(child.stop(1.0, signal.SIGKILL) for child in others))
        await self._stop_valkey()

    async def _all_serve(self) -> None:
        """Wait until the gateway answers and each worker has its lease. Raises Failure if a child dies first."""
        keepers = {child.keeper: child for child in self.children if child.keeper is not None}
        ready = asyncio.create_task(self._ready())
        try:
            done, _ = await asyncio.wait((ready, *keepers), return_when="FIRST_COMPLETED")
        finally:
            ready.cancel()
        for keeper, child in keepers.items():
            if keeper in done:
                await asyncio.sleep(0.1)  # its last output is still being read
                said = "\n  ".join(list(child.lines)[-8:])
                refused = keeper.result() == Exit.REFUSED
                raise Failure(
                    f"{child.program.name} {ended(keeper.result())}:\n  {said}",
                    Exit.REFUSED if refused else Exit.TASK_FAILED,
                )

    async def _ready(self) -> None:
        names = {child.program.argv[-1] for child in self._workers}
        async with AsyncClient(self.broker, self.store) as client:
            while True:
                try:
                    fleet = await read_fleet(client.store, client.broker)
                    if names <= {worker["worker"] for pool in fleet.pools for worker in pool.workers}:
                        break
                except FAILURES as error:
                    self.say("up", f"the store or the broker fails: {error}")
                await asyncio.sleep(0.05)
        gateway = Gateway(self.url)
        while True:
            if await asyncio.to_thread(gateway.ready):
                return
            await asyncio.sleep(0.05)

    def _gateway_program(self) -> Program:
        assert self._listener is not None
        fd = self._listener.fileno()
        argv = [*PENSTOCK, "gateway", "--fd", str(fd), "--log-level", self.plan.log_level]
        # Streams may go on for as long as workers drain; then we end them.
        argv += ["--drain-timeout", str(self.plan.drain + HAND_BACK_S), *self.plan.gateway_options]
        argv += self.plan.files
        for model in self.plan.models:
            argv += ["--await-model", model.name]
        return Program("gateway", argv, self._urls(), pass_fds=(fd,))

    def _sweeper_program(self) -> Program:
        argv = [*PENSTOCK, "sweeper", "--log-level", self.plan.log_level, *self.plan.files]
        return Program("sweeper", argv, self._urls())

    def _webhooks_program(self) -> Program:
        argv = [*PENSTOCK, "webhooks", "run", "--log-level", self.plan.log_level]
        argv += ["--drain-timeout", str(WEBHOOKS_DRAIN_S), *self.plan.webhooks_options]
        return Program("webhooks", argv, self._urls())

    def _sources_program(self, config: Path) -> Program:
        argv = [*PENSTOCK, "sources", "--config", str(config), "--log-level", self.plan.log_level]
        argv += ["--drain-timeout", str(SOURCES_DRAIN_S), *self.plan.files]
        return Program("sources", argv, self._urls())

    def _worker_programs(self) -> list[Program]:
        plan, programs = self.plan, []
        total = plan.workers * len(plan.models)
        # The user's own options come later on the command line, and win.
        shared = ("--threads", str(threads_of_each(total))) if total > 1 else ()
        gpus, ports = iter(plan.gpus), iter(plan.health_ports)
        for model in plan.models:
            for k in range(1, plan.workers + 1):
                name = "worker" if total == 1 else f"worker.{model.name}.{k}"
                argv = [*PENSTOCK, "worker", "--model", model.reference, "--drain-timeout", str(plan.drain), *shared]
                argv += [*plan.files, *plan.worker_options, "--log-level", plan.log_level]
                env = self._urls()
                if (port := next(ports, None)) is not None:
                    argv += ["--health-port", str(port)]
                if plan.gpus:
                    argv += ["--device", "cuda"]
                    env["CUDA_VISIBLE_DEVICES"] = next(gpus).visible
                argv += ["--name", f"{socket.gethostname()}.{os.getpid()}.{name}"]
                programs.append(Program(name, argv, env))
        return programs

    def _urls(self) -> dict[str, str]:
        """The servers' URLs as environment variables. They may hold passwords, so they stay off the command line."""
        return {"BROKER_URL": self.broker, "STORE_URL": self.store}

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _stop_valkey(self) -> None:
        if self._valkey is not None:
            await self._valkey.stop(VALKEY_STOP_S)
        if self._data is not None:
            self._data.close()
            self._data = None


async def conduct(system: System, use: Callable[[System], Awaitable[None]]) -> bool:
    """Start the system, use it, stop it.

    SIGINT, SIGTERM or SIGHUP ends the use. SIGQUIT, or a second signal, makes the workers hand their tasks back at
    once. A third signal kills all processes.

    Returns whether `use` came to its own end. Raises Failure from the start, from the use, or for the third signal.
    Nothing is left running in any case.
    """
    came = coming()

    async def start_and_use() -> None:
        await system.start()
        await use(system)

    work = asyncio.create_task(start_and_use())
    told = asyncio.create_task(came.get())
    await asyncio.wait((work, told), return_when="FIRST_COMPLETED")
    finished = work.done()
    signals = 0
    if not finished:
        signals = 2 if told.result() is signal.SIGQUIT else 1
        work.cancel()
        await asyncio.wait((work,))
        told = asyncio.create_task(came.get())
    stopping = asyncio.create_task(system.stop())
    while True:
        if signals == 2:
            system.hasten()
        await asyncio.wait((stopping, told), return_when="FIRST_COMPLETED")
        if stopping.done():
            break
        signals += 1
        told = asyncio.create_task(came.get())
        if signals > 2:
            stopping.cancel()
            told.cancel()
            await asyncio.wait((stopping,))
            await system.kill()
            raise Failure("stopped at once; running tasks are back in the queue", Exit.INTERRUPTED)
    told.cancel()
    stopping.result()
    if not work.cancelled():
        work.result()
    return finished
