"""Beams share what they have in common, wait for each other, and end as one request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.beams import Beam, BeamSearch, Continuation
from engine.errors import NONE_LEFT, RequestError
from engine.output import OutputState
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request, TokenLogprobs
from engine.scheduling.scheduler import Scheduler
from tests.engine.stepping import EOS, request, scheduler
from tests.exhaustive import few

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


def test_a_block_that_is_yet_to_be_copied_is_copied_from_where_it_comes_from() -> None:
    s = scheduler()
    s.add(request("a", 6, beam_width=2, max_tokens=4))
    step(s)
    first, second = s._planner.running
    (source,), (branched,) = first.tables[0].blocks[1:], second.tables[0].blocks[1:]
    s._planner.preempt(first, 0.0)
    plan = s.schedule(0.0)
    assert plan is not None
    again = first.tables[0].blocks[1]
    assert sorted(plan.copies) == sorted([(0, source, branched), (0, source, again)])


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
    search = request("a", 6, beam_width=3, n=2, max_tokens=9)
    s.add(search)
    for _ in range(3):
        step(s)
    assert search.course.searched == 1 + 3 + 3
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


def continuations(tokens: list[int]) -> tuple[Continuation, ...]:
    """A model: the likeliest next tokens are a function of those before them."""
    drawn = random.Random(repr(tokens))
    likeliest = sorted(((-drawn.expovariate(1.0), token) for token in drawn.sample(range(1, EOS + 1), 6)), reverse=True)
    return tuple(Continuation(token, score) for score, token in likeliest)


def searched(asked: Request, limit: int) -> list[list[int]]:
    """The outputs of a search with all the room in the world."""
    search = BeamSearch(asked.params, limit)
    beams = [Beam(OutputState(asked.params, [EOS], None, limit))]
    while beams:
        for beam in beams:
            beam.continuations = continuations(asked.prompt_ids + beam.token_ids)
        beams = [beam for _, beam in search.advance(beams)]
    return [beam.token_ids for beam in search.outputs()]


@pytest.mark.parametrize("seed", few(range(60), 3, 17))
def test_whatever_else_runs_a_search_finds_the_same(seed: int) -> None:
    """Among other requests, with few blocks and slots, put out and aborted at random, with steps that overlap or do
    not. All blocks are free at the end."""
    drawn = random.Random(seed)
    switch = drawn.choice([None, 9])
    s = scheduler(
        num_blocks=drawn.randint(24, 40),
        windows=drawn.choice([(None,), (None, 7)]),
        max_num_seqs=drawn.randint(4, 7),
        max_num_batched_tokens=drawn.randint(8, 24),
        rope_switch=switch,
        enable_prefix_caching=drawn.random() < 0.7,
    )
    overlap, waiting, asked, told = drawn.random() < 0.5, [], {}, dict[str, list[Event]]()
    for i in range(drawn.randint(2, 6)):
        params: dict[str, Any] = {"max_tokens": drawn.randint(1, 9)}
        if drawn.random() < 0.75:
            params |= {"beam_width": drawn.randint(1, 4), "length_penalty": drawn.choice([0.0, 1.0, 2.0])}
            params |= {"n": drawn.randint(1, params["beam_width"]), "early_stopping": drawn.choice([True, "never"])}
        waiting.append(request(f"r{i}", drawn.randint(1, 12), tier=drawn.randint(0, 3), arrival=float(i), **params))
    flight: StepPlan | None = None

    def enter(plan: StepPlan) -> None:
        sampled = [
            Sampled(continuations(row.seq.tokens)[0].token_id, continuations=continuations(known[id(row)]))
            for row in plan.rows
            if row.samples
        ]
        for event in s.update(plan, sampled, 0.0):
            told.setdefault(event.request_id, []).append(event)

    known: dict[int, list[int]] = {}
    steps = 0
    while waiting or s.has_work or flight is not None:
        steps += 1
        assert steps < 3000
        if waiting and drawn.random() < 0.4:
            one = waiting.pop()
            s.check(one)
            s.add(one)
            asked[one.id] = one
        if drawn.random() < 0.03 and asked and flight is None:
            gone = drawn.choice([*asked])
            s.abort(gone)
            asked.pop(gone)
            told.pop(gone, None)
        if flight is None and s._planner.running and drawn.random() < 0.15:
            s._planner.preempt(drawn.choice(s._planner.running), 0.0)
        if flight is not None:
            s.foresee(flight, lambda seq: True)
        plan = s.schedule(0.0)
        if plan is not None:
            known |= {id(row): list(row.seq.tokens) for row in plan.rows}
        if overlap:
            plan, flight = flight, plan
        if plan is not None:
            enter(plan)
            s.check_integrity()
    for name, one in asked.items():
        if one.params.beam_width is not None:
            events = told[name]
            found = searched(one, one.params.max_tokens or 0)
            assert [event.token_ids for event in events] == found if len(found) == one.params.n else events[0].error
    assert s.stats().kv_blocks_used == 0
    s.check_integrity()
