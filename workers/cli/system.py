"""The whole system on one machine, as child processes of this one.

    start:  the first worker's imports, beside our own (`workers.processes.ahead`)
            -> valkey (unless one is given) -> gateway, workers, sources; models are published, and those of an `up`
            that has died are withdrawn -> wait until all serve
            -> sweeper, webhooks: before, their imports would delay the workers'
            -> the autoscaler begins, if the plan has it
    stop:   autoscaler -> gateway stops listening -> workers drain -> its models are withdrawn -> sweeper, webhooks,
            sources, the gateway's streams end -> valkey

Once all run, a child that dies is restarted. A worker that was told to drain, or that drained for a spot notice, stays
stopped. What happens when a process dies:

- this process: the kernel kills all the others (`workers.processes.guard`). What was queued, and what workers held, is
  in the data directory; the next start goes on with it, and with the least number of workers.
- the store: it is restarted; until it answers, the autoscaler holds the number that there is.
- a worker: see `workers.autoscaler.actuators.local`. The standby: see `workers.processes.standby`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.autoscaler.actuators import ActuatorError
from workers.cli import embedded_valkey
from workers.cli.client import Gateway
from workers.cli.exits import Exit, Failure
from workers.cli.local_pools import LocalPools, Plan
from workers.cli.publication import publish_own
from workers.cli.servers import open_port
from workers.connect import check_servers
from workers.errors import Refused
from workers.library import ResolvedModel
from workers.processes import PENSTOCK, ahead
from workers.processes.standby import IDLE_S, Standby
from workers.processes.supervisor import HAND_BACK_S, Child, Program, ended
from workers.runtime.cold_start import COLD_START
from workers.runtime.signals import signal_queue

if TYPE_CHECKING:
    from workers.autoscaler.autoscaler import Autoscaler

STREAMS_END_S: Final = 5.0
WEBHOOKS_DRAIN_S: Final = 5.0
SOURCES_DRAIN_S: Final = 10.0
VALKEY_STOP_S: Final = 15.0
#: Longest time (s) for which a start or a stop withdraws models.
WITHDRAWAL_S: Final = 5.0
#: Longest time (s) for which a start waits for the standby.
STANDBY_S: Final = 15.0
#: Pause (s) after which an autoscaler that failed begins anew.
SCALING_AGAIN_S: Final = 2.0
#: Time (s) without the lead after which that is shown; the lease of an `up` that was killed ends in less.
FOLLOWS_S: Final = 15.0
#: Time (s) after which a start says what it waits for; each pause is twice the last one, and at most the second.
PROGRESS_S: Final = 0.5
PROGRESS_MAX_S: Final = 15.0
#: Last lines of the processes' output shown after a failure.
LAST_LINES: Final = 20
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class System:
    """The running system. Call `start`, then `stop`, also after a failed start. `say(name, line)` gets all output."""

    plan: Plan
    say: Callable[[str, str], None]
    broker: str = field(init=False, default="")
    store: str = field(init=False, default="")
    port: int = field(init=False, default=0)
    _data: embedded_valkey.DataDir | None = field(init=False, default=None)
    _listener: socket.socket | None = field(init=False, default=None)
    _services: dict[str, Child] = field(init=False, default_factory=dict)
    """All children but the workers, by name."""
    _standby: Standby | None = field(init=False, default=None)
    _pools: LocalPools | None = field(init=False, default=None)
    _scaling: asyncio.Task[None] | None = field(init=False, default=None)
    _hastened: bool = field(init=False, default=False)
    _name: str = field(init=False)
    """Its name, as an autoscaler and as a publisher. Its workers' begin alike."""

    def __post_init__(self) -> None:
        self._name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}"

    @property
    def publisher(self) -> str:
        """As the cards of its models name it."""
        from producers.admin.listing import publisher_of

        return publisher_of(self._name)

    @property
    def url(self) -> str:
        """The gateway's URL for callers on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.plan.host, self.plan.host)  # noqa: S104 - compared
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def children(self) -> list[Child]:
        """The children that were started."""
        return [*self._services.values(), *(self._pools.children if self._pools is not None else ())]

    async def start(self) -> None:
        """Start all processes and wait until they serve. Raises Failure if one cannot start or dies before that."""
        telling = asyncio.create_task(self._tell_progress(), name="tell what is awaited")
        try:
            await self._start()
        finally:
            telling.cancel()

    async def _start(self) -> None:
        # The port first: it is the most frequent obstacle, and nothing runs yet.
        self._listener = open_port(self.plan.host, self.plan.port)
        self.port = self._listener.getsockname()[1]
        await self._begin_servers()
        self._standby = await self._begin_standby()
        await self._begin(self._gateway())
        self._pools = LocalPools(self.plan, self._name, self.urls, self.say, self._standby)
        try:
            await self._pools.start()
        except ActuatorError as error:
            raise Failure(str(error), Exit.TASK_FAILED) from error
        if self.plan.sources is not None:
            await self._begin(self._sources(self.plan.sources))
        await self._all_serve()
        await self._begin(self._sweeper())
        await self._begin(self._webhooks())
        for child in self.children:
            child.restart = True
        self._pools.go_on()
        if self.plan.scaled:
            self._scaling = asyncio.create_task(self._scale(self._pools), name="autoscaler")

    async def _tell_progress(self) -> None:
        """Say what is awaited: after half a second, and ever more seldom."""
        began, pause = time.monotonic(), PROGRESS_S
        while True:
            await asyncio.sleep(pause)
            self.say("up", f"{time.monotonic() - began:.0f} s: {self.awaited()}")
            pause = min(2 * pause, PROGRESS_MAX_S)

    def awaited(self) -> str:
        """The step that a start waits for now."""
        if "gateway" not in self._services:
            return "waiting for the server"
        workers = [] if self._pools is None else self._pools.children
        missing = self.plan.rules.min * len(self.plan.models) - sum(child.serves for child in workers)
        if missing > 0:
            models = ", ".join(model.name for model in self.plan.models)
            starting = "".join(f"; {child.program.name}: {child.starting}" for child in workers if child.starting)
            return f"waiting for {missing} worker(s), which load {models}{starting}"
        return "waiting for the gateway, which loads the tokenizers"

    async def stop(self) -> None:
        """Stop all processes in order. Running tasks may end; the rest is handed back to the queue."""
        if self._pools is not None and any(child.serves for child in self._pools.children):
            limit = f"for up to {self.plan.drain:g} s" if self.plan.drain else "and hand back what runs"
            self.say(
                "up", f"stopping: no new requests are taken, and the workers drain, {limit}. Ctrl-C again: at once"
            )
        self._stop_listening()
        if "gateway" in self._services:
            self._services["gateway"].order(signal.SIGTERM)
        await self._stop_scaling()
        if self._pools is not None:
            await self._pools.stop()
        if self.store:
            await self._withdraw(at_end=True)
        await self._end("sweeper", STREAMS_END_S)
        await self._end("webhooks", WEBHOOKS_DRAIN_S + STREAMS_END_S)  # the last events of the workers that drained
        await self._end("sources", SOURCES_DRAIN_S + STREAMS_END_S)
        await self._end("gateway", STREAMS_END_S)
        await self._stop_valkey()

    def hasten(self) -> None:
        """Make the workers hand back their running tasks now, while the system stops."""
        if self._pools is not None:
            if not self._hastened:
                self.say("up", "what runs goes back to the queue now. Ctrl-C again kills all processes")
            self._hastened = True
            self._pools.hasten()

    async def kill(self) -> None:
        """Kill all processes. Running tasks return to the queue at the next start."""
        self._stop_listening()
        await self._stop_scaling()
        others = [child for child in self.children if child is not self._services.get("valkey")]
        await asyncio.gather(*(child.stop(1.0, signal.SIGKILL) for child in others))
        await self._stop_valkey()

    async def _begin(self, program: Program) -> Child:
        child = self._services[program.name] = Child(program, self.say)
        await child.start()
        return child

    async def _end(self, name: str, seconds: float) -> None:
        """Stop a child, if it was started."""
        if name in self._services:
            await self._services[name].stop(seconds)

    async def _begin_servers(self) -> None:
        """Start the embedded server, if the plan has one, and check both. Raises Failure."""
        plan = self.plan
        self.broker, self.store = plan.broker or "", plan.store or ""
        if plan.embedded:
            self._data = await embedded_valkey.open_data_dir(plan.data_dir)
            port = self._data.port()
            self._data.write_broker(plan.broker)
            self.store = self._data.url(port)
            await embedded_valkey.started(await self._begin(embedded_valkey.valkey(self._data, port)), self._data, port)
        self.broker, self.store = self.broker or self.store, self.store or self.broker
        await asyncio.to_thread(check_servers, self.broker, self.store, (), worker=True, process="worker")
        COLD_START.mark("store")

    async def _all_serve(self) -> None:
        """Wait until the gateway answers and each worker has its lease. Raises Failure if a child dies first."""
        keepers = {child.keeper: child for child in self.children if child.keeper is not None}
        ready = asyncio.create_task(self._ready())
        try:
            done, _ = await asyncio.wait((ready, *keepers), return_when="FIRST_COMPLETED")
        finally:
            ready.cancel()
        if ready.done():
            ready.result()
        for keeper, child in keepers.items():
            if keeper in done:
                await asyncio.sleep(0.1)  # its last output is still being read
                output = "\n  ".join(list(child.lines)[-8:])
                refused = keeper.result() == Exit.REFUSED
                raise Failure(
                    f"{child.program.name} {ended(keeper.result())}:\n  {output}",
                    Exit.REFUSED if refused else Exit.TASK_FAILED,
                )

    async def _ready(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._publish, model) for model in self.plan.models))
        await self._withdraw()
        while not all(child.serves for child in self.children):  # noqa: ASYNC110 - children change
            await asyncio.sleep(0.02)
        COLD_START.mark("workers")
        gateway = Gateway(self.url)
        while not await asyncio.to_thread(gateway.ready):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.02)
        COLD_START.mark("gateway")
        if self._standby is not None and self.plan.rules.min == 0:  # the first task would wait for it anyway
            await self._standby_ready(self._standby)

    @staticmethod
    async def _standby_ready(standby: Standby) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STANDBY_S):
                while standby.pid is not None and not standby.ready:  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.02)

    def _publish(self, model: ResolvedModel) -> None:
        if notice := publish_own(self.broker, self.store, model, self.publisher):
            self.say("up", notice)

    async def _withdraw(self, *, at_end: bool = False) -> None:
        """Withdraw models of an `up` that has died, and `at_end` our own. Without an answer it is left to a sweeper."""
        from producers.admin.listing import has_died, withdraw
        from producers.client.aio import AsyncClient
        from producers.client.steps import FAILURES

        def ended(publisher: str) -> bool:
            return (at_end and publisher == self.publisher) or has_died(publisher, self.publisher)

        async with AsyncClient(self.broker, self.store) as client:
            with suppress(TimeoutError, *FAILURES):
                async with asyncio.timeout(WITHDRAWAL_S):
                    await withdraw(client, ended)

    async def _begin_standby(self) -> Standby | None:
        """Keep a standby, if the plan has it, or the one that was begun ahead for the first worker."""
        begun, idle_s = ahead.take(), self.plan.standby_s
        if begun is not None and idle_s is None and self.plan.rules.min * len(self.plan.models) != 1:
            begun.end()
            begun = None
        if begun is None and idle_s is None:
            return None
        argv = (*PENSTOCK, "worker")
        standby = Standby(argv, self.say, idle_s=idle_s or IDLE_S, ahead=begun, more=idle_s is not None)
        await standby.start()
        return standby

    async def _scale(self, pools: LocalPools) -> None:
        """Let the autoscaler decide how many workers run, from now on. If it fails, it begins again."""
        from producers.client.aio import AsyncClient
        from producers.store.fleet.scaling import forget
        from workers.autoscaler.autoscaler import Autoscaler, AutoscalerSettings

        while True:
            try:
                async with AsyncClient(self.broker, self.store) as client:
                    await forget(client.store, pools.names)  # of an earlier `up`, its workers and its failed starts
                    scaler = Autoscaler(client, pools, AutoscalerSettings(self._name))
                    telling = asyncio.create_task(tell_who_follows(scaler, self.say))
                    try:
                        await scaler.run()
                    finally:
                        telling.cancel()
            except Exception as error:  # noqa: BLE001 - shown; the number stays as it is meanwhile
                self.say("autoscaler", f"failed, beginning again in {SCALING_AGAIN_S:g} s: {error!r}")
            await asyncio.sleep(SCALING_AGAIN_S)

    async def _stop_scaling(self) -> None:
        """End the autoscaler and the standby."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait((self._scaling,))
        if self._standby is not None:
            await self._standby.stop()

    def _gateway(self) -> Program:
        assert self._listener is not None
        fd = self._listener.fileno()
        argv = [*PENSTOCK, "gateway", "--fd", str(fd), "--log-level", self.plan.log_level]
        # Streams may go on for as long as workers drain; then we end them.
        argv += ["--drain-timeout", str(self.plan.drain + HAND_BACK_S), *self.plan.gateway_options]
        argv += self.plan.files
        for model in self.plan.models:
            argv += ["--await-model", model.name]
        return Program("gateway", argv, self.urls, pass_fds=(fd,))

    def _sweeper(self) -> Program:
        argv = [*PENSTOCK, "sweeper", "--log-level", self.plan.log_level, *self.plan.files]
        return Program("sweeper", argv, self.urls)

    def _webhooks(self) -> Program:
        argv = [*PENSTOCK, "webhooks", "run", "--log-level", self.plan.log_level]
        argv += ["--drain-timeout", str(WEBHOOKS_DRAIN_S), *self.plan.webhooks_options]
        return Program("webhooks", argv, self.urls)

    def _sources(self, config: Path) -> Program:
        argv = [*PENSTOCK, "sources", "--config", str(config), "--log-level", self.plan.log_level]
        argv += ["--drain-timeout", str(SOURCES_DRAIN_S), *self.plan.files]
        return Program("sources", argv, self.urls)

    @property
    def urls(self) -> dict[str, str]:
        """The servers' URLs as environment variables. They may hold passwords, so they stay off the command line."""
        return {"BROKER_URL": self.broker, "STORE_URL": self.store}

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _stop_valkey(self) -> None:
        await self._end("valkey", VALKEY_STOP_S)
        if self._data is not None:
            self._data.close()
            self._data = None


async def tell_who_follows(scaler: Autoscaler, say: Callable[[str, str], None], after_s: float = FOLLOWS_S) -> None:
    """Say once that another autoscaler leads for long: no worker of ours starts or ends meanwhile."""
    await asyncio.sleep(after_s)
    if not scaler.leads and not scaler.unready():
        say("autoscaler", "another one leads on this store: the number of workers here stays until that one ends")


async def conduct(system: System, use: Callable[[System], Awaitable[None]]) -> bool:
    """Start the system, use it, stop it.

    SIGINT, SIGTERM or SIGHUP ends the use. SIGQUIT, or a second signal, makes the workers hand their tasks back at
    once. A third signal kills all processes.

    Returns whether `use` came to its own end. Raises Failure from the start, from the use, or for the third signal.
    Nothing is left running in any case.
    """
    received = signal_queue()

    async def start_and_use() -> None:
        await system.start()
        await use(system)

    work = asyncio.create_task(start_and_use())
    next_signal = asyncio.create_task(received.get())
    await asyncio.wait((work, next_signal), return_when="FIRST_COMPLETED")
    finished = work.done()
    if not finished:
        work.cancel()
        await asyncio.wait((work,))
    await _stop(system, received, next_signal)
    if not work.cancelled():
        work.result()
    return finished


async def _stop(
    system: System, received: asyncio.Queue[signal.Signals], next_signal: asyncio.Task[signal.Signals]
) -> None:
    """Stop the system. `next_signal`: waits for the next signal that comes, or has it."""
    stopping = asyncio.create_task(system.stop())
    signals = 0
    while not stopping.done():
        if next_signal.done():
            signals += 2 if signals == 0 and next_signal.result() is signal.SIGQUIT else 1
            next_signal = asyncio.create_task(received.get())
        if signals == 2:
            system.hasten()
        elif signals > 2:
            stopping.cancel()
            next_signal.cancel()
            await asyncio.wait((stopping,))
            await system.kill()
            raise Failure("stopped at once; running tasks are back in the queue", Exit.INTERRUPTED)
        await asyncio.wait((stopping, next_signal), return_when="FIRST_COMPLETED")
    next_signal.cancel()
    stopping.result()


@contextmanager
def running_system(
    models: tuple[ResolvedModel, ...], *, drain: float = 1.0, worker_options: tuple[str, ...] = ()
) -> Iterator[System]:
    """Serve the models with a system in a temporary folder; stop it on leaving, also after an exception.

    Raises Failure if the system does not start. The caller's thread stays free for the terminal: Ctrl-C raises
    KeyboardInterrupt there and does not reach the system's processes. SIGTERM and SIGHUP (a closed terminal) exit the
    caller, and with it the system. Signals that come while the system stops hasten it.
    """
    output: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        plan = Plan(models, Path(folder), port=0, drain=drain, worker_options=worker_options)
        system = System(plan, lambda name, line: output.append(f"{name} | {line}"))
        life = _BackgroundRun(system)

        def leave() -> None:
            _on_signals(_SIGNALS, life.hasten)  # a second exception might come between a lock and its release
            sys.exit(Exit.INTERRUPTED)

        _on_signals((signal.SIGTERM, signal.SIGHUP), leave)
        thread = threading.Thread(target=lambda: asyncio.run(life.run()), name="penstock-system")
        thread.start()
        try:
            life.up.result()
            yield system
        except Refused as refused:
            last = "".join(f"\n  {line}" for line in output[-LAST_LINES:])
            raise Failure(f"{refused}{last}", refused.status) from refused
        finally:
            try:
                _on_signals(_SIGNALS, life.hasten)
            finally:  # also where one more signal came before that
                life.end()
                thread.join()


def _on_signals(signals: Iterable[signal.Signals], act: Callable[[], None]) -> None:
    """Call this at each of these signals from now on. What is ignored stays so, as SIGHUP under nohup."""
    for sig in signals:
        if signal.getsignal(sig) is not signal.SIG_IGN:
            signal.signal(sig, lambda *_: act())


@dataclass(slots=True)
class _BackgroundRun:
    system: System
    up: Future[None] = field(default_factory=Future)
    _over: threading.Event = field(default_factory=threading.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._over.is_set():  # `end` was called before the loop ran
            self._ended.set()
        starting = asyncio.create_task(self.system.start())
        ending = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((starting, ending), return_when="FIRST_COMPLETED")
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
            if starting.cancelled():
                self.up.cancel()
            elif starting.exception() is not None:
                self.up.set_exception(starting.exception())
            else:
                self.up.set_result(None)
                await ending
        finally:
            ending.cancel()
            await self.system.stop()

    def end(self) -> None:
        """Stop the system. Callable from any thread, at any time."""
        self._over.set()
        self._call(self._ended.set)

    def hasten(self) -> None:
        """Make the workers hand back their running tasks now. Callable like `end`."""
        self._call(self.system.hasten)

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(function)
