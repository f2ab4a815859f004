"""Breaks the time of steps down by kinds of kernels, with torch's profiler."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from infra.gpu.steps import Steps

#: Patterns for the names of kernels (on a CPU, of operations). The first match decides.
PARTS = {
    "attention": r"^attend|^join|attention|attn|flash|fmha",
    "adapters": r"^low_rank",
    "norm": r"norm",
    "rope and cache": r"rope|index_copy|roll",
    "activation": r"gated|silu|gelu",
    "sampling": r"sampling|argmax|topk|sort|softmax",
    "dense": r"gemm|gemv|cutlass|cublas|nvjet|xmma|one_row|addmm|aten::mm|matmul|linear|int[48]|^sum_kernel|quantise",
    "inputs": r"^fill$",
    "copies": r"memcpy|memset|copy|fill",
}


def part_of(name: str) -> str:
    low = name.lower()
    return next((part for part, pattern in PARTS.items() if re.search(pattern, low)), "other")


def _activity() -> ProfilerActivity:
    return ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU


def load_profiler() -> None:
    """Use the profiler once, before there is an engine: its library must first be used by the thread that loaded it,
    and not while another thread records a CUDA graph."""
    with profile(activities=[_activity()]):
        pass


@contextmanager
def profiled(steps: Steps, count: int) -> Iterator[dict[str, Any]]:
    """A context that yields a dict and fills it with the milliseconds a step of each part, over `count` pure decode
    steps. Call `load_profiler` before.

    The profiler is started and stopped on the engine's thread, because on a CPU it only sees that thread's operations.
    """
    cuda = torch.cuda.is_available()
    profiler = profile(activities=[_activity()])
    state = {"seen": 0, "began": 0.0, "took": 0.0}

    def on_step() -> None:
        if not steps.decoding or state["took"]:
            return
        if state["seen"] == 4:  # skip the first few steps, which do one-time work
            profiler.start()
            state["began"] = time.perf_counter()
        state["seen"] += 1
        if state["seen"] == 5 + count:
            if cuda:
                torch.cuda.synchronize()
            state["took"] = time.perf_counter() - state["began"]
            profiler.stop()

    found: dict[str, Any] = {}
    steps.on_step = on_step
    yield found
    if not state["took"]:
        raise RuntimeError(f"only {state['seen']} steps were seen")
    parts, kernels = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in profiler.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        parts[part_of(event.key)] += spent / 1e3 / count
        kernels[event.key] += spent / 1e3 / count
    busy = sum(parts.values())
    found |= {
        "steps": count,
        "step_ms": state["took"] * 1e3 / count,
        "parts_ms": dict(sorted(parts.items(), key=lambda one: -one[1])),
        "busy_ms": busy,
        "longest_kernels_ms": dict(sorted(kernels.items(), key=lambda one: -one[1])[:25]),
    }
