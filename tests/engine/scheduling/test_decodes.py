"""The short way of decodes through planner and scheduler, beside the way of all other sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.plan import Sampled, StepPlan
from engine.request import Event
from engine.scheduling.planner import Planner
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.stepping import EOS, request, scheduler
from tests.histories import examples


class Letters:
    """A detokenizer: a letter for each token, the second half of them held until the next one."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        text, self._held = self._held + "abcdefgh"[token_id % 8], ""
        if token_id % 2:
            text, self._held = text[:-1], text[-1]
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def history(seed: int, *, ahead: bool) -> list[Any]:
    """The plans and events of requests of all kinds, in so little memory that some are preempted."""
    rng = random.Random(seed)
    s = scheduler(
        num_blocks=14,
        windows=rng.choice([(None,), (None, 8)]),
        max_num_seqs=6,
        new_detokenizer=Letters,
        max_model_len=40,
    )
    told: list[Any] = []
    before: StepPlan | None = None
    for number in range(80):
        now = float(number)
        if number < 40 and rng.random() < 0.4:
            told.append(s.add(_request(rng, str(number), now)))
        if rng.random() < 0.05:
            told.append(s.abort(str(rng.randrange(number + 1))))
        if before is not None:
            s.foresee(before, lambda seq: seq.serial % 5 == 0)
        plan = s.schedule(now)
        told.append(plan and [(row.seq.serial, row.start, row.count, row.samples, row.pending) for row in plan.rows])
        told.append(plan and (plan.num_tokens, plan.prompts, plan.prompt_tokens, plan.copies))
        entered, before = (before, plan) if ahead else (plan, None)
        if entered is not None:
            told.append(_entered(s, entered, rng, now))
        if not ahead:
            s.check_integrity()
    told.append(s.stats())
    return told


def _request(rng: random.Random, name: str, now: float) -> Any:
    kinds: list[dict[str, Any]] = [
        {},
        {"stop": ("ab", "c"), "min_tokens": 1},
        {"ignore_eos": True, "stop_token_ids": (3,)},
        {"n": 2},
        {"n": 3},
        {"tenant": "other", "weight": 2.0},
        {"n": 1, "best_of": 2},
    ]
    size = rng.choice([rng.randint(1, 9), 4, 8])  # many of whole blocks, which a preempted sequence finds again
    return request(name, size, rng.randrange(4), now, max_tokens=rng.randint(1, 20), **rng.choice(kinds))


def _entered(s: Scheduler, plan: StepPlan, rng: random.Random, now: float) -> list[Event]:
    sampled = [
        Sampled(
            rng.choice([EOS, *range(8)] if rng.random() < 0.3 else [2, 4]),
            error="it broke" if rng.random() < 0.02 else None,
        )
        for row in plan.rows
        if row.samples
    ]
    return s.update(plan, sampled, now)


@settings(max_examples=examples(40, 400), deadline=None)
@given(seed=st.integers(0, 1 << 32), ahead=st.booleans())
@example(seed=10, ahead=True)  # a leader is preempted while its prompt is in flight, and others wait for it
def test_decodes_go_the_short_way_as_they_would_go_the_long_one(seed: int, ahead: bool) -> None:
    short = history(seed, ahead=ahead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "_decodes", lambda self, step: 0)
        patch.setattr(Sequence, "plain", property(lambda seq: False, lambda seq, plain: None))
        long = history(seed, ahead=ahead)
    assert short == long
