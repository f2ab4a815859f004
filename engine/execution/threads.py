"""How many threads a CPU's products are shared among where nobody says: as many as there are cores to run them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("penstock.engine")

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def threads_for(asked: int | None) -> int:
    """`asked`, or torch's own count (the cores that the process may run on), but no more than a container's limit of
    processor time has whole cores: threads beyond it are held up in the middle of a step, and all wait for them."""
    if asked is not None:
        if asked > (room := threads_of_each(1)):
            logger.warning(
                "%d threads were asked for, and there is processor time for %d: in each step they wait for those that "
                "are held up",
                asked,
                room,
            )
        return asked
    # Not at the top: who starts several workers asks for their share, and has no use for torch.
    import torch

    return _within_limit(torch.get_num_threads())


def threads_of_each(processes: int) -> int:
    """For each of so many processes on this machine: the cores that this one may run on, shared out, within the same
    limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, _within_limit(cores) // processes)


def _within_limit(most: int) -> int:
    limit = _limit()
    return most if limit is None else max(1, min(most, int(limit)))


def _limit(own: Path = _OWN, root: Path = _CGROUPS) -> float | None:
    """Cores' worth of time that the process's control groups (version 2) leave it; None where they set no limit."""
    try:
        path = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), None)
    except OSError:
        return None
    if path is None:
        return None
    group = root / path.lstrip("/")
    limits = []
    for one in (group, *group.parents):
        if one != root and root not in one.parents:
            break
        try:
            quota, period = (one / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            limits.append(int(quota) / int(period))
    return min(limits, default=None)
