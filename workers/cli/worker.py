"""`penstock worker`: one process that serves a model, or one for each GPU or each model. `penstock drain`: tells the
worker on this machine, or in this container, to drain, and waits until it exits.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.execution.ranks.meeting import check_meeting
from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS, Exit, Failure, check_extras, check_signing, needs, refusing
from workers.cli.options import (
    ENGINE,
    MODEL,
    Broker,
    DataDir,
    FilesDir,
    Gpus,
    LogLevel,
    RequireSignature,
    Shares,
    Store,
    as_arguments,
    as_environment,
    check_spot,
    checked_placement,
    complete_model,
    finite,
    health_ports,
    process_name,
    provider,
    shares_of,
    takes,
    unique_names,
)
from workers.cli.servers import addresses, checked_level, use_secrets_key
from workers.cli.terminal import relayed
from workers.processes import PENSTOCK, proc

if TYPE_CHECKING:
    from workers.cli.gpus import Chosen

DRAIN_STATUS: Final = (
    "Exit status: 0 the worker has ended, 2 refused, 4 timed out (it goes on draining), 130 interrupted."
)
#: Files that a machine with NVIDIA's driver has.
DRIVERS: Final = ("/dev/nvidiactl", "/dev/dxg")
#: Cores of a machine on which the engine's process would take turns with the worker's.
ENOUGH_CORES: Final = 2
drain_app = Commands("Operations", DRAIN_STATUS)

app = Commands("Processes", PROCESS_STATUS)


class EngineProcess(StrEnum):
    """Whether the engine has a process of its own."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


@app.shown("penstock worker --broker redis://10.0.0.5:6379/0 --model tiny --max-num-seqs 32")
@takes(engine=ENGINE.values())
def worker(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Option(
            help=f"{MODEL} May be repeated: the models share the device, a worker process each.",
            autocompletion=complete_model,
        ),
    ],
    *,
    share: Shares = None,
    turns: Annotated[Path | None, typer.Option(hidden=True, help="Where the models of a device take turns.")] = None,
    broker: Broker = None,
    store: Store = None,
    data_dir: DataDir = None,
    name: Annotated[
        str | None,
        typer.Option(
            callback=process_name, help="This process's name in leases and logs, its own alone. Unset: HOST.PID."
        ),
    ] = None,
    lease: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="Seconds without a heartbeat after which other workers take its tasks."
        ),
    ] = 10.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that running tasks may go on after SIGTERM.")
    ] = 30.0,
    max_worker_deaths: Annotated[
        int, typer.Option(min=1, help="Give a task up when this many workers died on it without one new token.")
    ] = 3,
    max_step_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Longest engine step. After that the step counts as hung: the worker hands its tasks back and exits. "
            "0: no limit.",
        ),
    ] = 180.0,
    no_breaker: Annotated[
        bool,
        typer.Option(
            "--no-breaker",
            help="Take tasks also while the engine fails them, or is far slower than other workers' are.",
        ),
    ] = False,
    core_watts: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help="Power (W) of a busy core, for the energy of tasks on a CPU whose own counters (RAPL) cannot be read. "
            "Unset: no energy is told there.",
        ),
    ] = None,
    engine_process: Annotated[
        EngineProcess,
        typer.Option(
            help="Run the engine in a process of its own, beside the one for queue and store. auto: on a GPU, with "
            "more than two cores."
        ),
    ] = EngineProcess.AUTO,
    placement: Annotated[
        str,
        typer.Option(
            callback=checked_placement,
            help="prefix: leave a task for a moment to the worker that has the longest part of its prompt cached, or "
            "its adapter loaded. off: take what comes first.",
        ),
    ] = "off",
    require_signature: RequireSignature = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve /livez and /readyz on this port. With --gpus or several models, the first worker uses it and "
            "each further worker the next one. 0: any free port. Unset: no port.",
        ),
    ] = None,
    spot_provider: Annotated[
        str | None,
        typer.Option(
            callback=provider,
            help="Drain when this provider announces the end of the instance (spot, Auto Scaling group): aws. Unset: "
            "do not ask.",
        ),
    ] = None,
    spot_metadata_url: Annotated[
        str | None, typer.Option(help="URL of the instance's metadata service. Unset: the provider's own.")
    ] = None,
    files_dir: FilesDir = None,
    engine: dict[str, Any],
    gpus: Gpus = None,
    events: Annotated[
        bool,
        typer.Option("--task-events", "-E", help="Send Celery's task events, as after `celery control enable_events`."),
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model: take tasks from its queue, run them in the engine and publish their tokens."""
    check_spot(spot_provider, spot_metadata_url)
    with refusing(EngineError):  # before broker and model
        check_meeting(EngineConfig(**engine))
    shares = shares_of(model, share)
    if len(model) > 1:
        check_nodes(engine.get("nodes"), len(model))
        raise typer.Exit(_one_for_each_model(context, model, shares, gpus, name, drain_timeout))
    if share:
        engine["share"] = shares[0]
    if turns is not None:
        engine["turns"] = str(turns)
    if gpus is not None:
        raise typer.Exit(_one_for_each_gpu(context, gpus, name, drain_timeout))
    # Until it serves, nothing that it makes is garbage: to look for some takes a quarter of the imports' time.
    gc.disable()
    check_extras("worker")
    use_secrets_key(None)
    with needs("worker"):
        from workers.runtime.worker import run_worker
        from workers.settings import WorkerSettings
    if require_signature:
        check_signing()
    settings = WorkerSettings(
        *addresses(broker, store, data_dir),
        model[0],
        engine_process=_in_a_process(engine_process, engine.get("device", "auto")),
        require_signature=tuple(map(str, require_signature or ())),
        engine=engine,
        lease=lease,
        drain=drain_timeout,
        max_deaths=max_worker_deaths,
        step_limit=max_step_seconds,
        breaker=not no_breaker,
        core_watts=core_watts,
        placement=placement,
        health_port=health_port,
        spot_notice=spot_provider,
        spot_endpoint=spot_metadata_url,
        events=events,
        files_dir=files_dir,
    )
    if name is not None:
        settings = replace(settings, name=name)
    with refusing(EngineError):
        status = run_worker(settings, checked_level(log_level))
    raise typer.Exit(status)


def _in_a_process(choice: EngineProcess, device: str) -> bool:
    """Whether the engine gets a process of its own. Raises Failure where it cannot."""
    possible = sys.platform == "linux"
    if choice is EngineProcess.AUTO:
        gpu = device != "cpu" and any(map(os.path.exists, DRIVERS)) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        return possible and gpu and len(os.sched_getaffinity(0)) > ENOUGH_CORES
    if choice is EngineProcess.ON and not possible:
        raise Failure("--engine-process on needs Linux; leave it out")
    return choice is EngineProcess.ON


def _one_for_each_gpu(context: typer.Context, selection: str, name: str | None, drain: float) -> int:
    """Run this command once for each GPU, with the other options unchanged. Returns the exit status."""
    import asyncio

    from workers.cli.gpus import programs
    from workers.cli.supervised import supervise

    gpus = _gpus(context, selection)
    check_nodes(context.params["nodes"], len(gpus))
    ports = health_ports(context.params["health_port"], len(gpus))
    argv = [
        *PENSTOCK,
        str(context.info_name),
        *as_arguments(context, without=("gpus", "name", "device", "health_port")),
    ]
    argv += _on_gpus(context, gpus)
    each = programs(gpus, argv, _environment(context), name or f"{socket.gethostname()}.{os.getpid()}", ports)
    return asyncio.run(supervise(each, relayed, drain))


def _one_for_each_model(
    context: typer.Context,
    references: Sequence[str],
    shares: Sequence[float],
    selection: str | None,
    name: str | None,
    drain: float,
) -> int:
    """Run this command once for each model, on each of the selected GPUs, with the other options unchanged. Returns the
    exit status."""
    import asyncio

    from workers.cli.supervised import supervise
    from workers.processes.supervisor import Program

    names, environment = unique_names(references), _environment(context)
    gpus = () if selection is None else _gpus(context, selection)
    own = ("model", "share", "name", "health_port", *(("gpus", "device") if gpus else ()))
    argv = [*PENSTOCK, str(context.info_name), *as_arguments(context, without=own)]
    argv += _on_gpus(context, gpus) if gpus else []
    name = name or f"{socket.gethostname()}.{os.getpid()}"
    # A device's name, and the environment that shows it: that of the CPU, or the default GPU, needs neither.
    devices = [(f"{gpu.label}.", {"CUDA_VISIBLE_DEVICES": gpu.visible}) for gpu in gpus] or [("", {})]
    ports = iter(health_ports(context.params["health_port"], len(names) * len(devices)))
    each: list[Program] = []
    with folder_of_turns() as folder:
        for device, visible in devices:
            turns = folder / f"{device}turns"
            turns.mkdir(parents=True)  # MIG-GPU-.../7/0, as earlier drivers name a part of a GPU
            for model, reference, share in zip(names, references, shares, strict=True):
                port = next(ports)
                line = [*argv, *(() if port is None else ("--health-port", str(port)))]
                line += ["--model", reference, "--share", repr(share), "--turns", str(turns)]
                line += ["--name", f"{name}.{device}{model}"]
                each.append(Program(f"{device}{model}", line, environment | visible))
        return asyncio.run(supervise(each, relayed, drain))


@contextmanager
def folder_of_turns() -> Iterator[Path]:
    """A new folder in which models take turns, until it is no longer used. Its lock tells systemd-tmpfiles, which
    removes old files, to leave it alone: models that start later have to find the same files."""
    import fcntl
    import tempfile

    with tempfile.TemporaryDirectory(prefix="penstock-turns-") as folder:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield Path(folder)
        finally:
            os.close(lock)


def check_nodes(nodes: int | None, workers: int) -> None:
    """Raise Failure if one command would start several `workers` that wait for other machines, at the same port."""
    if (nodes or 1) > 1 and workers > 1:
        raise Failure(
            f"--nodes {nodes} goes with one worker, and this would start {workers}, which cannot all wait at one "
            "--ranks-address: start each by a command of its own, with an address (and --gpus) of its own"
        )


def _gpus(context: typer.Context, selection: str) -> tuple[Chosen, ...]:
    """The selected GPUs. Raises Failure."""
    from workers.cli.gpus import choose, gpus_here

    if context.params["device"] == "cpu":
        raise Failure("--gpus goes with --device cuda, not with cpu")
    of_stage, stages, nodes = (context.params[name] or 1 for name in ("tensor_parallel", "pipeline_parallel", "nodes"))
    return choose(selection, gpus_here(), max(1, of_stage * stages // nodes))


def _on_gpus(context: typer.Context, gpus: Sequence[Chosen]) -> list[str]:
    """The options of a worker on one of these GPUs."""
    from engine.execution.threads import threads_of_each

    threads = [] if context.params["threads"] is not None else ["--threads", str(threads_of_each(len(gpus)))]
    return ["--device", "cuda", *threads]


def _environment(context: typer.Context) -> dict[str, str]:
    """What the children's environment has of this command line, and the servers' URLs: by these a child's lease is
    ended when it dies. Raises Failure where there are no servers."""
    broker, store = addresses(*(context.params[name] for name in ("broker", "store", "data_dir")))
    return as_environment(context) | {"BROKER_URL": broker, "STORE_URL": store}


@drain_app.shown("penstock drain --timeout 60")
def drain(
    pid: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=proc.LAST,
            help="The worker's process id. Unset: the only worker here, which runs in this folder.",
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Hand running tasks back at once.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Longest wait (s). Unset: until the worker exits.")
    ] = None,
) -> None:
    """Tell the worker on this machine to drain, and wait until it exits. Made for preStop hooks in Kubernetes."""
    if sys.platform != "linux":
        raise Failure("penstock drain needs Linux; elsewhere send the worker SIGTERM")
    pids = workers_here()
    if pid is None:
        if len(pids) != 1:
            several = f"{len(pids)} workers run on this machine ({', '.join(map(str, pids))}): choose one with --pid"
            raise Failure(several if pids else "no worker runs here (in a container, run this in the worker's own)")
        pid = pids[0]
        if (folder := proc.folder_of(pid)) != Path.cwd():  # it may be another system's
            raise Failure(
                f"the only worker here, {pid}, runs in {folder or 'another folder'}: name it with --pid {pid}"
            )
    try:
        handle = os.pidfd_open(pid)
        # The handle pins the process: the number cannot pass to another one between the check and the signal.
        if not _is_worker(pid):
            raise Failure(f"process {pid} is no worker; there {_are(pids)}")
        signal.pidfd_send_signal(handle, signal.SIGQUIT if now else signal.SIGTERM)
    except ProcessLookupError:
        raise Failure(f"there is no process {pid}; there {_are(pids)}") from None
    except PermissionError:
        raise Failure(f"process {pid} is another user's: run this as that user") from None
    try:
        ended, _, _ = select.select([handle], [], [], timeout)
    except KeyboardInterrupt:
        raise Failure(f"interrupted; process {pid} goes on draining", Exit.INTERRUPTED) from None
    if not ended:
        raise Failure(f"process {pid} has not ended after {timeout:g} s; it goes on draining", Exit.TIMEOUT)
    typer.echo(f"worker {pid} has ended")


def workers_here() -> list[int]:
    """Process ids of the workers here. Those of one `penstock worker`, on several GPUs or of several models, count
    once, with their parent process."""
    pids = [int(entry.name) for entry in proc.PROC.iterdir() if entry.name.isdigit() and _is_worker(int(entry.name))]
    return sorted(pid for pid in pids if proc.parent_of(pid) not in pids)


def _is_worker(pid: int) -> bool:
    return proc.command_of(proc.argv_of(pid)) == "worker"


def _are(pids: list[int]) -> str:
    return f"are workers {', '.join(map(str, pids))}" if pids else "is no worker"
