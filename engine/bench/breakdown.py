"""Breaks the time of a step down into parts, with timers put around an engine's parts from outside.

Host times are those of the thread that runs steps. Each part excludes the parts within it. On CUDA a second run,
without graphs, gives the device's times: events around every kernel class, recorded while the device is held up, so
that no gap between launches counts as work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.engine import Engine
from engine.execution.device import DeviceRunner
from engine.execution.runner import Runner
from engine.kernels import Kernels, PreparedLinear
from engine.kernels.layer import DenseProduct
from engine.kernels.native.product import PackedProduct
from engine.plan import StepPlan

#: Maps the operations of a kernel set to kernel classes.
KERNELS = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "norm_heads": "norm",
    "rope": "rope and cache",
    "write_kv": "rope and cache",
    "rope_and_write": "rope and cache",
    "silu_mul": "gate",
    "gelu_tanh_mul": "gate",
    "paged_attention": "attention",
}
#: The part whose operations are not timed separately.
_WHOLE = "logits"
#: The cycles for which the device is held up before a step whose kernels are timed: some 50 ms.
_HOLD = 100_000_000


class Meter:
    """Collects the times of steps by part. Used by the thread that runs steps, and read after it is done."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: a CUDA device to time instead of the host."""
        self._device = device
        self._steps: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._now: dict[str, float] = {}
        # The open parts: name, begin, the time of the parts within it.
        self._open: list[list[Any]] = []
        # The device's events: (part, the part around it, begin, end).
        self._events: list[tuple[str, str | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._kind: str | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self._open and self._open[-1][0] == _WHOLE:
            yield
            return
        if self._device is not None:
            with self._on_device(name):
                yield
            return
        self._open.append([name, time.perf_counter(), 0.0])
        try:
            yield
        finally:
            _, began, within = self._open.pop()
            elapsed = time.perf_counter() - began
            self._now[name] = self._now.get(name, 0.0) + elapsed - within
            if self._open:
                self._open[-1][2] += elapsed

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        around = self._open[-1][0] if self._open else None
        self._open.append([name])
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.pop()
            self._events.append((name, around, begin, end))

    def around(self, target: Any, name: str, part: str) -> None:
        """Time all later calls of `target.name` as `part`."""
        inner = getattr(target, name)

        def timed(*args: Any, **more: Any) -> Any:
            with self.part(part):
                return inner(*args, **more)

        setattr(target, name, timed)

    def note_time(self, name: str, seconds: float) -> None:
        """Add a time measured elsewhere as the part `name`, within the open part."""
        self._now[name] = self._now.get(name, 0.0) + seconds
        if self._open:
            self._open[-1][2] += seconds

    def kernels(self, kernels: Kernels) -> Kernels:
        """Time every operation of a kernel set as its kernel class. Call it before a model is made with the set.

        A set that runs all layers in one call times them itself. Returns the set.
        """
        for name, part in KERNELS.items():
            self.around(kernels, name, part)
        kernels.report_time = self.note_time
        for name in ("prepare_linear", "prepare_quantised", "prepare_ordered", "prepare_fp8"):
            self._products(kernels, name)
        return kernels

    def _products(self, kernels: Kernels, name: str) -> None:
        prepare: Callable[..., PreparedLinear] = getattr(kernels, name)

        def prepared(*args: Any) -> PreparedLinear:
            run = prepare(*args)
            if isinstance(run, (PackedProduct, DenseProduct)):
                # Keep its type, which the call of all layers, or of experts, needs. Others are called one by one.
                self.around(run, "_run", "linear")
                return run

            def linear(x: Tensor) -> Tensor:
                with self.part("linear"):
                    return run(x)

            return linear

        setattr(kernels, name, prepared)

    def watch(self, engine: Engine) -> None:
        """Time the parts of an engine that is still idle."""
        pipeline = engine._pipeline
        runner = pipeline._executor
        self._step(pipeline)
        self._launch(runner)
        self.around(engine._model, "forward", "forward, rest")
        self.around(engine._model, "logits", _WHOLE)
        self.around(engine._model, "peaks", _WHOLE)
        if self._device is None:
            self.around(pipeline._scheduler, "schedule", "plan")
            self.around(pipeline._scheduler, "update", "enter")
            self.around(pipeline, "_entered", "publish")
            self.around(runner, "collect", "collect")
        if isinstance(runner, DeviceRunner):
            self.around(runner._inputs, "numbers", "upload")
            self.around(runner._inputs, "send", "upload")
            self.around(runner._inputs, "make", "inputs")
            for name in ("admit", "launch", "fetch"):
                self.around(runner._sampler, name, "sample")
            if runner.graphs is not None:
                self.around(runner.graphs, "run", "replay")
        elif isinstance(runner, Runner):
            self.around(runner._builder, "build", "upload")
            self.around(runner, "_sample", "sample")

    def _launch(self, runner: Any) -> None:
        launch = runner.launch

        def timed(plan: StepPlan) -> Any:
            self._kind = kind(plan)
            if self._device is not None:
                torch.cuda._sleep(_HOLD)
            with self.part("launch"):
                return launch(plan)

        runner.launch = timed

    def _step(self, pipeline: Any) -> None:
        step = pipeline.step

        def timed() -> Any:
            self._now, self._kind = {}, None
            if self._device is None:
                with self.part("loop"):
                    worked = step()
            else:
                worked = step()
                self._read()
            if self._kind is not None:
                self._steps[self._kind].append(self._now)
            return worked

        pipeline.step = timed

    def _read(self) -> None:
        torch.cuda.synchronize(self._device)
        for name, around, begin, end in self._events:
            elapsed = begin.elapsed_time(end) / 1e3
            self._now[name] = self._now.get(name, 0.0) + elapsed
            if around is not None:
                self._now[around] = self._now.get(around, 0.0) - elapsed
        self._events.clear()

    def forget(self) -> None:
        """Drop all times so far, for instance those of a warm-up."""
        self._steps.clear()

    def report(self) -> dict[str, Any]:
        """For each kind of step, the count and the mean milliseconds of each part."""
        report: dict[str, Any] = {}
        for kind, steps in sorted(self._steps.items()):
            parts: dict[str, float] = defaultdict(float)
            for step in steps:
                for name, elapsed in step.items():
                    parts[name] += elapsed
            by_time = sorted(parts.items(), key=lambda item: -item[1])
            report[kind] = {
                "steps": len(steps),
                "ms": 1e3 * sum(parts.values()) / len(steps),
                "parts_ms": {name: 1e3 * elapsed / len(steps) for name, elapsed in by_time},
            }
        return report


def kind(plan: StepPlan) -> str:
    """The kind of a step: `prefill` with a part of a prompt, `verify` with drafts and no prompt, else `decode`."""
    if any(row.count - len(row.draft) > 1 for row in plan.rows):
        return "prefill"
    return "verify" if any(row.draft for row in plan.rows) else "decode"


def shown(title: str, report: dict[str, Any]) -> str:
    """A report as text, with a table for each kind of step."""
    lines = []
    for kind, figures in report.items():
        lines.append(f"{title}, {kind}: {figures['ms']:.3f} ms a step, mean of {figures['steps']}")
        for name, elapsed in figures["parts_ms"].items():
            lines.append(f"  {name:16} {elapsed:9.3f} ms  {100 * elapsed / figures['ms']:5.1f}%")
    return "\n".join(lines)
