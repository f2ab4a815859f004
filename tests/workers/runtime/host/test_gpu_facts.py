"""What the driver says of a GPU is told in base units; without one, nothing is, and nobody waits for it."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from workers.runtime.host import gpu_facts
from workers.runtime.host.gpu_facts import GpuFacts, open_nvml, read

pynvml = pytest.importorskip("pynvml")
UUID = "a0000000-0000-0000-0000-0000000000ff"
NOT_FOUND, NOT_SUPPORTED, LOST = 6, 3, 15


class Library:
    """libnvidia-ml as ctypes has it, below NVIDIA's own binding: answers of an H200 at work. `missing` are functions
    that say that they are not supported, `broken` ones that the GPU fell off the bus."""

    def __init__(self, *, mig: bool = False) -> None:
        self.missing: set[str] = set()
        self.broken: set[str] = set()
        self.mig = mig

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answer = getattr(self, f"_{name}")

        def call(*arguments: Any) -> int:
            status: int | None = LOST if name in self.broken else NOT_SUPPORTED if name in self.missing else None
            return answer(*arguments) or 0 if status is None else status

        return call

    def _nvmlInitWithFlags(self, flags: int) -> None:
        pass

    def _nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        return 0 if uuid.value == f"{'MIG' if self.mig else 'GPU'}-{UUID}".encode() else NOT_FOUND

    def _nvmlDeviceGetName(self, handle: Any, name: Any, length: Any) -> None:
        name.value = b"NVIDIA H200"

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        memory._obj.total, memory._obj.used = 150_754_820_096, 128_000_000_000

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:
        rates._obj.gpu = 97

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, degrees: Any) -> None:
        degrees._obj.value = 61

    def _nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> None:
        milliwatts._obj.value = 654_321

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, milliwatts: Any) -> None:
        milliwatts._obj.value = 700_000

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, megahertz: Any) -> None:
        megahertz._obj.value = {1: 1830, 2: 3201}[kind.value]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, reasons: Any) -> None:
        reasons._obj.value = 0x1 | 0x4 | 0x40  # idle (no fault), power cap, too hot

    def _nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, count: Any) -> None:
        assert counter.value == 0  # since the driver was loaded
        count._obj.value = {0: 12, 1: 1}[kind.value]


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
    "power_limit_watts": 700.0,
    "sm_clock_hertz": 1_830_000_000,
    "memory_clock_hertz": 3_201_000_000,
    "slowed_by": ["power_cap", "hardware_thermal"],
    "ecc_corrected": 12,
    "ecc_uncorrected": 1,
}


class TestFacts:
    def test_are_in_base_units(self, library: Library) -> None:
        look = open_nvml(UUID)
        assert look is not None
        assert look() == WHOLE
        json.dumps(look())

    def test_that_a_gpu_does_not_have_are_left_out(self, library: Library) -> None:
        look = open_nvml(UUID)
        assert look is not None
        library.missing = {"nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerUsage"}
        gone = {"ecc_corrected", "ecc_uncorrected", "power_watts"}
        assert look() == {name: value for name, value in WHOLE.items() if name not in gone}

    def test_of_a_part_of_a_gpu_are_its_own(self, library: Library) -> None:
        library.mig = True
        look = open_nvml(UUID)
        assert look is not None
        assert look()["uuid"] == UUID

    def test_are_not_half_told_where_the_gpu_is_lost(self, library: Library) -> None:
        library.broken = {"nvmlDeviceGetTemperature"}
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID}"), UUID)


class TestWithout:
    def test_a_driver_there_are_none_and_one_line_for_debugging(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "workers.runtime.host.gpu_facts")
        if open_nvml(UUID) is not None:
            pytest.skip("this machine has NVIDIA's driver, and a GPU of that UUID")
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        assert "No figures of the GPU" in caplog.text

    def test_the_package_there_are_none(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "workers.runtime.host.gpu_facts")
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert open_nvml(UUID) is None
        assert "penstock[gpu]" in caplog.text

    def test_a_gpu_nobody_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr(gpu_facts, "open_nvml", lambda uuid: asked.append(uuid))
        facts = GpuFacts("cpu")
        facts.start()
        facts.join(10)
        assert (facts.latest, asked) == (None, [])


class TestThread:
    @pytest.fixture
    def looks(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What one look after the other gives or raises; when there are no more, the thread's test is over."""
        given: list[Any] = []
        monkeypatch.setattr(gpu_facts, "PERIOD_S", 0.001)
        monkeypatch.setattr(gpu_facts, "_uuid", lambda device: UUID)
        return given

    def run(self, looks: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        facts, seen = GpuFacts("cuda"), []

        def look() -> Any:
            seen.append(facts.latest)
            if not looks:
                facts.stop()
                return None
            one = looks.pop(0)
            if isinstance(one, Exception):
                raise one
            return one

        monkeypatch.setattr(gpu_facts, "open_nvml", lambda uuid: look)
        facts.start()
        facts.join(60)
        assert not facts.is_alive()
        return seen

    def test_goes_on_after_trouble_tells_of_it_once_and_keeps_nothing_stale(
        self, looks: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        looks += [{"n": 1}, OSError("lost"), OSError("lost"), {"n": 2}, OSError("again")]
        assert self.run(looks, monkeypatch) == [None, {"n": 1}, None, None, {"n": 2}, None]
        assert [record.getMessage() for record in caplog.records] == [
            "NVML says nothing of the GPU: lost",
            "NVML says nothing of the GPU: again",
        ]

    def test_keeps_nobody_waiting_where_the_driver_does_not_answer(
        self, looks: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, answer = threading.Event(), threading.Event()

        def hang() -> Any:
            asked.set()
            answer.wait(60)

        monkeypatch.setattr(gpu_facts, "open_nvml", lambda uuid: hang)
        facts = GpuFacts("cuda")
        facts.start()
        assert asked.wait(60)
        assert facts.latest is None
        facts.stop()
        assert facts.daemon  # the process can end all the same
        answer.set()
        facts.join(60)
