"""Picks the number of CPU threads: one for each core, within the container's limit of processor time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("penstock.engine")

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")


def threads_for(requested: int | None, available: int) -> int:
    """The number of threads: `requested`, or `available`: torch's own count (the cores that the process may run on).

    That is limited to the whole cores of the container's limit of processor time. Threads beyond it would be throttled
    in the middle of a step, and all others would wait for them.
    """
    if requested is not None:
        if requested > (room := threads_of_each(1)):
            logger.warning(
                "%d threads were asked for, and there is processor time for %d: in each step they wait for those that "
                "are held up",
                requested,
                room,
            )
        return requested
    return _within_limit(available)


def threads_of_each(processes: int) -> int:
    """The number of threads for each of `processes` processes: the cores that this process may run on, within the
    container's limit, divided among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, _within_limit(cores) // processes)


@contextmanager
def on_nodes_of(rank: int, ranks: int, nodes: Path = _NODES) -> Iterator[None]:
    """Keep this thread, and those that it starts, to the NUMA nodes of its rank's part of the cores. So the memory that
    they touch first is near them, too. With one node nothing is done."""
    before = os.sched_getaffinity(0)
    cores = [sorted(_cores(node) & before) for node in sorted(nodes.glob("node[0-9]*"), key=_number)]
    ordered = [core for node in cores for core in node]
    share = set(ordered[len(ordered) * rank // ranks : len(ordered) * (rank + 1) // ranks])
    if len(list(filter(None, cores))) < 2 or not share:
        yield
        return
    os.sched_setaffinity(0, {core for node in cores if share & set(node) for core in node})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _number(node: Path) -> int:
    return int(node.name.removeprefix("node"))


def _cores(node: Path) -> set[int]:
    """The cores of a node, such as 0-3,8-11."""
    try:
        spans = [part.split("-") for part in (node / "cpulist").read_text().split(",") if part.strip()]
    except OSError:
        return set()
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}


def _within_limit(available: int) -> int:
    limit = _limit()
    return available if limit is None else max(1, min(available, int(limit)))


def _limit(own_group: Path = _OWN_GROUP, root: Path = _CGROUPS) -> float | None:
    """The processor time, in cores, that the process's control groups (version 2) allow. None if they set no limit."""
    try:
        path = next((line[3:] for line in own_group.read_text().splitlines() if line.startswith("0::")), None)
    except OSError:
        return None
    if path is None:
        return None
    group = root / path.lstrip("/")
    limits = []
    for directory in (group, *group.parents):
        if directory != root and root not in directory.parents:
            break
        try:
            quota, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            limits.append(int(quota) / int(period))
    return min(limits, default=None)
