"""A worker's increments: none is lost while the store is away, and none counts twice when an answer was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as Lost

from engine.plan import StepWork
from engine.request import Course
from producers.contract import keys
from producers.store.measurements import Tally
from workers import measure
from workers.energy import EnergyAccount
from workers.measure import IDLE_S, TURNS_SMOOTHING, Increments, Measured, TurnShare, WorkerTimes

STATISTICS = dict.fromkeys(
    ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "drafted", "draft_accepted"), 0
) | {"put_off_s": 0.0, "recompute_s": 0.0}


def test_nothing_is_lost_or_counted_twice(valkey: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(statistics=dict(STATISTICS))
    engine.stats = lambda: SimpleNamespace(**engine.statistics)
    engine.stepping = lambda: (0.0, set())
    worker = Increments("tiny", engine)
    run = measure.run

    def send(failing: str = "") -> None:
        def failing_run(store: Redis, call: Any) -> Any:
            if failing == "before":
                raise Lost("away")
            answer = run(store, call)
            if failing == "after":
                raise Lost("the answer was lost")
            return answer

        monkeypatch.setattr(measure, "run", failing_run)
        worker.send(valkey)

    def fields() -> dict[str, int]:
        counts = {name.decode(): int(n) for name, n in valkey.hgetall(keys.metrics("tiny")).items()}
        counts.pop("model_processor_us all n", None)
        return counts

    send()
    assert not valkey.keys("*"), "a worker without work writes nothing"
    worker.on_step(StepWork(0.0, 0.02, 3, 10, 4, 13, 90, 1))
    worker.on_gaps({("flex", 0.02): 3, ("made up", 0.3): 1})
    engine.statistics |= {"generated_tokens": 4, "prompt_tokens": 10}
    send("after")
    first = fields()
    assert first == {
        "step_seconds all 0.025": 1,
        "step_seconds all sum": 20_000,
        "step_sequences all 4.0": 1,
        "step_sequences all sum": 4,
        "step_tokens all 16.0": 1,
        "step_tokens all sum": 13,
        "inter_token_seconds flex 0.025": 3,
        "inter_token_seconds flex sum": 60_000,
        "inter_token_seconds default 0.5": 1,
        "inter_token_seconds default sum": 300_000,
        "model_generated_tokens all n": 4,
        "model_prompt_tokens all n": 10,
        "model_worker_us busy n": 20_000,
    }
    worker.on_gaps({("flex", 0.02): 1})
    send("before")
    assert fields() == first
    engine.statistics["generated_tokens"] = 9
    send()
    changed = {
        "inter_token_seconds flex 0.025": 4,
        "inter_token_seconds flex sum": 80_000,
        "model_generated_tokens all n": 9,
    }
    assert fields() == first | changed
    assert not [name for name in fields() if "energy" in name], "there is no meter"
    again = Increments("tiny", engine)  # the same worker, started again
    again.send(valkey)
    assert fields()["model_generated_tokens all n"] == 18


def test_energy_is_added_by_state_and_the_engine_hears_the_power_of_its_steps(valkey: Redis) -> None:
    """It is told with what else there is to tell."""
    readings = iter([(10.0, 50.0), (12.0, 200.0), (14.0, 350.0), (16.0, 500.0), (18.0, 650.0)])
    charged: list[float] = []
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(**STATISTICS), stepping=lambda: (0.0, set()))
    engine.draws = charged.append
    account = EnergyAccount(SimpleNamespace(read=lambda: next(readings)))
    worker = Increments("tiny", engine, lambda: (4.0, 13.0) if len(charged) >= 2 else None, account)
    for _ in range(5):
        if len(charged) >= 2:
            worker.on_step(StepWork(0.0, 1.0, 1, 0, 1, 1))
        worker.send(valkey)
    counts = {name.decode(): int(n) for name, n in valkey.hgetall(keys.metrics("tiny")).items()}
    energy = {name: n for name, n in counts.items() if name.startswith("model_energy_uj")}
    assert energy == {
        "model_energy_uj starting n": 200_000_000,
        "model_energy_uj busy n": 225_000_000,
        "model_energy_uj idle n": 225_000_000,
    }
    assert charged[:2] == [0.0, 0.0]
    assert charged[2] > 75.0, "the step before was charged with nothing"


def test_time_that_tasks_lost_is_added_by_its_cause(valkey: Redis) -> None:
    """What an engine loses is there before its tasks end: it may be killed until then."""
    statistics: dict[str, Any] = dict(STATISTICS)
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(**statistics), stepping=lambda: (0.0, set()))
    measured = Measured(engine, "tiny")
    course = Course()
    for now, running in ((1.0, 0), (3.0, 0)):
        course.running = running
        course.admit(now, 0)
        course.preempt(now + 0.5, "kv_room")
    assert course.put_off_s == 1.5, "it is still put off"
    course.running = 1
    course.admit(9.0, 0)
    assert course.put_off_s == 1.5, "another choice ran"
    statistics |= {"put_off_s": 1.0, "recompute_s": 0.25}
    measured.increments.send(valkey)
    statistics |= {"put_off_s": 1.5}
    record = SimpleNamespace(lost_ms=lambda start, began: {"failover": began - 5 * start, "handover": 0})
    measured.on_lost_time(SimpleNamespace(record=record, start=2, began=30))  # type: ignore[arg-type]
    measured.on_lost_time(SimpleNamespace(record=None))  # type: ignore[arg-type]
    measured.increments.send(valkey)
    counts = {name.decode(): int(n) for name, n in valkey.hgetall(keys.metrics("tiny")).items() if b"lost" in name}
    assert counts == {
        "model_lost_us preemption n": 1_500_000,
        "model_lost_us failover n": 20_000,
        "model_lost_us recomputation n": 250_000,
    }


def test_a_start_is_counted_by_what_it_began_as_and_by_its_phases(valkey: Redis) -> None:
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(**STATISTICS), stepping=lambda: (0.0, set()))
    for from_standby, phases in ((False, {"imports": 1.5, "weights": 0.5}), (True, {"weights": 0.25, "total": 9})):
        worker = Increments("tiny", engine)
        worker.on_start(phases, from_standby=from_standby)
        worker.send(valkey)
    counts = {name.decode(): int(n) for name, n in valkey.hgetall(keys.metrics("tiny")).items() if b"start" in name}
    assert counts == {
        "model_starts process n": 1,
        "model_starts standby n": 1,
        "model_start_us imports n": 1_500_000,
        "model_start_us weights n": 750_000,
    }


def test_turns_count_as_they_were_lately() -> None:
    turns = TurnShare()
    assert turns.take(0.3, 0.3) == 1.0, "too little to tell"
    assert turns.take(1.0, 1.0) == pytest.approx(1.0 + TURNS_SMOOTHING * (0.5 - 1.0))
    for second in range(2, 40):
        value = turns.take(float(second), 3.0 * second)
    assert value == pytest.approx(0.25, abs=0.02)
    assert turns.take(39.0, 117.0) == value, "it has no work"


def test_a_workers_time_is_busy_idle_or_starting_and_its_states_add_up_to_its_age() -> None:
    """Without work it tells now and then; what it told never falls, though a long step was idle time at first."""
    start: list[tuple[float, float]] = []
    times = WorkerTimes(lambda: start[0] if start else None)
    told: dict[str, int] = {}

    def tell(now: float, stepping: float = 0.0) -> bool:
        tally = Tally()
        times.add_to(tally, now, stepping)
        fields = {name.removesuffix(" n"): n for name, n in tally.fields().items()}
        fields.pop("model_processor_us all", None)
        assert all(n > 0 for n in fields.values())
        told.update({name: told.get(name, 0) + n for name, n in fields.items()})
        return bool(fields)

    assert not tell(100.0)
    start.append((4.0, 102.0))  # it began at 98
    assert tell(103.0)
    assert not tell(103.0 + IDLE_S / 2)
    assert tell(103.0 + IDLE_S)
    times.busy += 2.0
    assert tell(105.0 + IDLE_S, stepping=0.0)
    assert told == {
        "model_worker_us starting": 4_000_000,
        "model_worker_us idle": 1_000_000 * round(1 + IDLE_S),
        "model_worker_us busy": 2_000_000,
    }
    assert not tell(108.0 + IDLE_S, stepping=3.0)
    times.busy += 4.0
    assert tell(109.0 + IDLE_S)
    assert sum(told.values()) == 1_000_000 * round(109.0 + IDLE_S - 98.0)
