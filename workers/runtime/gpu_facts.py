"""Reads the state of this worker's GPU from the driver, for its lease (NVML, through nvidia-ml-py).

A thread of its own asks: a driver in trouble may not answer for long, and no lease must wait for it. Without the
package, the driver or a GPU there are no facts, and a line in the debug log says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

#: Seconds between two looks.
PERIOD_S: Final = 2.0
#: nvml.h, nvmlClocksEventReasons: what keeps the clocks down. Being idle does too, and is no fault.
SLOWED_BY: Final = {
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "software_thermal",
    0x040: "hardware_thermal",
    0x080: "power_brake",
}

Facts = dict[str, Any]


class GpuFacts(threading.Thread):
    """Reads the GPU every PERIOD_S seconds once it is started. `latest` is the last result, None if there is none."""

    def __init__(self, device: str) -> None:
        """`device`: where the engine computes, as torch names it."""
        super().__init__(name="gpu-facts", daemon=True)
        self._device = device
        self._stopping = threading.Event()
        self.first: Facts | None = None
        """The first result, with which counters are compared."""
        self.latest: Facts | None = None
        self.read_at = 0.0
        """When `latest` was read (monotonic)."""

    def reading(self) -> tuple[float, Facts] | None:
        """The last result and when it was read. Any thread."""
        at, facts = self.read_at, self.latest
        return None if facts is None else (at, facts)

    def run(self) -> None:
        if not self._device.startswith("cuda"):
            return
        look = open_nvml(_uuid(self._device))
        failing = False
        while look is not None and not self._stopping.is_set():
            try:
                facts = look()
                if self.first is None:
                    self.first = facts
                self.latest, self.read_at, failing = facts, time.monotonic(), False
            except Exception as error:  # noqa: BLE001  # a driver in trouble is told of, and asked again
                self.latest = None
                if not failing:
                    logger.warning("NVML says nothing of the GPU: %s", error)
                failing = True
            self._stopping.wait(PERIOD_S)

    def stop(self) -> None:
        """End soon. It may be waiting for the driver, so nobody should join it."""
        self._stopping.set()


def open_nvml(uuid: str) -> Callable[[], Facts] | None:
    """Returns a function that reads the GPU with this UUID (or part of one, under MIG); None without driver or GPU."""
    try:
        import pynvml
    except ImportError:
        logger.debug("No figures of the GPU: nvidia-ml-py is not installed; it comes with penstock[gpu]")
        return None
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml, uuid)
    except pynvml.NVMLError as error:
        logger.debug("No figures of the GPU: %s", error)
        return None
    return lambda: read(pynvml, handle, uuid)


def read(nvml: Any, handle: Any, uuid: str) -> Facts:
    """Reads facts in base units, but those that this GPU, its driver or our rights withhold. Raises NVMLError."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    facts: Facts = {"uuid": uuid, "memory_bytes": memory.total, "memory_used_bytes": memory.used}
    missing = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION)
    for name, query in FACTS.items():
        try:
            facts[name] = query(nvml, handle)
        except nvml.NVMLError as error:
            if error.value not in missing:
                raise
    return facts


def _slowed_by(nvml: Any, handle: Any) -> list[str]:
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [name for bit, name in SLOWED_BY.items() if reasons & bit]


def _errors(nvml: Any, handle: Any, kind: int) -> int:
    """ECC errors since the driver was loaded."""
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


#: Fact -> how NVML is asked for it.
FACTS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "name": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    "utilization_ratio": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "energy_joules": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    "power_limit_watts": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "sm_clock_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1_000_000,
    "memory_clock_hertz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1_000_000,
    "slowed_by": _slowed_by,
    "ecc_corrected": lambda nvml, gpu: _errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda nvml, gpu: _errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
}


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError_NotFound:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
