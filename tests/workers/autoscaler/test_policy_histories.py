"""The policy keeps its promises in any history."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.autoscaler.looks import seen
from workers.autoscaler.policy import Decision, Memory, Rules, Signals, decide, restored

NUMBERS = st.integers(0, 200)
STEPS = st.tuples(
    st.floats(0.5, 40),
    st.fixed_dictionaries(
        {"priority": NUMBERS, "default": NUMBERS, "batch": NUMBERS, "in_flight": NUMBERS, "patient": NUMBERS}
    ),
    st.sampled_from(["", "blind", "back", "forth"]),
)
RULESETS = st.builds(
    lambda least, more, cool, growth: Rules(min=least, max=least + more, cool_down=cool, growth=growth),
    st.integers(0, 3),
    st.integers(1, 40),
    st.sampled_from([10.0, 60.0]),
    st.sampled_from([1.3, 2.0]),
)


def _history(rules: Rules, steps: list[Any]) -> list[tuple[float, Signals | None, Memory, Decision, Memory]]:
    """(time that passed, what was seen, memory before, decision, memory after) of each step."""
    found, memory, clock, passed = [], Memory(wanted=rules.min), 1000.0, 0.0
    for after, said, fault in steps:
        passed += after
        clock += after + {"back": -500.0, "forth": 500.0}.get(fault, 0.0)
        ready = min(memory.wanted, 3)
        signals = None if fault == "blind" else seen(clock, ready=ready, running=10 * ready, **said)
        decision, later = decide(rules, signals, memory)
        found.append((passed, signals, memory, decision, later))
        memory = later
    return found


@given(RULESETS, st.lists(STEPS, max_size=60))
def test_any_history_keeps_the_limits(rules: Rules, steps: list[Any]) -> None:
    for _, signals, before, decision, after in _history(rules, steps):
        assert rules.min <= decision.target <= rules.max
        assert after.wanted == decision.target
        had = before.wanted
        assert decision.target <= max(1, had + 1, int(had * rules.growth), rules.min)
        assert decision.target >= min(had - 1, had) or (signals is not None and not signals.queued + signals.in_flight)
        if signals is None:
            assert decision.target == had
        if signals is not None and (signals.queued or signals.in_flight):
            assert decision.target or not had  # never to zero while a task is there
        assert restored(Memory, json.loads(json.dumps(asdict(after)))) == after


@given(RULESETS, st.lists(STEPS, max_size=120))
def test_any_history_turns_no_more_than_once_a_cool_down(rules: Rules, steps: list[Any]) -> None:
    numbers = [(passed, after.wanted) for passed, _, _, _, after in _history(rules, steps)]
    turns, direction = 0, 0
    for (_, before), (_, now) in pairwise(numbers):
        if now != before:
            turned = 1 if now > before else -1
            turns += turned == -direction
            direction = turned
    passed = numbers[-1][0] if numbers else 0.0
    assert turns <= passed / rules.cool_down + 1


@given(RULESETS, st.lists(STEPS, max_size=20), st.sampled_from(["priority", "default", "batch", "in_flight"]), NUMBERS)
def test_more_tasks_never_mean_fewer_workers(rules: Rules, steps: list[Any], what: str, more: int) -> None:
    memory = _history(rules, steps)[-1][-1] if steps else Memory(wanted=rules.min)
    said = {"default": 3, "priority": 2, "batch": 5, "in_flight": 4, "ready": 2, "running": 20}
    fewer, larger = (
        decide(rules, seen(5000.0, **{**said, what: said[what] + extra}), memory)[0] for extra in (0, more)
    )
    assert fewer.target <= larger.target
