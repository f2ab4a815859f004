"""The kind of machine that a worker computes on: times of steps are compared between equal kinds only."""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def kind_of(device: str) -> str:
    """`device`: where the engine computes, as torch names it. A GPU's name, or the CPU's with the number of its cores
    that this process may use; of a CPU that nobody names, the cores alone."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu()} x {cores}"


def _cpu() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
