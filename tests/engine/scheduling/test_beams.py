"""Beams share what they have in common, wait for each other, and end as one request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.beams import Continuation
from engine.errors import NONE_LEFT, RequestError
from engine.plan import Sampled, StepPlan
from engine.request import Event, TokenLogprobs
from engine.scheduling.scheduler import Scheduler
from tests.engine.stepping import EOS, request, scheduler

#: A beam's likeliest next tokens are these, whatever came before it.
SCORES = {1: -0.2, 2: -0.5, 3: -1.0, 4: -2.0}


def results(plan: StepPlan, scores: dict[int, float] | None = None) -> list[Sampled]:
    each = tuple(Continuation(token, score) for token, score in (SCORES if scores is None else scores).items())
    return [Sampled(1, continuations=each) for row in plan.rows if row.samples]


def step(s: Scheduler, scores: dict[int, float] | None = None) -> tuple[StepPlan, list[Event]]:
    plan = s.schedule(0.0)
    assert plan is not None
    events = s.update(plan, results(plan, scores), 0.0)
    s.check_integrity()
    return plan, events


def test_whole_blocks_are_shared_and_one_in_which_two_write_is_copied() -> None:
    s = scheduler()  # of blocks of four tokens
    s.add(request("a", 10, beam_width=3, n=3, max_tokens=4))
    plan, _ = step(s)
    assert plan.copies == []
    plan = s.schedule(0.0)
    assert plan is not None
    tables = [row.seq.tables[0].blocks for row in plan.rows]
    assert [len(blocks) for blocks in tables] == [3, 3, 3]
    assert len({blocks[0] for blocks in tables}) == len({blocks[1] for blocks in tables}) == 1, "the prompt's blocks"
    last = [blocks[2] for blocks in tables]
    assert len(set(last)) == 3
    assert sorted(plan.copies) == sorted((0, last[0], block) for block in last[1:])
    assert s.stats().kv_blocks_used == 5
    told = s.update(plan, results(plan), 0.0)
    while not told:
        _, told = step(s)
    assert [sorted(event.token_ids) for event in told] == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 2]]
    assert [event.done for event in told] == [False, False, True]
    assert [event.finish_reason for event in told] == ["length"] * 3
    assert not s.has_work


def test_an_output_that_ends_leaves_its_place_to_another() -> None:
    s = scheduler()
    s.add(request("a", beam_width=2, n=2, max_tokens=3, early_stopping=True))
    ends = {1: -0.2, EOS: -0.3, 2: -2.0}
    step(s, ends)
    plan, told = step(s, ends)
    assert len(plan.rows) == 2, "one output has ended, and two beams go on"
    assert [(event.token_ids, event.stop_match) for event in told] == [([1, EOS], EOS), ([EOS], EOS)]


def test_fewer_slots_than_beams_of_several_searches_do_not_block_each_other() -> None:
    s = scheduler(max_num_seqs=4, num_blocks=15)
    for name in "ab":
        s.add(request(name, 6, beam_width=4, n=2, max_tokens=9))
    steps, told = 0, []
    while s.has_work:
        _, events = step(s)
        told += events
        steps += 1
        assert steps < 500
    assert {(event.request_id, tuple(event.token_ids)) for event in told} == {
        (name, tokens) for name in "ab" for tokens in [(1,) * 9, (1,) * 8 + (2,)]
    }
    assert s.stats().preemptions


@pytest.mark.parametrize("end", ["abort", "fail", "not finite"])
def test_it_ends_with_all_of_its_beams(end: str) -> None:
    s = scheduler()
    s.add(request("a", 6, beam_width=3, n=2, max_tokens=9))
    for _ in range(3):
        step(s)
    s._planner.preempt(s._planner.running[-1], 0.0)
    plan = s.schedule(0.0)
    assert plan is not None
    told = []
    if end == "abort":
        assert s.abort("a")
    elif end == "fail":
        told = s.fail("a", "lost")
    else:
        told = s.update(plan, [Sampled(1, error="not finite"), *results(plan)[1:]], 0.0)
    s.check_integrity()
    assert not s.has_work
    assert [(event.choice, event.finish_reason, event.done) for event in told] == [
        (0, "error", False),
        (1, "error", True),
    ] * bool(told)
    assert bool(told) == (end != "abort")


def test_a_beam_that_nothing_may_follow_fails_nothing_unless_it_is_the_last() -> None:
    s = scheduler()
    s.add(request("a", beam_width=2, n=2, max_tokens=5))
    step(s, {1: -0.2, 2: -0.4})
    plan = s.schedule(0.0)
    assert plan is not None
    assert s.update(plan, [Sampled(1, continuations=(Continuation(EOS, -0.1),)), Sampled(1)], 0.0)[-1].error == (
        "no more than 1 outputs are possible, and n is 2"
    )
    s.add(request("b", beam_width=2, max_tokens=5))
    (told,) = step(s, {})[1]
    assert (told.error, told.refused, told.done) == (NONE_LEFT, True, True)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"beam_width": 2, "n": 3}, "beam_width", "less than n"),
        ({"beam_width": 33}, "beam_width", "1 to 32"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature", "nothing is drawn"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p", "nothing is drawn"),
        ({"beam_width": 2, "best_of": 2}, "best_of", "drawn"),
        ({"beam_width": 2, "watermark": "news"}, "watermark", "marks what is drawn"),
        ({"length_penalty": 2.0}, "length_penalty", "give beam_width"),
        ({"early_stopping": True}, "early_stopping", "give beam_width"),
        ({"beam_width": 2, "early_stopping": "now"}, "early_stopping", "true, false or never"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty", "-10 to 10"),
    ],
)
def test_what_goes_with_no_beams_is_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        SamplingParams(**fields)
    assert refused.value.param == param


def test_all_beams_must_fit_at_one_time() -> None:
    s = scheduler(num_blocks=16)  # 64 tokens
    s.check(request("a", 8, beam_width=4, max_tokens=11))
    for fields, said in (({"beam_width": 5}, "at most 4 sequences"), ({"beam_width": 4, "max_tokens": 12}, "KV cache")):
        with pytest.raises(RequestError, match=said) as refused:
            s.check(request("a", 8, **fields))
        assert refused.value.param == "beam_width"
    with pytest.raises(RequestError, match="outputs that are whole"):
        s.check(request("a", beam_width=2, resume=[[1]]))


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    config = EngineConfig(
        device="cpu", max_num_seqs=8, kv_cache_bytes=1 << 20, threads=1, dtype="float32", speculate="lookup"
    )
    with Engine.load(model_folder, config) as engine:
        yield engine


def test_text_ends_and_log_probabilities_are_each_beams_own(engine: Engine) -> None:
    params = {"beam_width": 4, "n": 4, "max_tokens": 8, "length_penalty": 0.0, "logprobs": 2}
    (free,) = engine.generate(["def "], SamplingParams(**params))
    assert len({tuple(choice.token_ids) for choice in free.choices}) == 4
    totals = []
    for choice in free.choices:
        assert choice.logprobs is not None
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        assert engine.tokenizer is not None
        assert choice.text == engine.tokenizer.decode(choice.token_ids)
        totals.append(sum(entry.logprob for entry in choice.logprobs))
        assert all(isinstance(entry, TokenLogprobs) and len(entry.top) == 2 for entry in choice.logprobs)
    assert totals == sorted(totals, reverse=True), "of outputs of one length, the likeliest first"
    stop = free.text[2:4]
    (ended,) = engine.generate(["def "], SamplingParams(**params | {"logprobs": None}, stop=[stop]))
    assert all(stop not in choice.text and choice.logprobs is None for choice in ended.choices)
    assert ended.choices[0].finish_reason == "stop" or ended.choices[0].text != free.choices[0].text
    assert engine.stats().kv_blocks_used == 0


def test_forms_are_followed_by_each_beam_and_bans_kept(engine: Engine) -> None:
    choice = ["alpha", "beta", "gamma"]
    (formed,) = engine.generate(["def "], SamplingParams(beam_width=3, n=3, choice=choice))
    assert {one.text for one in formed.choices} == set(choice)
    assert {one.finish_reason for one in formed.choices} == {"stop"}
    params = {"beam_width": 3, "n": 3, "max_tokens": 6}
    (free,) = engine.generate(["def "], SamplingParams(**params))
    banned = free.token_ids[0]
    (without,) = engine.generate(
        ["def "], SamplingParams(**params, banned_token_ids=[banned], presence_penalty=1.0, bad_words=["e"])
    )
    assert all(banned not in one.token_ids for one in without.choices)
    (few,) = engine.generate(["def "], SamplingParams(beam_width=3, n=3, regex="a"))
    assert few.error == "no more than 1 outputs are possible, and n is 3"
