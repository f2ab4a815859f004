"""The real engine on a device that can be made to fail: a factory for worker processes (`engine_factory`).

The file named by DEVICE_FAULT says what it does from the next step on, and is looked at before each: `lost`, as CUDA
after an illegal access, whose error every later call of that process has; `ecc`, the same for memory that could not be
corrected; `nan`, a weight that is NaN from then on; `room N`, memory for steps of so many tokens;
`fail`, an error in each step, though the device lives; `slow S`: so many seconds more for each step;
`hold`, nothing until it says something else; empty, or no file: it works. DEVICE_STEP_S: a pause before each step, s.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import engine.engine
from engine.engine import check_alive
from engine.plan import StepPlan
from workers.runtime.worker import load_engine

ERRORS = {
    "lost": "CUDA error: an illegal memory access was encountered",
    "ecc": "CUDA error: uncorrectable ECC error encountered",
}


class FailingDevice:
    """In the place of the engine's executor, before which every step passes."""

    def __init__(self, executor: Any, weight: torch.Tensor) -> None:
        self._executor = executor
        self._weight = weight
        self._fault = Path(os.environ["DEVICE_FAULT"])
        self._pause = float(os.environ.get("DEVICE_STEP_S", "0"))
        self._error: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, plan: StepPlan) -> Any:
        time.sleep(self._pause)
        while (said := self._fault.read_text() if self._fault.exists() else "") == "hold":
            time.sleep(0.02)
        what, _, amount = said.partition(" ")
        self._error = self._error or ERRORS.get(what)
        if what == "nan":
            self._weight.fill_(float("nan"))
        self.synchronize()
        if what == "fail":
            raise RuntimeError("a fault of the device")
        if what == "slow":
            time.sleep(float(amount))
        if what == "room" and plan.num_tokens > int(amount):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {plan.num_tokens} MiB")
        return self._executor.launch(plan)

    def synchronize(self, device: Any = None) -> None:
        """What torch.cuda.synchronize says."""
        if self._error is not None:
            raise RuntimeError(self._error)


def load(model: str, options: dict[str, Any]) -> tuple[Any, dict[str, bytes]]:
    """As `workers.runtime.worker.load_engine`. The engine asks whether its device lives as it asks a GPU."""
    made, files = load_engine(model, options)
    pipeline = made._pipeline
    device = pipeline._executor = FailingDevice(pipeline._executor, made._model._norm.weight)
    torch.cuda.synchronize = device.synchronize
    engine.engine.check_alive = lambda _: check_alive(torch.device("cuda", 0))
    return made, files
