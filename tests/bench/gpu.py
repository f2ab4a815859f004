"""Times of single operations on a GPU, for the benches of attention and of the other kernels."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.roofline import speed_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Bytes of inputs to go through before one is read again: several times an H200's L2.
_COLD = 400 << 20
_REPLAYS = 20


def arguments(doc: str | None) -> argparse.Namespace:
    """The command line's. Exits with 2 where there is no CUDA device and `--tiny` was not asked for."""
    speed = (speed_of(torch.cuda.get_device_name()) if DEVICE.type == "cuda" else None) or speed_of("H200")
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=speed.bytes_per_s / 1e12, help="TB/s")
    parser.add_argument("--tflops", type=float, default=speed.flops_per_s / 1e12, help="of bf16")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--tiny", action="store_true", help="so small that a CPU does it: to see that it works")
    args = parser.parse_args()
    if DEVICE.type == "cpu":
        if not args.tiny:
            parser.exit(2, "there is no CUDA device to measure on; --tiny tries the bench on a CPU\n")
        torch.set_num_threads(1)
        from tests.engine import interpreter  # noqa: F401 - mends Triton's, in which kernels run here
    return args


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU"


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def copies(size: int) -> int:
    """The number of inputs of `size` bytes that together are several times L2."""
    return min(max(-(-_COLD // size), 2), 64) if DEVICE.type == "cuda" else 2


def median_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one call, replayed as a CUDA graph. On a CPU those of a single call, by the clock."""
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # who makes the inputs
    with torch.cuda.stream(stream):
        run()  # compiles, and allocates what is kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
