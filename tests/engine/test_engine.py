"""The public face: generating, submitting, looking in, closing, on a real (random) model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import engine.engine as engine_module
import engine.execution.runner as runner_module
from engine import Engine, Event, Request, RequestError, SamplingParams
from engine.plan import StepWork
from engine.sampling import SamplingBatch, sample
from tests.engine.conftest import Load
from tests.engine.looping import Listener, until, waited

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = ["def write_model(folder", "import json\n", "x", "Größe: é ∑"]


def events_of(engine: Engine, request: Request) -> list[Event]:
    heard = Listener()
    engine.submit(request, heard)
    return heard.wait().events


def test_texts_and_token_ids_are_the_same_prompts(load: Load) -> None:
    engine = load()
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    by_text, by_ids = engine.generate(TEXTS, GREEDY), engine.generate(ids, GREEDY)
    for one, other, prompt in zip(by_text, by_ids, ids, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == 12
        assert one.finish_reason == "length"
        assert one.prompt_tokens == len(prompt)
        assert one.text == engine.tokenizer.decode(one.token_ids)


def test_each_prompt_may_have_its_own_parameters(load: Load) -> None:
    engine = load()
    each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 2, 3, 4)]
    assert [len(one.token_ids) for one in engine.generate(TEXTS, each)] == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="4 prompts and 3 params"):
        engine.generate(TEXTS, each[:3])


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ("hello", GREEDY, "pass a list"),
        ([b"abc"], GREEDY, "neither text nor token ids"),
        ([None], GREEDY, "neither text nor token ids"),
        (["a"], {"max_tokens": 2}, "no SamplingParams"),
        (["a"], [None], "no SamplingParams"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_refused(load: Load, prompts: Any, params: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load().generate(prompts, params)


def test_an_output_says_why_its_request_failed(load: Load) -> None:
    params = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3)
    (output,) = load().generate([[1, 2]], params)
    assert (output.finish_reason, (output.error or "").startswith("no token is left to choose")) == ("error", True)


def test_a_refused_prompt_leaves_nothing_of_the_others_behind(load: Load) -> None:
    engine = load()
    with pytest.raises(RequestError, match="empty"):
        engine.generate([[1, 2], [3], []], GREEDY)
    assert engine.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
    found = engine.stats()
    assert (found.running, found.waiting, found.kv_blocks_used) == (0, 0, 0)


def test_choices_differ_and_share_their_prompt(load: Load) -> None:
    engine = load()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=4, ignore_eos=True)
    found = engine.generate([list(range(1, 30))], params)[0]
    assert len({tuple(choice.token_ids) for choice in found.choices}) == 4
    assert found.token_ids == found.choices[0].token_ids
    assert found.text == found.choices[0].text
    assert engine.stats().prompt_tokens == 29


def test_choice_0_does_not_depend_on_how_many_there_are(load: Load) -> None:
    engine = load()
    prompt = list(range(1, 30))
    many = engine.generate([prompt], SamplingParams(max_tokens=10, seed=5, n=3, ignore_eos=True))[0]
    one = engine.generate([prompt], SamplingParams(max_tokens=10, seed=5, ignore_eos=True))[0]
    assert one.token_ids == many.token_ids


def test_logprobs_come_for_every_token(load: Load) -> None:
    found = load().generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0.0, logprobs=3, ignore_eos=True))[0]
    assert found.logprobs is not None
    assert [one.token_id for one in found.logprobs] == found.token_ids
    # Greedy: the chosen one is the likeliest.
    assert all(one.top[0] == (one.token_id, one.logprob) and len(one.top) == 3 for one in found.logprobs)
    assert load().generate([[1]], GREEDY)[0].logprobs is None


def test_a_prompt_seen_before_is_cached(load: Load) -> None:
    engine = load(block_size=8)
    prompt = list(range(1, 40))
    first, second = engine.generate([prompt], GREEDY)[0], engine.generate([prompt], GREEDY)[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert second.token_ids == first.token_ids
    without = load(block_size=8, enable_prefix_caching=False)
    without.generate([prompt], GREEDY)
    assert without.generate([prompt], GREEDY)[0].cached_tokens == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, seed=11, top_p=0.9, n=2, ignore_eos=True)])
def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(load: Load, params: SamplingParams) -> None:
    engine = load()
    prompt = list(range(1, 25))
    whole = engine.generate([prompt], params)[0]
    for done in (1, 7, 11, 12):
        resume = [choice.token_ids[:done] for choice in whole.choices]
        events = events_of(load(), Request("again", prompt, params, resume=resume))
        for i, choice in enumerate(whole.choices):
            own = [event for event in events if event.choice == i]
            assert own[0].index == done
            assert [token for event in own for token in event.token_ids] == choice.token_ids[done:]
            assert own[-1].finish_reason == "length"


def test_it_tells_the_time_in_which_it_computed_what_an_earlier_worker_had(load: Load) -> None:
    engine = load(enable_prefix_caching=False)
    prompt, resume = list(range(20, 60)), [[1, 2, 3]]
    events_of(engine, Request("new", prompt, GREEDY))
    assert engine.stats().recompute_s == 0
    again = Request("again", prompt, GREEDY, resume=resume, taken_over=True)
    events_of(engine, again)
    until(lambda: engine.stats().recompute_s > 0)  # an end may be told before its step is
    assert engine.stats().recompute_s < again.course.engine_s


def test_stats_tell_what_was_done(load: Load, device: torch.device) -> None:
    engine = load(block_size=8)
    engine.generate([[1, 2, 3], [4, 5]], GREEDY)
    found = engine.stats()
    assert (found.prompt_tokens, found.generated_tokens, found.cached_tokens, found.preemptions) == (5, 24, 0, 0)
    assert found.kv_tokens_total == engine.kv_tokens_total == found.kv_blocks_total * 8
    assert (found.dtype, found.compute_dtype, found.device) == ("float32", "float32", device.type)
    assert 12 <= found.steps <= 24
    assert found.last_step_ms > 0
    assert engine.preempted() == []


def test_an_interrupted_generate_leaves_nothing_running(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    go_on = threading.Event()
    # So that it has not told all tokens before that.
    engine.on_step = lambda: waited(go_on)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module._Collector, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2]] * 3, SamplingParams(max_tokens=400, ignore_eos=True))
    go_on.set()
    assert engine.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
    found = engine.stats()
    assert (found.running, found.waiting, found.kv_blocks_used) == (0, 0, 0)
    assert found.generated_tokens < 400


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_step_tells_what_it_has_computed(load: Load, overlap: int) -> None:
    engine = load(enable_prefix_caching=False, overlap=overlap)
    works: list[StepWork] = []

    def on_step() -> None:
        work = engine.last_work
        if work is not None and not any(work is one for one in works):
            works.append(work)

    engine.on_step = on_step
    engine.draws(50.0)
    began = time.monotonic()
    requests = [Request("short", [1, 2, 3], GREEDY), Request("long", list(range(20, 60)), GREEDY)]
    events: list[Event] = []
    for request in requests:
        engine.submit(request, events.append)
    until(lambda: sum(event.finish_reason is not None for event in events) == 2)
    made = sum(len(event.token_ids) for event in events)
    until(lambda: sum(work.generated for work in works) == made)  # an end may be told before its step is
    assert sum(work.prompt_tokens for work in works) == 43
    assert sum(work.decodes for work in works) >= 22
    assert max(work.decodes for work in works) == 2
    assert all(work.seconds > 0 for work in works)
    short, long = (request.course.engine_s for request in requests)
    assert long > short > 0
    assert short + long == pytest.approx(sum(work.seconds for work in works)), "each step's time is somebody's"
    assert [request.course.joules for request in requests] == pytest.approx([50 * short, 50 * long])
    assert sum(work.tokens for work in works) == 43 + sum(work.decodes for work in works)
    assert works[0].context == works[0].tokens
    assert all(work.context > work.tokens for work in works if not work.prompt_tokens)
    time.sleep(0.05)  # nobody's step
    engine.generate([[1, 2, 3]], GREEDY)
    assert sum(work.seconds for work in works) <= time.monotonic() - began - 0.05


def test_sampling_takes_place_only_where_a_prompt_is_complete(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk in the middle of a prompt costs no head and no sampling."""
    engine = load(max_num_batched_tokens=8, kernels="reference")
    sizes: list[int] = []

    def counted(logits: torch.Tensor, batch: SamplingBatch, candidates: Any) -> Any:
        sizes.append(len(logits))
        return sample(logits, batch, candidates)

    monkeypatch.setattr(runner_module, "sample", counted)
    engine.generate([list(range(1, 60))], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert sizes == [1, 1, 1]
    assert engine.stats().steps == 8 + 2
