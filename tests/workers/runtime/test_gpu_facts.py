"""What the driver says of a GPU is told in base units; without one, nothing is, and nobody waits for it."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.waiting import PATIENCE_S
from workers.runtime import gpu_facts
from workers.runtime.gpu_facts import GpuFacts, open_nvml, read

pynvml = pytest.importorskip("pynvml")
UUID = "a0000000-0000-0000-0000-0000000000ff"
NOT_FOUND, NOT_SUPPORTED, LOST = 6, 3, 15

#: An H200 at work: what libnvidia-ml's functions write where their last argument points to, the kind being before it.
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": {"total": 150_754_820_096, "used": 128_000_000_000},
    "nvmlDeviceGetUtilizationRates": {"gpu": 97},
    "nvmlDeviceGetTemperature": {"value": 61},
    "nvmlDeviceGetPowerUsage": {"value": 654_321},
    "nvmlDeviceGetTotalEnergyConsumption": {"value": 987_654_321},
    "nvmlDeviceGetEnforcedPowerLimit": {"value": 700_000},
    "nvmlDeviceGetClockInfo": lambda kind: {"value": {1: 1830, 2: 3201}[kind.value]},
    "nvmlDeviceGetCurrentClocksEventReasons": {"value": 0x1 | 0x4 | 0x40},  # idle (no fault), power cap, too hot
    "nvmlDeviceGetTotalEccErrors": lambda kind, since_start: {"value": {0: 12, 1: 1}[kind.value + since_start.value]},
}


class Library:
    """libnvidia-ml as ctypes has it, below NVIDIA's own binding. `missing` are functions that say that they are not
    supported, `broken` ones that the GPU fell off the bus."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.broken: set[str] = set()
        self.name = f"GPU-{UUID}"

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name in self.broken | self.missing:
                return LOST if name in self.broken else NOT_SUPPORTED
            if name == "nvmlDeviceGetHandleByUUID":
                return 0 if arguments[0].value == self.name.encode() else NOT_FOUND
            if name == "nvmlDeviceGetName":
                arguments[1].value = b"NVIDIA H200"
            if (found := ANSWERS.get(name)) is not None:
                *kinds, place = arguments[1:]
                for field, value in (found(*kinds) if callable(found) else found).items():
                    setattr(place._obj, field, value)
            return 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(pynvml, "nvmlLib", made)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return made


WHOLE = {
    "name": "NVIDIA H200",
    "uuid": UUID,
    "memory_bytes": 150_754_820_096,
    "memory_used_bytes": 128_000_000_000,
    "utilization_ratio": 0.97,
    "temperature_celsius": 61,
    "power_watts": 654.321,
    "energy_joules": 987_654.321,
    "power_limit_watts": 700.0,
    "sm_clock_hertz": 1_830_000_000,
    "memory_clock_hertz": 3_201_000_000,
    "slowed_by": ["power_cap", "hardware_thermal"],
    "ecc_corrected": 12,
    "ecc_uncorrected": 1,
}


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_facts_are_in_base_units_and_those_that_a_gpu_does_not_have_are_left_out(library: Library, kind: str) -> None:
    library.name = f"{kind}-{UUID}"
    look = open_nvml(UUID)
    assert look is not None
    assert look() == WHOLE
    json.dumps(look())
    library.missing = {"nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerUsage"}
    gone = {"ecc_corrected", "ecc_uncorrected", "power_watts"}
    assert look() == {name: value for name, value in WHOLE.items() if name not in gone}


def test_facts_are_not_half_told_where_the_gpu_is_lost(library: Library) -> None:
    library.broken = {"nvmlDeviceGetTemperature"}
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID}"), UUID)


def test_without_driver_or_package_there_are_none_and_one_line_for_debugging_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "workers.runtime.gpu_facts")
    if open_nvml(UUID) is not None:
        pytest.skip("this machine has NVIDIA's driver, and a GPU of that UUID")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml(UUID) is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 2
    assert "No figures of the GPU" in caplog.text
    assert "penstock[gpu]" in caplog.text


def looked_at(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any], device: str = "cuda") -> GpuFacts:
    """The thread's facts, with this in place of a look at the driver."""
    monkeypatch.setattr(gpu_facts, "PERIOD_S", 0.001)
    monkeypatch.setattr(gpu_facts, "_uuid", lambda device: UUID)
    monkeypatch.setattr(gpu_facts, "open_nvml", lambda uuid: look)
    facts = GpuFacts(device)
    facts.start()
    return facts


def test_without_a_gpu_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    facts = looked_at(monkeypatch, lambda: asked.append("look"), "cpu")
    facts.join(PATIENCE_S)
    assert (facts.is_alive(), facts.latest, asked) == (False, None, [])


def test_it_goes_on_after_trouble_tells_of_it_once_and_keeps_nothing_stale(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Any] = [{"n": 1}, OSError("lost"), OSError("lost"), {"n": 2}, OSError("again")]
    seen, begun = list[Any](), threading.Event()

    def look() -> Any:
        begun.wait(PATIENCE_S)
        seen.append(facts.latest)
        if not looks:
            facts.stop()
        elif isinstance(one := looks.pop(0), Exception):
            raise one
        else:
            return one

    facts = looked_at(monkeypatch, look)
    begun.set()
    facts.join(PATIENCE_S)
    assert seen == [None, {"n": 1}, None, None, {"n": 2}, None]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["NVML says nothing of the GPU: lost", "NVML says nothing of the GPU: again"]


def test_it_keeps_nobody_waiting_where_the_driver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        answer.wait(PATIENCE_S)

    facts = looked_at(monkeypatch, hang)
    assert asked.wait(PATIENCE_S)
    assert facts.latest is None
    facts.stop()
    assert facts.daemon  # the process can end all the same
    answer.set()
    facts.join(PATIENCE_S)
