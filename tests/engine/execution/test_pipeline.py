"""A step planned while another runs, case by case; test_overlap_histories.py tries it at random."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from engine.execution.pipeline import Pipeline
from engine.plan import Sampled, StepPlan
from engine.request import Event, Tier
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.stepping import EOS, request, rows, scheduler


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ages."""
    monkeypatch.setattr("engine.execution.pipeline.time", SimpleNamespace(monotonic=lambda: 1.0))


class Device:
    """Tokens count up from each sequence's last, but for those of `says`; what happens is noted in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.plans: list[dict[str, tuple[int, int]]] = []
        self.pending: list[set[str]] = []
        self.says: dict[tuple[str, int], int] = {}
        """By request and index in its output."""
        self.waits: set[str] = set()
        self.spoiled: set[str] = set()
        """Requests whose logits are not finite."""
        self.at_launch: Callable[[StepPlan], None] = lambda plan: None
        self.at_collect: Callable[[StepPlan], None] = lambda plan: None
        self._last: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> tuple[int, StepPlan, list[Sampled]]:
        number = len(self.plans)
        self.log.append(f"launch {number}")
        self.plans.append(rows(plan))
        self.pending.append({row.seq.request.id for row in plan.rows if row.pending})
        self.at_launch(plan)
        found = []
        for row in plan.rows:
            if row.samples:
                last = self._last[row.seq.slot] if row.pending else row.seq.tokens[-1]
                place = row.start + row.count - row.seq.prompt_len
                token = self.says.get((row.seq.request.id, place), last + 1)
                self._last[row.seq.slot] = token
                found.append(Sampled(token))
        return number, plan, found

    def collect(self, launched: tuple[int, StepPlan, list[Sampled]]) -> list[Sampled]:
        number, plan, found = launched
        self.log.append(f"collect {number}")
        self.at_collect(plan)
        sampling = [row.seq.request.id for row in plan.rows if row.samples]
        return [
            Sampled(-1, error="not finite") if name in self.spoiled else one
            for name, one in zip(sampling, found, strict=True)
        ]

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self.log.append("copy")

    def needs_token(self, sequence: Sequence) -> bool:
        return sequence.request.id in self.waits

    def forget(self) -> None:
        self.log.append("forget")


class Steps:
    def __init__(self, made: Scheduler, overlap: int = 1) -> None:
        self.scheduler = made
        self.device = Device()
        self.events: list[Event] = []
        self.pipeline = Pipeline(made, self.device, threading.Lock(), self._take, overlap)

    def _take(self, events: list[Event]) -> None:
        self.device.log.append("events")
        self.events += events

    def __call__(self, count: int = 1) -> None:
        for _ in range(count):
            self.pipeline.step()
            self.scheduler.check_integrity()

    def run(self) -> None:
        for _ in range(200):
            if not self.pipeline.step():
                break
            self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.scheduler.stats().kv_blocks_used == 0

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        own = [event for event in self.events if (event.request_id, event.choice) == (name, choice)]
        found: list[int] = []
        for event in own:
            assert event.index == len(found)
            found += event.token_ids
        return found

    def ends(self) -> dict[str, str | None]:
        return {event.request_id: event.finish_reason for event in self.events if event.done}


def counted(name: str, count: int, length: int = 4) -> list[int]:
    last = request(name, length).prompt_ids[-1]
    return list(range(last + 1, last + 1 + count))


def test_a_step_is_launched_before_the_results_of_the_one_before_it_are_waited_for():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", max_tokens=3))
    steps.run()
    assert steps.device.log == [
        *["launch 0", "launch 1", "collect 0", "events", "launch 2", "collect 1", "events", "collect 2", "events"]
    ]
    assert steps.device.pending == [set(), {"a"}, {"a"}]
    assert steps.tokens("a") == counted("a", 3)


def test_without_an_overlap_one_step_follows_the_other():
    steps = Steps(scheduler(), overlap=0)
    steps.scheduler.add(request("a", max_tokens=2))
    steps.run()
    assert steps.device.log == ["launch 0", "collect 0", "events", "launch 1", "collect 1", "events"]
    assert steps.device.pending == [set(), set()]


def test_an_end_that_is_certain_is_not_planned_past():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", max_tokens=2))
    steps.scheduler.add(request("b", max_tokens=4))
    steps.run()
    assert [list(plan) for plan in steps.device.plans] == [["a", "b"], ["a", "b"], ["b"], ["b"]]
    assert steps.scheduler.stats().generated_tokens == 6


def test_an_end_that_is_not_drops_what_was_computed_past_it():
    steps = Steps(scheduler())
    steps.device.says["a", 1] = EOS
    steps.scheduler.add(request("a", max_tokens=9))
    steps.scheduler.add(request("b", max_tokens=5))
    steps.run()
    # The third step held a row of a, which had ended in the second.
    assert [list(plan) for plan in steps.device.plans] == [["a", "b"]] * 3 + [["b"]] * 2
    assert steps.tokens("a") == [*counted("a", 1), EOS]
    assert steps.tokens("b") == counted("b", 5)
    assert steps.ends() == {"a": "stop", "b": "length"}
    assert (steps.scheduler.stats().generated_tokens, steps.scheduler.stats().steps) == (7, 5)


def test_what_was_computed_past_an_end_is_not_found_again():
    steps = Steps(scheduler())
    steps.device.says["a", 0] = EOS
    # The token after the prompt fills the second block; it is computed in the step after that which ends the request.
    steps.scheduler.add(request("a", 7, max_tokens=9))
    steps.run()
    assert rows_of(steps, "a") == [(0, 7), (7, 1)]
    prompt = [*request("a", 7).prompt_ids, EOS, 1, 2]
    steps.scheduler.add(request("b", prompt, max_tokens=1))
    steps.run()
    assert rows_of(steps, "b") == [(4, 6)]


def rows_of(steps: Steps, name: str) -> list[tuple[int, int]]:
    return [plan[name] for plan in steps.device.plans if name in plan]


def test_a_prompt_finds_what_the_step_in_flight_fills():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", list(range(9)), max_tokens=3))
    steps()
    steps.scheduler.add(request("b", list(range(9)), max_tokens=1))
    steps()
    assert steps.device.plans[1] == {"a": (9, 1), "b": (8, 1)}
    assert steps.device.log[:3] == ["launch 0", "launch 1", "collect 0"]


def test_a_sequence_whose_token_is_needed_sits_a_step_out_and_delays_no_other():
    steps = Steps(scheduler())
    steps.device.waits = {"a"}
    steps.scheduler.add(request("a", max_tokens=3))
    steps.scheduler.add(request("b", max_tokens=5))
    steps.run()
    assert [set(plan) for plan in steps.device.plans] == [{"a", "b"}, {"b"}, {"a", "b"}, {"b"}, {"a", "b"}]
    assert not any("a" in pending for pending in steps.device.pending)
    assert (steps.tokens("a"), steps.tokens("b")) == (counted("a", 3), counted("b", 5))


def test_one_put_out_to_plan_the_next_step_keeps_the_token_that_the_step_in_flight_samples():
    steps = Steps(scheduler(max_num_seqs=1, enable_prefix_caching=False))
    steps.scheduler.add(request("low", 4, Tier.BATCH, max_tokens=3))
    steps()
    steps.scheduler.add(request("high", 4, Tier.PRIORITY, arrival=1.0, max_tokens=1))
    steps()
    # Low waits, and yet its first token is told.
    assert steps.device.plans[1] == {"high": (0, 4)}
    assert steps.tokens("low") == counted("low", 1)
    steps.run()
    assert rows_of(steps, "low") == [(0, 4), (0, 5), (5, 1)]
    assert (steps.tokens("low"), steps.tokens("high")) == (counted("low", 3), counted("high", 1))


def test_one_put_out_that_the_step_in_flight_ends_is_not_let_in_again():
    steps = Steps(scheduler(max_num_seqs=1))
    steps.device.says["low", 0] = EOS
    steps.scheduler.add(request("low", 4, Tier.BATCH, max_tokens=3))
    steps()
    steps.scheduler.add(request("high", 4, Tier.PRIORITY, arrival=1.0, max_tokens=2))
    steps.run()
    assert [list(plan) for plan in steps.device.plans] == [["low"], ["high"], ["high"]]
    assert steps.ends() == {"low": "stop", "high": "length"}


def test_what_one_wrote_that_was_put_out_before_it_failed_is_not_found_again():
    steps = Steps(scheduler(max_num_seqs=1))
    steps.scheduler.add(request("low", list(range(20, 29)), Tier.BATCH, max_tokens=3))
    steps()
    steps.scheduler.add(request("high", 4, Tier.PRIORITY, arrival=1.0, max_tokens=1))
    steps.device.spoiled = {"low"}
    steps.run()
    assert steps.ends() == {"low": "error", "high": "length"}
    steps.scheduler.add(request("again", list(range(20, 29)), max_tokens=1))
    steps.run()
    assert rows_of(steps, "again") == [(0, 9)]


def test_choices_are_let_in_when_their_prompt_is_known_to_be_computed():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", 6, n=2, max_tokens=4))
    steps.run()
    assert steps.device.log[:6] == ["launch 0", "launch 1", "collect 0", "events", "copy", "launch 2"]
    assert (steps.tokens("a", 0), steps.tokens("a", 1)) == (counted("a", 4, 6), counted("a", 4, 6))


def test_a_step_that_cannot_be_launched_is_run_in_halves_when_the_one_in_flight_is_entered():
    steps = Steps(scheduler())

    def fault(plan: StepPlan) -> None:
        if "bad" in rows(plan) and steps.scheduler.stats().steps == 1 - (len(plan.rows) == 3):
            raise ZeroDivisionError("at launch")

    for name in ("a", "bad", "b"):
        steps.scheduler.add(request(name, max_tokens=4))
    steps()
    steps.device.at_launch = fault
    steps()
    # All of them with tokens that are known.
    assert [list(plan) for plan in steps.device.plans] == [["a", "bad", "b"]] * 2 + [
        ["a"],
        ["bad", "b"],
        ["bad"],
        ["b"],
    ]
    assert steps.device.pending[1:] == [{"a", "bad", "b"}, set(), set(), set(), set()]
    assert steps.device.log[1:4] == ["launch 1", "collect 0", "events"]
    steps.run()
    assert steps.ends() == {"a": "length", "bad": "error", "b": "length"}
    assert (steps.tokens("a"), steps.tokens("b")) == (counted("a", 4), counted("b", 4))
    assert steps.tokens("bad") == counted("bad", 1)


@pytest.mark.parametrize("passing", [False, True])
def test_a_step_that_fails_under_another_takes_both_back_and_only_the_culprit_fails(passing: bool):
    steps = Steps(scheduler())

    def fault(plan: StepPlan) -> None:
        if "bad" in rows(plan):
            if passing:
                steps.device.at_collect = lambda plan: None
            raise ZeroDivisionError("when collected")

    for name in ("a", "bad", "b"):
        steps.scheduler.add(request(name, max_tokens=5))
    steps(2)
    steps.device.at_collect = fault
    steps()
    assert steps.device.log[-4:] == ["launch 2", "collect 1", "collect 2", "forget"]
    assert (steps.scheduler.stats().running, steps.scheduler.stats().waiting) == (0, 3)
    steps.run()
    assert steps.ends() == {"a": "length", "bad": "length" if passing else "error", "b": "length"}
    assert (steps.tokens("a"), steps.tokens("b")) == (counted("a", 5), counted("b", 5))
    assert steps.tokens("bad") == counted("bad", 5 if passing else 1)
    # What those two steps were to compute is computed again, on its own, before steps overlap anew.
    again = steps.device.log[steps.device.log.index("forget") + 1 :]
    assert again[:2] == ["launch 3", "collect 3"]
    assert any(steps.device.pending[4:])


def test_finishing_enters_the_step_in_flight_and_plans_no_more():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", max_tokens=9))
    steps(2)
    steps.pipeline.finish()
    assert steps.tokens("a") == counted("a", 2)
    assert len(steps.device.plans) == 2
    assert not steps.pipeline.in_flight


def test_dropping_waits_for_the_step_in_flight_and_tells_nothing():
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", max_tokens=9))
    steps()
    steps.pipeline.drop()
    assert steps.device.log == ["launch 0", "collect 0"]
    assert not steps.pipeline.in_flight


def test_a_step_whose_results_could_not_be_entered_is_in_flight_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(scheduler())
    steps.scheduler.add(request("a", max_tokens=9))
    steps()
    with monkeypatch.context() as patched:
        patched.setattr(steps.scheduler, "update", Mock(side_effect=ArithmeticError))
        with pytest.raises(ArithmeticError):
            steps.pipeline.step()
    steps.pipeline.drop()
    steps.scheduler.fail("a", "a fault of the engine")
    steps.scheduler.add(request("b", max_tokens=3))
    steps.run()
    assert steps.tokens("b") == counted("b", 3)
    assert not steps.scheduler._planner.in_flight


def test_parts_of_a_prompt_in_flight_keep_what_later_ones_have_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several stages: a part is entered while the blocks behind the window of a later one are free already."""
    steps = Steps(scheduler(windows=(None, 3), max_num_batched_tokens=4), overlap=3)
    monkeypatch.setattr(steps.device, "needs_token", lambda sequence: True)
    steps.scheduler.add(request("a", 33, max_tokens=3))
    steps(12)
    steps.run()
    assert steps.tokens("a") == counted("a", 3, 33)


def test_the_requests_of_a_step_are_named_before_its_drafts_are_made() -> None:
    """Drafts are computed, too: a process that dies or hangs over them is to name the requests."""
    steps, log = Steps(scheduler(), overlap=0), list[str]()

    def propose(plan: StepPlan) -> float:
        log.append("drafts")
        return 0.0

    steps.pipeline._speculation = SimpleNamespace(propose=propose, record=lambda *of: None)  # type: ignore[assignment]
    steps.pipeline._on_under_way = lambda plans: log.extend(name for plan in plans for name in rows(plan))
    steps.scheduler.add(request("a", max_tokens=1))
    steps()
    assert log == ["a", "drafts"]
