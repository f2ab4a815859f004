"""The simulated pool, against times that follow by hand; and its scalers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.autoscaler.policy import Memory, Rules, Signals, decide
from workers.trials.simulate.compare import Objective, figures, time_to_first
from workers.trials.simulate.scalers import DEADLINE, CpuHpa, Keda, Policy, Schedule, clairvoyant
from workers.trials.simulate.simulation import Outcome, Simulation, WorkerModel
from workers.trials.simulate.traces import Arrival, Synthetic

#: A sequence makes 10 tokens a second, alone or beside another one; three or four share 20. Prompts cost nothing.
MODEL = WorkerModel(knee=2, tokens_per_s=20.0, slots=4, prompt_cost=0.0, cold_start=0.0, drain=5.0)
PRIORITY, DEFAULT, FLEX, BATCH = range(4)


def run(
    arrivals: list[tuple[float, int, int, int]], model: WorkerModel = MODEL, *schedule: tuple[float, int]
) -> Outcome:
    steps = schedule or ((0.0, 1),)
    return Simulation([Arrival(*one) for one in arrivals], model, Schedule(steps, every=1.0)).run()


def ends(out: Outcome) -> list[float | None]:
    return [None if task.ended is None else round(task.ended, 6) for task in out.tasks]


# ---- a worker ------------------------------------------------------------------------------------


def test_up_to_the_knee_sequences_do_not_slow_each_other_and_beyond_they_share() -> None:
    task = (0.0, DEFAULT, 0, 100)
    assert ends(run([task])) == [10.0]
    assert ends(run([task] * 2)) == [10.0, 10.0]
    assert ends(run([task] * 4)) == [20.0] * 4
    assert sorted(ends(run([task] * 5))) == [20.0] * 4 + [30.0]  # type: ignore[type-var]
    assert (
        ends(run([(0.0, DEFAULT, 0, 100), (0.0, DEFAULT, 0, 100), (5.0, DEFAULT, 0, 50), (5.0, DEFAULT, 0, 50)]))
        == [15.0] * 4
    )


def test_the_first_token_waits_for_the_prompt_and_for_better_and_earlier_prompts() -> None:
    model = replace(MODEL, prompt_cost=0.1, tokens_per_s=20.0)  # 200 prompt tokens a second
    out = run([(0.0, DEFAULT, 200, 10), (0.0, DEFAULT, 200, 10), (0.5, PRIORITY, 200, 10)], model)
    first = [round(time_to_first(task), 3) for task in out.tasks]
    assert first == [1.1, 2.1, 1.15]


def test_workers_take_tasks_after_the_cold_start_best_tier_first() -> None:
    tasks = [(0.0, rank, 0, 10) for rank in (BATCH, FLEX, DEFAULT, PRIORITY)]
    model = replace(MODEL, cold_start=60.0, slots=2)
    out = run(tasks, model)
    firsts = {task.rank: task.first for task in out.tasks}
    assert firsts == {PRIORITY: 60.1, DEFAULT: 60.1, FLEX: 61.1, BATCH: 61.1}


def test_a_better_task_pauses_the_worst_and_youngest_which_goes_on_later() -> None:
    model = replace(MODEL, slots=2)
    out = run([(0.0, DEFAULT, 0, 100), (1.0, BATCH, 0, 100), (2.0, PRIORITY, 0, 100)], model)
    default, batch, priority = out.tasks
    assert (default.ended, priority.ended) == (10.0, 12.0)
    assert priority.first == pytest.approx(2.1)
    assert batch.ended == pytest.approx(19.0)  # paused from 2 to 10


def test_a_paused_task_computes_its_tokens_again() -> None:
    model = replace(MODEL, slots=1, knee=1, tokens_per_s=10.0, prompt_cost=0.1)
    out = run([(0.0, BATCH, 0, 100), (5.0, PRIORITY, 0, 10)], model)
    assert out.tasks[0].ended == pytest.approx(11.5)  # 50 tokens again, at a tenth of their cost


def test_no_task_is_fetched_that_better_ones_leave_no_room_for() -> None:
    model = replace(MODEL, slots=2)
    out = run([(0.0, DEFAULT, 0, 100), (0.0, DEFAULT, 0, 100), (1.0, PRIORITY, 0, 100), (2.0, DEFAULT, 0, 10)], model)
    assert out.tasks[3].first == pytest.approx(11.1)  # at 10 the paused one goes on, at 11 priority has ended


# ---- the pool ------------------------------------------------------------------------------------


def test_worker_hours_count_from_the_order_to_the_end_of_the_drain() -> None:
    model = replace(MODEL, cold_start=10.0)
    out = run([(0.0, DEFAULT, 0, 100), (40.0, DEFAULT, 0, 10)], model, (0.0, 2), (15.0, 1))
    assert out.worker_s == pytest.approx(41.0 + 15.0)  # the idle one of two ends at once
    assert (out.max_workers, [number for _, number in out.changes]) == (2, [2, 1])


def test_a_drained_worker_hands_back_what_it_does_not_finish_in_time() -> None:
    tasks = [(0.0, DEFAULT, 0, 100)] * 6
    out = run(tasks, MODEL, (0.0, 2), (2.0, 1))
    assert out.handed_back == 2  # the least loaded one had two
    assert all(task.ended for task in out.tasks)
    assert out.worker_s == pytest.approx(out.ended_at + 7.0)


def test_idle_workers_end_first_and_starting_ones_last() -> None:
    model = replace(MODEL, cold_start=5.0, drain=100.0)
    out = run([(0.0, DEFAULT, 0, 200), (30.0, DEFAULT, 0, 10)], model, (0.0, 2), (8.0, 3), (10.0, 2))
    assert out.handed_back == 0
    assert out.worker_s == pytest.approx(10 + 30.0 + 30.0 - 8.0 + 1.0 * 2, abs=3)


def test_turns_are_changes_of_direction() -> None:
    out = run([(0.0, DEFAULT, 0, 300)], MODEL, (0.0, 1), (5.0, 3), (10.0, 2), (12.0, 1), (20.0, 2))
    assert (len(out.changes), out.turns) == (5, 2)


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 300), st.integers(0, 3), st.integers(0, 50), st.integers(0, 300)), min_size=1, max_size=60
)


@given(ARRIVALS, st.lists(st.integers(1, 4), min_size=1, max_size=10))
def test_any_trace_under_any_schedule_loses_no_task_and_no_work(
    said: list[tuple[float, int, int, int]], numbers: list[int]
) -> None:
    model = replace(MODEL, prompt_cost=0.1, cold_start=3.0)
    arrivals = sorted(Arrival(*one) for one in said)
    steps = [(40.0 * place, number) for place, number in enumerate(numbers)]
    out = Simulation(arrivals, model, Schedule(steps, every=1.0)).run()
    assert all(task.ended is not None and task.first is not None for task in out.tasks)
    assert all(task.ended >= task.at + task.total / 10 - 1e-6 for task in out.tasks if task.ended)
    assert out.worker_s >= out.work_s - 1e-6  # no schedule does the work in less


# ---- scalers -------------------------------------------------------------------------------------


def test_decisions_are_those_of_decide_for_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Signals, int]] = []

    class Watched(Policy):
        def target(self, pool: Simulation) -> int:
            told.append((pool.signals(), number := super().target(pool)))
            return number

    rules, memory = Rules(max=8, cool_down=30.0), Memory()
    Simulation(Synthetic(tasks=600, duration=1800).arrivals(), WorkerModel(), Watched(rules)).run()
    assert len({number for _, number in told}) > 4
    for signals, number in told:
        decision, memory = decide(rules, signals, memory)
        assert decision.target == number


class Seen:
    """A pool as a scaler reads it."""

    def __init__(self, at: float, **said: Any) -> None:
        self.now, self.queued, self.up, self.takers, self.model = at, 0, 0, [], MODEL
        for name, value in said.items():
            setattr(self, name, value)


def of_keda(scaler: Any, *seen: tuple[float, int, int]) -> list[int]:
    return [scaler.target(Seen(at, queued=queued, up=up)) for at, queued, up in seen]


def test_keda_asks_for_a_replica_for_each_five_waiting_tasks() -> None:
    assert of_keda(Keda(0, 30), (0, 0, 0), (15, 9, 0), (30, 9, 0)) == [0, 0, 1]  # polled every 30 s
    assert of_keda(Keda(0, 30), (0, 50, 1), (15, 50, 5), (30, 50, 10)) == [5, 10, 10]  # +4, or twice, each 15 s
    assert of_keda(Keda(0, 30), (0, 54, 10), (15, 1000, 20)) == [10, 30]  # within the tolerance; at most 30
    assert of_keda(Keda(0, 30), (0, 50, 10), (15, 0, 10), (290, 0, 10), (301, 0, 10)) == [10, 10, 10, 0]
    assert of_keda(Keda(1, 30), (0, 50, 10), (15, 0, 10), (301, 0, 10)) == [10, 10, 1]


def test_an_hpa_on_cpu_keeps_seventy_percent_and_counts_starting_pods_as_idle() -> None:
    class Worker:
        def __init__(self, running: int) -> None:
            self.running = running

    def wanted(scaler: CpuHpa, at: float, up: int, *running: int) -> int:
        return scaler.target(Seen(at, up=up, takers=[Worker(one) for one in running]))  # type: ignore[arg-type]

    assert wanted(CpuHpa(0, 30), 0, 0) == 1
    assert wanted(CpuHpa(0, 30), 0, 4, 2, 2, 2, 2) == 6
    assert wanted(CpuHpa(0, 30), 0, 6, 2, 2, 2, 2) == 6
    assert wanted(CpuHpa(0, 30), 0, 4, 2, 1, 2, 1) == 4  # 75 %, within the tolerance
    scaler = CpuHpa(0, 30)
    assert [
        wanted(scaler, at, 4, *load) for at, load in ((0, (2, 2, 1, 1)), (299, (1, 0, 0, 0)), (301, (1, 0, 0, 0)))
    ] == [4, 4, 1]


def test_a_worker_beside_other_models_does_its_work_in_its_turns() -> None:
    half = replace(MODEL, turn_share=0.5, prompt_cost=0.1)
    out = run([(0.0, DEFAULT, 200, 100)] * 2, half)
    assert ends(out) == [24.0, 24.0]
    assert [round(time_to_first(task), 3) for task in out.tasks] == [2.2, 4.2]


class Alone(Policy):
    """The policy as if each worker had its device alone."""

    def target(self, pool: Simulation) -> int:
        told = pool.signals
        pool.signals = lambda: replace(told(), turn_share=1.0)  # type: ignore[method-assign]
        try:
            return super().target(pool)
        finally:
            pool.signals = told  # type: ignore[method-assign]


def test_the_policy_starts_the_workers_that_their_turns_ask_for() -> None:
    """A backlog asks for workers by their speed, which neighbours cut to a tenth: for as many as of workers that are as
    slow by themselves. Without that, far more tasks wait too long."""
    fast = WorkerModel(knee=16, tokens_per_s=3200.0, prompt_cost=0.05, cold_start=10.0)
    shared, slow = replace(fast, turn_share=0.1), replace(fast, tokens_per_s=320.0)
    arrivals = [Arrival(number / 60, PRIORITY, 40, 40) for number in range(60 * 150)]
    rules, objective = Rules(max=30), Objective()
    trials = {"turns": (shared, Policy(rules)), "alone": (shared, Alone(rules)), "slow": (slow, Policy(rules))}
    in_time = {
        name: figures(Simulation(arrivals, model, scaler).run(), objective, 1.0)["priority_in_time"]
        for name, (model, scaler) in trials.items()
    }
    assert in_time["turns"] == pytest.approx(in_time["slow"], abs=0.05)
    assert in_time["turns"] > in_time["alone"] + 0.1


# ---- the clairvoyant schedule, and the day in small ----------------------------------------------


def test_the_clairvoyant_schedule_holds_the_objective_and_lies_near_the_bound() -> None:
    arrivals = Synthetic(tasks=2500, duration=6000, seed=2).arrivals()
    objective = Objective()
    found = clairvoyant(arrivals, WorkerModel(), Rules(max=12), objective.holds)
    assert found is not None
    assert objective.holds(found.outcome)
    assert found.outcome.max_workers <= 12
    assert found.outcome.ended_at <= arrivals[-1].at + DEADLINE
    assert 1.0 < found.outcome.worker_s / found.outcome.work_s < 1.12
    assert clairvoyant(arrivals, WorkerModel(), Rules(max=12), lambda out: False) is None


def test_the_policy_meets_the_objective_for_less_than_an_hpa() -> None:
    arrivals, model, objective = Synthetic(tasks=6000, duration=7200, seed=2).arrivals(), WorkerModel(), Objective()
    scalers = {"policy": Policy(Rules(max=30, cool_down=30.0)), "hpa": CpuHpa(1, 30), "keda": Keda(0, 30)}
    said = {name: figures(Simulation(arrivals, model, one).run(), objective, 2.0) for name, one in scalers.items()}
    assert said["policy"]["priority_in_time"] >= 0.98  # the first minute has no worker
    assert said["keda"]["priority_in_time"] < 0.9  # it ends workers whose tasks it does not see
    assert said["policy"]["worker_hours"] < 0.9 * said["hpa"]["worker_hours"]
    assert said["policy"]["cost"] == pytest.approx(2 * said["policy"]["worker_hours"], abs=0.01)
    assert said["policy"]["unfinished"] == 0
