"""What devices draw is charged to tasks by their steps; all charges, idle time and starts are what the meter says."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers import energy
from workers.energy import EnergyAccount, NvmlMeter, ProcessorTime, RaplMeter, Reading, StatedMeter, open_meter

#: Power (W) of a device without work.
IDLE = 75.0


class Playback:
    """A meter that plays readings back, each as often as it is read before the next."""

    def __init__(self) -> None:
        self.reading: Reading | None = None

    def read(self) -> Reading | None:
        return self.reading


class Device:
    """A device whose steps draw power that changes, and its worker's account, which reads a meter every two seconds.
    What tasks are charged is summed as the engine does: at the power of the moment when a step ends."""

    def __init__(self, seed: int, now: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.meter = Playback()
        self.account = EnergyAccount(self.meter)
        self.now, self.joules, self.steps, self.charged, self.noted = now, 0.0, 0.0, 0.0, 0.0
        self.ready_at: float | None = None
        self._next = now

    def spend(self, seconds: float, watts: float, *, step: bool = False) -> None:
        until = self.now + seconds
        while self._next <= until:
            self._pass(self._next, watts, step)
            self._next += 2.0
            self.meter.reading = (self.now, self.joules)
            stepping = seconds - (until - self.now) if step else 0.0
            self.account.update(self.steps, stepping, self.ready_at)
            self.noted = self.charged  # a worker notes at least as often
        self._pass(until, watts, step)
        if step:
            self.steps += seconds
            self.charged += seconds * self.account.watts

    def _pass(self, at: float, watts: float, step: bool) -> None:
        self.joules += watts * (at - self.now)
        self.now = at

    def begin(self, seconds: float = 20.0) -> None:
        self.spend(seconds, 150.0)
        self.ready_at = self.now

    def work(self, seconds: float) -> None:
        """Steps of 5 ms to 3 s, with pauses now and then. The power of steps rises and falls."""
        until = self.now + seconds
        while self.now < until:
            watts = 350 + 250 * self.draw.random() * (1 + (self.now % 60 > 30))
            for _ in range(self.draw.randint(1, 300)):
                self.spend(self.draw.choice((0.005, 0.02, 0.05)), watts, step=True)
            if self.draw.random() < 0.2:
                self.spend(3.0, watts, step=True)
            if self.draw.random() < 0.3:
                self.spend(5 * self.draw.random(), IDLE)


@pytest.mark.parametrize("seed", range(3))
def test_what_tasks_idle_time_and_starts_are_charged_is_what_the_meter_counted(seed: int) -> None:
    """Within 2%, tasks' part by itself, too; also where the worker is killed every few minutes."""
    drawn = charged = noted = busy = states = 0.0
    now = 0.0
    for life in range(4):
        device = Device(10 * seed + life, now)
        device.begin()
        device.spend(60.0, IDLE)
        device.work(300.0)
        account = device.account
        drawn += device.joules
        states += account.starting + account.idle + account.busy
        busy += account.busy
        charged += device.charged
        noted += device.noted
        assert account.starting == pytest.approx(20 * 150, rel=0.15)
        assert account.idle > 55 * IDLE
        now = device.now
    assert states == pytest.approx(drawn, rel=0.02)
    assert charged == pytest.approx(busy, rel=0.02)
    assert noted == pytest.approx(busy, rel=0.02), "what a kill leaves in records"


def test_of_a_shared_device_what_is_drawn_in_own_steps_counts() -> None:
    meter = Playback()
    account = EnergyAccount(meter, shared=True)
    for second in range(100):
        meter.reading = (float(second), 400.0 * second)
        account.update(0.3 * second, 0.0, 0.0)
    assert account.busy == pytest.approx(99 * 0.3 * 400)
    assert account.idle == 0.0


def test_a_meter_that_cannot_be_read_for_a_while_loses_nothing() -> None:
    meter = Playback()
    account = EnergyAccount(meter)
    account.update(0.0, 0.0, None)
    for second in (0, 1, 2, 9, 10):
        meter.reading = (float(second), 100.0 * second)
        account.update(0.5 * second, 0.0, 0.0)
        meter.reading = None
        account.update(0.5 * second + 0.1, 0.0, 0.0)
    assert account.busy + account.idle + account.starting == pytest.approx(1000)
    assert 0 <= account.watts <= energy.LARGEST * 200


def facts(*readings: tuple[float, dict[str, Any]]) -> Iterator[tuple[float, Mapping[str, Any]] | None]:
    yield None
    yield from readings
    yield None


def test_nvml_by_its_counter_also_where_the_driver_was_loaded_anew_else_by_power() -> None:
    readings = facts(
        (10.0, {"energy_joules": 5000.0, "power_watts": 300.0}),
        (12.0, {"energy_joules": 5700.0, "power_watts": 400.0}),
        (12.0, {"energy_joules": 5700.0, "power_watts": 400.0}),
        (14.0, {"energy_joules": 90.0}),
        (16.0, {"power_watts": 200.0}),
        (18.0, {"power_watts": 300.0}),
        (20.0, {"memory_bytes": 1}),
        (999.0, {"power_watts": 100.0}),
    )
    meter = NvmlMeter(lambda: next(readings))
    assert [meter.read() for _ in range(10)] == [
        *(None, (10.0, 0.0), (12.0, 700.0), (12.0, 700.0), (14.0, 790.0), (16.0, 1190.0), (18.0, 1690.0)),
        *(None, (999.0, 1690.0 + 200.0 * energy.STALE_S), None),
    ]


def test_a_counter_that_is_read_wrong_once_charges_no_more_than_the_power_of_that_time() -> None:
    """Facts that are newer than the time that was read with them count with the next."""
    readings = facts(
        (10.0, {"energy_joules": 9e8, "power_watts": 300.0}),
        (10.0, {"energy_joules": 9e8 + 500, "power_watts": 300.0}),
        (12.0, {"energy_joules": 9e8 + 600, "power_watts": 300.0}),
        (14.0, {"energy_joules": 9e8 + 599, "power_watts": 400.0}),
        (16.0, {"energy_joules": 9e8 + 1400, "power_watts": 400.0}),
    )
    meter = NvmlMeter(lambda: next(readings))
    assert [meter.read() for _ in range(6)] == [
        *(None, (10.0, 0.0), (10.0, 0.0), (12.0, 600.0), (14.0, 1300.0), (16.0, 2101.0))
    ]


def test_a_workers_processor_time_is_also_that_of_its_models_ranks() -> None:
    """Which stays once they have ended."""
    work = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        engine = SimpleNamespace(stats=lambda: SimpleNamespace(rank_processes=(rank.pid,)))
        processor_time = ProcessorTime(engine)
        assert rank.stdout is not None
        rank.stdout.readline()
        before = time.process_time()
        assert processor_time() >= before + 0.1
        rank.communicate(b"\n")
    before = time.process_time()
    assert processor_time() >= before + 0.1


class Machine:
    """Files as Linux has them of a machine with two packages, the counters of whose parts are no packages."""

    def __init__(self, root: Path, largest: int = 262_143_328_850) -> None:
        self.root, self.stat, self.own, self.now = root, root / "stat", 0.0, 0.0
        self._ticks = 0
        self._energy = dict.fromkeys(("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "psys"), 0)
        self._largest = largest
        for name in self._energy:
            (root / name).mkdir()
            (root / name / "max_energy_range_uj").write_text(f"{largest}\n")
        self.goes_on(0.0)

    def goes_on(self, seconds: float, own: float = 0.0, others: float = 0.0, watts: float = 0.0) -> None:
        self.now, self.own = self.now + seconds, self.own + own
        self._ticks += round(100 * (own + others))
        self.stat.write_text(f"cpu  {self._ticks} 0 0 77777 5 0 0 0 9 9\ncpu0 1 2 3\n")
        for name, counted in self._energy.items():
            self._energy[name] = (counted + round(1e6 * watts * seconds)) % (self._largest + 1)
            (self.root / name / "energy_uj").write_text(f"{self._energy[name]}\n")

    def meter(self) -> RaplMeter:
        return RaplMeter(self.root, self.stat, lambda: self.own, lambda: self.now)


def test_rapl_by_the_part_of_the_processor_time_also_over_the_end_of_its_range(tmp_path: Path) -> None:
    machine = Machine(tmp_path, largest=99_999_999)  # 100 J
    machine.goes_on(5.0, 1.0, 1.0, 10.0)
    meter = machine.meter()
    total = 0.0
    for own, others in ((1.0, 0.0), (1.0, 3.0), (0.0, 2.0), (2.0, 2.0)):
        machine.goes_on(2.0, own, others, 40.0)
        total += 2 * 2 * 40.0 * (own / (own + others))
        assert meter.read() == pytest.approx((machine.now, total))
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("a fault of the file system")
    assert meter.read() is None
    machine.goes_on(2.0, 1.0, 0.0, 40.0)
    assert meter.read() == pytest.approx((machine.now, total + 160.0))


def test_a_gpu_has_nvml_a_cpu_rapl_else_what_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(tmp_path)
    monkeypatch.setattr(energy, "RaplMeter", lambda **options: RaplMeter(tmp_path, tmp_path / "stat", **options))
    assert isinstance(open_meter("cuda:0", lambda: None, 4.0), NvmlMeter)
    assert isinstance(open_meter("cpu", lambda: None, 4.0), RaplMeter)
    monkeypatch.setattr(energy, "RaplMeter", lambda **options: RaplMeter(tmp_path / "none", **options))
    stated = open_meter("cpu", lambda: None, 4.0)
    assert isinstance(stated, StatedMeter)
    readings = [reading for _ in range(2) if (reading := stated.read()) is not None]
    assert len(readings) == 2
    assert readings == sorted(readings)
    assert open_meter("cpu", lambda: None, None) is None
