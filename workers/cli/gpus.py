"""`penstock worker --gpus`: selects GPUs of this machine, and supervises one worker process for each.

    CUDA is asked (`cuda_devices`, in a process of its own) -> `choose` selects -> `programs` -> `fleet.supervise`

Each child sees one GPU (CUDA_VISIBLE_DEVICES) and is a normal worker with its own name and lease. This process holds no
lease and no model, and loads neither torch nor the driver.

`workers.cli.supervised` says what happens when a process dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.cli.exits import Failure
from workers.processes.supervisor import Program

CUDA_DEVICES: Final = Path(__file__).with_name("cuda_devices.py")
#: Longest time for the driver's answer (s). Without persistence mode it wakes each GPU first.
ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that CUDA sees. `visible`: the value of CUDA_VISIBLE_DEVICES that shows a process only this GPU."""

    name: str
    uuid: str
    visible: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker's GPU, or several of them. `label` names them in workers' names and logs."""

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


def choose(selection: str, here: Sequence[Gpu], ranks: int = 1) -> tuple[Chosen, ...]:
    """The GPUs that `--gpus` names: `all`, or numbers, UUIDs (or their beginnings) and MIG names, with commas. Each
    `ranks` of them, in this order, are one worker's.

    Raises Failure for a GPU that does not exist or is named twice, for other text, and if `ranks` does not divide them.
    """
    gpus = _chosen(selection, here)
    if len(gpus) % ranks:
        raise Failure(
            f"--gpus names {len(gpus)} GPUs, which {ranks}, a worker's here (--tensor-parallel by "
            "--pipeline-parallel, over --nodes), does not divide"
        )
    groups = [gpus[i : i + ranks] for i in range(0, len(gpus), ranks)]
    return tuple(
        Chosen("-".join(gpu.label for gpu in group), ",".join(gpu.visible for gpu in group)) for group in groups
    )


def _chosen(selection: str, here: Sequence[Gpu]) -> tuple[Chosen, ...]:
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
