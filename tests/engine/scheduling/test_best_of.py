"""best_of gives the best of what n would have given, and nothing before all are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.params import FinishReason
from engine.plan import Sampled
from engine.request import Choice, Event, TokenLogprobs
from engine.scheduling.group import Candidates
from tests.engine.stepping import EOS, request, scheduler


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", max_num_seqs=8, kv_cache_bytes=1 << 20, threads=1, dtype="float32")
    with Engine.load(model_folder, config) as engine:
        yield engine


def mean(choice: Choice) -> float:
    assert choice.logprobs is not None
    return fmean(one.logprob for one in choice.logprobs)


@pytest.mark.parametrize(("n", "best_of"), [(1, 3), (2, 6), (5, 5)])
def test_the_best_are_those_whose_tokens_are_likeliest_on_the_mean(engine: Engine, n: int, best_of: int) -> None:
    shared = {"max_tokens": 9, "seed": 4, "stop": ["e", "a"], "temperature": 1.5}
    (whole,) = engine.generate(["def "], SamplingParams(n=best_of, logprobs=1, **shared))
    (best,) = engine.generate(["def "], SamplingParams(n=n, best_of=best_of, logprobs=1, **shared))
    assert len({len(choice.token_ids) for choice in whole.choices}) > 1
    expected = sorted(whole.choices, key=mean, reverse=True)[:n] if best_of > n else whole.choices
    assert best.choices == expected
    (bare,) = engine.generate(["def "], SamplingParams(n=n, best_of=best_of, **shared))
    assert [choice.token_ids for choice in bare.choices] == [choice.token_ids for choice in expected]
    assert all(choice.logprobs is None for choice in bare.choices)


def news(choice: int, logprob: float, tokens: int, done: bool, reason: FinishReason = "stop") -> Event:
    """The one event of a choice with `tokens` equally likely tokens."""
    ids = list(range(10 * choice, 10 * choice + tokens))
    return Event(
        request_id="r",
        choice=choice,
        token_ids=ids,
        texts=[f"{token_id} " for token_id in ids],
        logprobs=[TokenLogprobs(token_id, logprob, ()) for token_id in ids],
        finish_reason=reason,
        stop_match=choice,
        done=done,
    )


def test_length_does_not_decide_and_equals_stay_in_order() -> None:
    candidates = Candidates(4, 3, shown=False)
    assert candidates.take(news(1, -1.0, 7, False)) == []
    assert candidates.take(news(3, -0.5, 9, False, "length")) == []
    assert candidates.take(news(0, -1.0, 2, False)) == []
    told = candidates.take(news(2, -2.0, 1, True))
    assert [event.stop_match for event in told] == [3, 0, 1]
    assert [event.choice for event in told] == [0, 1, 2]
    assert [event.done for event in told] == [False, False, True]
    assert [event.finish_reason for event in told] == ["length", "stop", "stop"]
    assert [event.discarded for event in told] == [1, 1, 1]
    assert told[1].texts == ["0 ", "1 "]
    assert told[1].logprobs is None


def test_one_failure_is_the_end_of_all_choices() -> None:
    s = scheduler()
    s.add(request("a", n=2, best_of=3, max_tokens=8))
    told = []
    while not told:
        plan = s.schedule(0.0)
        assert plan is not None
        sampled = [Sampled(1, TokenLogprobs(1, -1.0, ())) for row in plan.rows if row.samples]
        if len(sampled) == 3:
            sampled[1] = Sampled(-1, error="not finite")
        told = s.update(plan, sampled, 0.0)
        s.check_integrity()
    assert [(event.choice, event.error, event.finish_reason) for event in told] == [
        (0, "not finite", "error"),
        (1, "not finite", "error"),
    ]
    assert [event.done for event in told] == [False, True]
    assert not s.has_work
    assert s.stats().kv_blocks_used == 0


def test_a_candidate_that_ends_early_waits_for_the_others() -> None:
    s = scheduler()
    s.add(request("a", n=1, best_of=2, max_tokens=3))
    told = []
    steps = 0
    while s.has_work:
        plan = s.schedule(0.0)
        assert plan is not None
        sampled = [
            Sampled(EOS if row.seq.choice else 1, TokenLogprobs(1, -1.0, ())) for row in plan.rows if row.samples
        ]
        told += s.update(plan, sampled, 0.0)
        steps += 1
        assert bool(told) == (not s.has_work)
    assert [(event.token_ids, event.discarded) for event in told] == [([1, 1, 1], 1)]


def test_where_nothing_is_generated_there_is_nothing_to_choose() -> None:
    s = scheduler()
    told = s.add(request("a", n=2, best_of=4, max_tokens=0))
    assert [(event.choice, event.finish_reason, event.done) for event in told] == [
        (0, "length", False),
        (1, "length", True),
    ]


def test_half_an_output_cannot_be_taken_up() -> None:
    s = scheduler()
    with pytest.raises(RequestError, match="outputs that are whole"):
        s.check(request("a", n=1, best_of=2, resume=[[1]]))
