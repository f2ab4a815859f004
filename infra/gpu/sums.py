"""Measures the sums of a few rows between GPUs: by NCCL, as ranks have them, and by torch's symmetric memory, by which
they might.

Each GPU has a process. A sum is that of a decode step, of the shape of Llama 70B: [rows, 8192] in bf16, 100 of them in
a CUDA graph. `same_on_all`: whether every rank has the same bits, without which ranks could not use it. On the CPU
there is gloo alone, to test this file.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

#: The rows and width of sums, and how many there are in a graph.
ROWS, _WIDTH, _SUMS = (1, 4, 16, 64), 8192, 100


def measured(ranks: int, *, gpus: bool) -> dict[str, Any]:
    """For each way to sum, by rows: microseconds of a sum, and whether all ranks have its bits. Raises what a process
    raises."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, gpus, folder), nprocs=ranks)
        figures: dict[str, Any] = json.loads(Path(folder, "figures").read_text())
    return figures


def _rank(rank: int, ranks: int, gpus: bool, folder: str) -> None:
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if gpus:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpus else "gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    ways = {"nccl": _all_reduce, "symmetric memory": _one_shot} if gpus else {"gloo": _all_reduce}
    figures: dict[str, dict[str, Any]] = {name: {} for name in ways}
    for name, make in ways.items():
        for rows in ROWS:
            try:
                figures[name][str(rows)] = _of(make(rows, device), rows, device)
            except Exception as error:  # noqa: BLE001  # what this torch or machine lacks is a result
                figures[name]["error"] = f"{type(error).__name__}: {error}"
                break
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps(figures))
    distributed.destroy_process_group()


#: A function that adds up a tensor over all ranks, and may overwrite it.
_Sum = Callable[[Tensor], Tensor]


def _all_reduce(rows: int, device: torch.device) -> _Sum:
    def sum_of(x: Tensor) -> Tensor:
        distributed.all_reduce(x)
        return x

    return sum_of


def _one_shot(rows: int, device: torch.device) -> _Sum:
    from torch.distributed import _symmetric_memory as symmetric

    group = distributed.group.WORLD.group_name
    shared = symmetric.empty(rows, _WIDTH, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, group)

    def sum_of(x: Tensor) -> Tensor:
        shared.copy_(x)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
        return total

    return sum_of


def _of(sum_of: _Sum, rows: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x = torch.randn(rows, _WIDTH, generator=generator).to(device, torch.bfloat16)
    total = sum_of(x.clone())
    every = [torch.empty_like(total) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, total)
    zeros, run = torch.zeros_like(x), _repeated(sum_of, device)
    run(zeros)
    began = time.perf_counter()
    run(zeros)
    return {
        "us": (time.perf_counter() - began) * 1e6 / _SUMS,
        "same_on_all": all(torch.equal(each, total) for each in every),
    }


def _repeated(sum_of: _Sum, device: torch.device) -> Callable[[Tensor], None]:
    """A function that makes the sums, on a GPU from a graph, and waits."""

    def run(x: Tensor) -> None:
        for _ in range(_SUMS):
            sum_of(x)

    if device.type == "cpu":
        return run
    graphs: Final[list[torch.cuda.CUDAGraph]] = []

    def replay(x: Tensor) -> None:
        if not graphs:
            sum_of(x)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[0]):
                run(x)
        graphs[0].replay()
        torch.cuda.synchronize()

    return replay
