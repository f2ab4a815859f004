"""`penstock worker --gpus`: selects GPUs of this machine, and supervises one worker process for each.

    CUDA is asked (`cuda_devices`, in a process of its own) -> `choose` selects -> `programs` -> `supervise`:
    start all -> (a child dies -> back-off -> start it again, or give it up) ... -> told to stop -> all stop -> exit

Each child sees one GPU (CUDA_VISIBLE_DEVICES) and is a normal worker with its own name and lease. This process holds no
lease and no model, and loads neither torch nor the driver.

What happens when a process dies:

- this process: the kernel kills its children (see `guard`). Their leases lapse, and other workers take their tasks. A
  child that was being forked finds its parent gone and exits.
- a child before it serves, or soon after: it is restarted after a growing pause, and given up after MOST_DEATHS such
  deaths in a row. A child that is refused (a setting, a model) before it ever served is given up at once. After it has
  served, a refusal has another cause (a restarting broker) and passes.
- a child that serves: its lease is ended for it (docs/how/worker.md). It is restarted with the same name, as a new
  incarnation.
- a child that another process told to stop: it exits with 0 and stays stopped.
- a child while all stop: it is not restarted, and its status counts.

The others go on without a child that was given up. When none is left, this process ends with the worst status.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from workers.cli.exits import Exit, Failure
from workers.processes.notify import notify_ready
from workers.processes.supervisor import HAND_BACK_S, STAYS_STOPPED, WELL_S, Child, Program
from workers.runtime.signals import signal_queue

CUDA_DEVICES: Final = Path(__file__).with_name("cuda_devices.py")
#: Longest time for the driver's answer (s). Without persistence mode it wakes each GPU first.
ANSWER_S: Final = 60.0
#: Deaths in a row, without WELL_S seconds of service between, after which a child is given up (some minutes).
MOST_DEATHS: Final = 8

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that CUDA sees. `visible`: the value of CUDA_VISIBLE_DEVICES that shows a process only this GPU."""

    name: str
    uuid: str
    visible: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """A selected GPU. `label` names it in workers' names and logs."""

    label: str
    visible: str


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA sees, in its order. Raises Failure if the driver cannot be asked."""
    argv = [sys.executable, "-I", "-S", str(CUDA_DEVICES)]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=ANSWER_S, env=dict(environment))
        devices = json.loads(ran.stdout)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"--gpus: CUDA's driver did not answer within {ANSWER_S:g} s; see nvidia-smi") from error
    except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise Failure(f"--gpus: asking CUDA's driver failed: {error}") from error
    if isinstance(devices, dict):
        raise Failure(f"--gpus needs NVIDIA's driver: {devices['error']}")
    # A process that sees two of eight GPUs passes them on by the names in its own CUDA_VISIBLE_DEVICES.
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(k) for k in range(len(devices))] if visible is None else [part.strip() for part in visible.split(",")]
    return [Gpu(device["name"], device["uuid"], name) for device, name in zip(devices, names, strict=False)]


def choose(selection: str, here: Sequence[Gpu]) -> tuple[Chosen, ...]:
    """The GPUs that `--gpus` names: `all`, or numbers, UUIDs (or their beginnings) and MIG names, with commas.

    Raises Failure for a GPU that does not exist or is named twice, and for other text.
    """
    there = f"this machine has {len(here)}" + (f", numbered from 0 to {len(here) - 1}" if here else "")
    if selection.strip() == "all":
        if not here:
            raise Failure("--gpus all: CUDA sees no GPU on this machine")
        return tuple(Chosen(f"gpu{k}", gpu.visible) for k, gpu in enumerate(here))
    chosen: dict[str, Chosen] = {}
    for part in map(str.strip, selection.split(",")):
        if part.isascii() and part.isdecimal():
            number = int(part)
            if number >= len(here):
                raise Failure(f"--gpus has {part}; {there}")
            choice = Chosen(f"gpu{number}", here[number].visible)
        elif part.startswith("MIG-"):  # a part of a GPU, which CUDA shows only to processes that name it
            choice = Chosen(part, part)
        elif part.startswith("GPU-"):
            choice = _by_uuid(part, here)
        else:
            raise Failure(
                f"--gpus has {part!r}; it takes all, or numbers, GPU-... and MIG-... names, as in 0,1 ({there})"
            )
        if choice.visible in chosen:
            raise Failure(f"--gpus names {choice.label} twice; each GPU gets one worker")
        chosen[choice.visible] = choice
    return tuple(chosen.values())


def _by_uuid(part: str, here: Sequence[Gpu]) -> Chosen:
    """The GPU whose UUID begins with `part`, as CUDA matches it. Raises Failure unless exactly one does."""
    matches = [k for k, gpu in enumerate(here) if gpu.uuid.lower().startswith(part.lower())]
    if len(matches) != 1:
        those = ", ".join(gpu.uuid for gpu in here) or "none"
        reason = "is no GPU of this machine" if not matches else f"matches {len(matches)} GPUs of this machine"
        raise Failure(f"--gpus has {part}, which {reason}; it has {those}")
    return Chosen(f"gpu{matches[0]}", here[matches[0]].visible)


def programs(
    gpus: Sequence[Chosen], argv: Sequence[str], env: Mapping[str, str], name: str, ports: Sequence[int | None]
) -> list[Program]:
    """One worker program for each GPU: `argv` with the worker's own name and health port added."""
    worker_programs = []
    for gpu, port in zip(gpus, ports, strict=True):
        port_options = [] if port is None else ["--health-port", str(port)]
        env = {**env, "CUDA_VISIBLE_DEVICES": gpu.visible}
        worker_programs.append(Program(gpu.label, [*argv, *port_options, "--name", f"{name}.{gpu.label}"], env))
    return worker_programs


async def supervise(programs: Sequence[Program], say: Say, drain: float) -> int:
    """Run the programs until all are stopped or given up. Returns the exit status.

    On SIGTERM, SIGINT or SIGHUP the workers drain for at most `drain` seconds. On SIGQUIT, or a second signal of any
    kind, they hand their tasks back at once. A third signal kills them.
    """
    received = signal_queue()
    fleet = _Fleet(programs, say)
    try:
        await fleet.start()
        return await _until_all_end(fleet, received, drain)
    finally:
        await fleet.close()


async def _until_all_end(fleet: _Fleet, received: asyncio.Queue[signal.Signals], drain: float) -> int:
    ended = asyncio.gather(*(child.keeper for child in fleet.children if child.keeper is not None))
    signals, killed, limit = 0, False, None
    next_signal = asyncio.create_task(received.get())
    while True:
        await asyncio.wait((ended, next_signal), timeout=limit, return_when="FIRST_COMPLETED")
        if ended.done():
            next_signal.cancel()
            return Exit.INTERRUPTED if killed else fleet.worst()
        if next_signal.done():
            signals += 1
            sig, next_signal = next_signal.result(), asyncio.create_task(received.get())
            at_once = sig is signal.SIGQUIT or signals > 1
            if signals > 2:
                fleet.order(signal.SIGKILL, f"{sig.name} again: killing the workers")
                killed = True
            elif at_once:
                fleet.order(signal.SIGQUIT, f"{sig.name}: the workers hand back what they run, and stop")
                limit = HAND_BACK_S
            else:
                fleet.order(signal.SIGTERM, f"{sig.name}: the workers drain, for at most {drain:g} s")
                limit = drain + HAND_BACK_S
        else:
            fleet.order(signal.SIGKILL, f"not stopped within {limit:g} s: killing the workers that are left")
            killed, limit = True, None


class _Fleet:
    """The child processes."""

    def __init__(self, programs: Sequence[Program], say: Say) -> None:
        self._say = say
        self._ordered: list[int] = []
        self._told_ready = False
        self.children = [self._child(program) for program in programs]

    def _child(self, program: Program) -> Child:
        child = Child(replace(program, notifies=True), self._say)
        child.restart = True
        child.give_up = lambda status, deaths: self._hopeless(child, status, deaths)
        child.on_serve = lambda: self._on_serve(child)
        return child

    async def start(self) -> None:
        """Start all children. Raises OSError if one cannot be run."""
        for child in self.children:
            await child.start()

    def order(self, sig: signal.Signals, why: str) -> None:
        """Send a signal to all children, also to those in a pause before a restart."""
        self._say("worker", why)
        self._ordered.append(-sig)
        for child in self.children:
            child.order(sig)

    def worst(self) -> int:
        """The worst exit status. Death by our own signal counts as 0; death by another signal as a failure."""
        statuses = [child.keeper.result() for child in self.children if child.keeper is not None]
        return max(0 if status in self._ordered else Exit.TASK_FAILED if status < 0 else status for status in statuses)

    async def close(self) -> None:
        """Kill the children that still run."""
        await asyncio.gather(*(child.stop(0.0, signal.SIGKILL) for child in self.children))

    def _on_serve(self, child: Child) -> None:
        self._say(child.program.name, f"serves (process {child.pid})")
        if all(sibling.served for sibling in self.children) and not self._told_ready:
            self._told_ready = True
            notify_ready()

    def _hopeless(self, child: Child, status: int, deaths: int) -> str | None:
        if status == 0:
            return STAYS_STOPPED
        if status == Exit.REFUSED:
            return None if child.served else "it was refused and would be refused again: given up"
        if deaths >= MOST_DEATHS:
            return f"death {deaths} in a row without {WELL_S:g} s of service between: given up, see its last output"
        return None
