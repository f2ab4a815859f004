"""`--gpus`: lists this machine's GPUs and selects those that workers get, one each."""

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
    """A selected GPU. `label` names it in workers' names and logs."""

    label: str
    visible: str


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that CUDA sees, in its order. Raises Failure if the driver cannot be asked."""
    argv = [sys.executable, "-I", "-S", str(CUDA_DEVICES)]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=ANSWER_S, env=dict(environment))
        found = json.loads(ran.stdout)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"--gpus: CUDA's driver did not answer within {ANSWER_S:g} s; see nvidia-smi") from error
    except (subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise Failure(f"--gpus: asking CUDA's driver failed: {error}") from error
    if isinstance(found, dict):
        raise Failure(f"--gpus needs NVIDIA's driver: {found['error']}")
    # A process that sees two of eight GPUs passes them on by the names in its own CUDA_VISIBLE_DEVICES.
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(k) for k in range(len(found))] if given is None else [one.strip() for one in given.split(",")]
    return [Gpu(one["name"], one["uuid"], name) for one, name in zip(found, names, strict=False)]


def choose(asked: str, here: Sequence[Gpu]) -> tuple[Chosen, ...]:
    """The GPUs that `--gpus` names: `all`, or numbers, UUIDs (or their beginnings) and MIG names, with commas.

    Raises Failure for a GPU that does not exist or is named twice, and for other text.
    """
    there = f"this machine has {len(here)}" + (f", numbered from 0 to {len(here) - 1}" if here else "")
    if asked.strip() == "all":
        if not here:
            raise Failure("--gpus all: CUDA sees no GPU on this machine")
        return tuple(Chosen(f"gpu{k}", gpu.visible) for k, gpu in enumerate(here))
    chosen: dict[str, Chosen] = {}
    for part in map(str.strip, asked.split(",")):
        if part.isascii() and part.isdecimal():
            number = int(part)
            if number >= len(here):
                raise Failure(f"--gpus has {part}; {there}")
            one = Chosen(f"gpu{number}", here[number].visible)
        elif part.startswith("MIG-"):  # a part of a GPU, which CUDA shows only to processes that name it
            one = Chosen(part, part)
        elif part.startswith("GPU-"):
            one = _by_uuid(part, here)
        else:
            raise Failure(
                f"--gpus has {part!r}; it takes all, or numbers, GPU-... and MIG-... names, as in 0,1 ({there})"
            )
        if one.visible in chosen:
            raise Failure(f"--gpus names {one.label} twice; each GPU gets one worker")
        chosen[one.visible] = one
    return tuple(chosen.values())


def _by_uuid(part: str, here: Sequence[Gpu]) -> Chosen:
    """The GPU whose UUID begins with `part`, as CUDA matches it. Raises Failure unless exactly one does."""
    found = [k for k, gpu in enumerate(here) if gpu.uuid.lower().startswith(part.lower())]
    if len(found) != 1:
        those = ", ".join(gpu.uuid for gpu in here) or "none"
        what = "is no GPU of this machine" if not found else f"matches {len(found)} GPUs of this machine"
        raise Failure(f"--gpus has {part}, which {what}; it has {those}")
    return Chosen(f"gpu{found[0]}", here[found[0]].visible)
