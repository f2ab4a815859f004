"""The public face: loading, generating, submitting, looking in, closing, on a real (random) model."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.engine as engine_module
import engine.execution.runner as runner_module
from engine import Engine, EngineConfig, EngineError, Event, ModelError, Output, Request, RequestError, SamplingParams
from engine.plan import StepWork
from engine.sampling import SamplingBatch, sample
from tests.engine.looping import PATIENCE, Listener, until, waited
from tests.engine.random_models import write_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = ["def write_model(folder", "import json\n", "x", "Größe: é ∑"]

Load = Callable[..., Engine]


@pytest.fixture
def load(model_folder: Path, device: torch.device) -> Iterator[Load]:
    """Loads engines on the device, and closes them."""
    engines: list[Engine] = []

    def make(folder: Path = model_folder, **settings: Any) -> Engine:
        settings = {"max_num_seqs": 8, "kv_cache_bytes": 1 << 20, "threads": 1} | settings
        engines.append(Engine.load(folder, EngineConfig(device=device.type, **settings)))
        return engines[-1]

    yield make
    for one in engines:
        one.close()
        # A test may have left requests in: closing ended them.
        assert one.stats().kv_blocks_used == 0


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


def test_one_text_in_place_of_a_list_is_refused(load: Load) -> None:
    with pytest.raises(RequestError, match="pass a list"):
        load().generate("hello", GREEDY)


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


def test_a_stop_token_ends_the_output_and_is_not_in_the_text(load: Load) -> None:
    engine = load()
    free = engine.generate([TEXTS[0]], GREEDY)[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped = engine.generate(
        [TEXTS[0]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
    )[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert engine.tokenizer is not None
    assert stopped.text == engine.tokenizer.decode(free.token_ids[:first])


def test_a_stop_string_is_cut_from_the_text(load: Load) -> None:
    engine = load()
    free = engine.generate([TEXTS[0]], GREEDY)[0]
    stop = next(char for char in free.text[1:] if char.isascii() and char != free.text[0])
    stopped = engine.generate([TEXTS[0]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=[stop]))[
        0
    ]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_prompt_seen_before_is_cached(load: Load) -> None:
    engine = load(block_size=8)
    prompt = list(range(1, 40))
    first, second = engine.generate([prompt], GREEDY)[0], engine.generate([prompt], GREEDY)[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert second.token_ids == first.token_ids
    without = load(block_size=8, enable_prefix_caching=False)
    without.generate([prompt], GREEDY)
    assert without.generate([prompt], GREEDY)[0].cached_tokens == 0


def test_another_tenants_prompt_is_not(load: Load) -> None:
    engine = load(block_size=8)
    prompt = list(range(1, 40))
    found = {}
    for salt in ("a", "b", "a"):
        found[salt] = events_of(engine, Request(f"{salt}", prompt, GREEDY, salt=salt))[-1].cached_tokens
        if salt == "b":
            assert found["b"] == 0
    assert found["a"] == 32


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


def test_submit_returns_before_the_first_event_and_abort_ends_them(load: Load) -> None:
    engine = load()
    entered, go_on = threading.Event(), threading.Event()
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        entered.set()
        waited(go_on)

    engine.submit(Request("a", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)), on_event)
    waited(entered)
    assert engine.abort("a")
    assert not engine.abort("a")
    go_on.set()
    engine.generate([[4]], GREEDY)
    assert len(events) == 1
    assert engine.stats().aborted == 1


def test_too_long_a_prompt_is_refused_at_submit(load: Load) -> None:
    engine = load(max_model_len=32)
    assert engine.max_model_len == 32
    with pytest.raises(RequestError) as refusal:
        engine.submit(Request("a", [1] * 32, GREEDY), lambda event: None)
    assert refusal.value.code == "context_length_exceeded"


def test_a_sequence_may_be_as_long_as_the_cache_has_room_for(load: Load) -> None:
    engine = load(kv_cache_bytes=1 << 15)
    assert engine.kv_capacity < engine.max_model_len
    prompt = [1] * (engine.kv_capacity - GREEDY.max_tokens + 1)
    (output,) = engine.generate([prompt], GREEDY)
    assert len(output.token_ids) == GREEDY.max_tokens
    with pytest.raises(RequestError) as refusal:
        engine.generate([[*prompt, 1]], GREEDY)
    assert refusal.value.code == "kv_capacity_exceeded"


def test_a_token_outside_of_the_vocabulary_is_refused(load: Load) -> None:
    with pytest.raises(RequestError, match="token id 320"):
        load().generate([[1, 320]], GREEDY)


def test_a_model_without_tokenizer_serves_token_ids(tmp_path: Path, load: Load) -> None:
    engine = load(write_model(tmp_path, tokenizer=False))
    assert engine.tokenizer is None
    assert engine.card is None
    found = engine.generate([[1, 2, 3]], GREEDY)[0]
    assert (len(found.token_ids), found.text) == (12, "")
    with pytest.raises(RequestError, match=r"no tokenizer.json"):
        engine.generate(["text"], GREEDY)


def test_the_end_token_ends_also_without_a_tokenizer(tmp_path: Path, load: Load) -> None:
    free = load(write_model(tmp_path / "free", tokenizer=False)).generate([[1, 2, 3]], GREEDY)[0].token_ids
    for eos in (free[3], [free[3], 319]):
        folder = write_model(tmp_path / f"{eos}", tokenizer=False, eos_token_id=eos)
        found = load(folder).generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0))[0]
        assert found.token_ids == free[: free.index(free[3]) + 1]
        assert found.finish_reason == "stop"


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


def test_the_fingerprint_tells_dtypes_apart_and_is_stable(load: Load) -> None:
    first, again, other = load(), load(), load(dtype="bfloat16")
    assert re.fullmatch("[0-9a-f]{8}", first.fingerprint)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_bfloat16_weights_give_nearly_the_same_logprobs(load: Load) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
    exact, rounded = (load(dtype=dtype).generate([[5, 6, 7, 8]], params)[0] for dtype in ("float32", "bfloat16"))
    assert exact.logprobs is not None
    assert rounded.logprobs is not None
    assert rounded.logprobs[0].logprob == pytest.approx(exact.logprobs[0].logprob, abs=0.2)


def test_logits_that_are_not_finite_fail_their_request_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    expected = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    poison = 200
    forward = engine._model.forward

    def poisoned(
        tokens: torch.Tensor, positions: torch.Tensor, long: Any, attention: Any, caches: Any, wanted: torch.Tensor
    ) -> torch.Tensor:
        hidden = forward(tokens, positions, long, attention, caches, wanted)
        return hidden.masked_fill((tokens[wanted] == poison)[:, None], float("nan"))

    monkeypatch.setattr(engine._model, "forward", poisoned)
    good, bad = engine.generate([[1, 2, 3], [1, poison]], GREEDY)
    assert good.token_ids == expected
    assert (bad.finish_reason, bad.token_ids) == ("error", [])


def test_a_forward_pass_that_raises_fails_its_request_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(graphs=False)  # what the device is asked for while it records breaks the recording
    expected = [one.token_ids for one in engine.generate([[1, 2, 3], list(range(20, 60))], GREEDY)]
    forward = engine._model.forward

    def raising(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        if 200 in tokens.tolist():
            raise RuntimeError("no such token")
        return forward(tokens, *rest)

    monkeypatch.setattr(engine._model, "forward", raising)
    first, bad, last = engine.generate([[1, 2, 3], [1, 200], list(range(20, 60))], GREEDY)
    assert [first.token_ids, last.token_ids] == expected
    assert bad.finish_reason == "error"


def test_closing_ends_those_who_wait(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    outputs: list[Output] = []
    began = threading.Event()

    def on_step() -> None:
        began.set()
        # Without this it may have told all tokens by then.
        until(lambda: engine._loop._closing)

    engine.on_step = on_step
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    waiting = threading.Thread(target=lambda: outputs.extend(engine.generate([[1, 2]], params)))
    waiting.start()
    waited(began)
    engine.close()
    waiting.join(PATIENCE)
    assert [one.finish_reason for one in outputs] == ["abort"]
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[1]], GREEDY)


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
    assert sum(work.tokens for work in works) == 43 + sum(work.decodes for work in works)
    assert works[0].context == works[0].tokens
    assert all(work.context > work.tokens for work in works if not work.prompt_tokens)
    time.sleep(0.05)  # nobody's step
    engine.generate([[1, 2, 3]], GREEDY)
    assert sum(work.seconds for work in works) <= time.monotonic() - began - 0.05


def test_settings_that_do_not_fit_are_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="max_model_len=513 is more than the model's context of 512"):
        load(max_model_len=513)
    with pytest.raises(EngineError, match="does not hold the KV blocks of a single sequence"):
        load(kv_cache_bytes=10)
    with pytest.raises(ModelError, match=r"has no config.json"):
        Engine.load(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(model_folder: Path) -> None:
    with pytest.raises(EngineError, match="torch finds no CUDA device"):
        Engine.load(model_folder, EngineConfig(device="cuda"))


def test_the_card_and_the_version_are_the_folders(load: Load, model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(model_folder, copy)
    first, second = load().card, load(copy).card
    assert first is not None
    assert second is not None
    assert (second.name, second.version) == ("renamed", first.version)


def test_an_engine_is_a_context_manager(model_folder: Path) -> None:
    with Engine.load(model_folder, EngineConfig(device="cpu", threads=1, kv_cache_bytes=1 << 20)) as engine:
        assert engine.generate([[1]], GREEDY)[0].finish_reason == "length"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("a", [1]), lambda event: None)


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


def test_every_kernel_set_says_the_same(load: Load, device: torch.device) -> None:
    sets = ["reference", "ragged", "sdpa", *(["cpu"] if device.type == "cpu" else [])]
    engines = [load(kernels=name) for name in sets] + [load(kernels="ragged", graphs=False, overlap=1)]
    found = [[one.token_ids for one in engine.generate(TEXTS, GREEDY)] for engine in engines]
    assert all(one == found[0] for one in found)
    assert [engine.stats().kernels for engine in engines] == [*sets, "ragged"]


def test_a_cache_that_the_device_cannot_hold_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90.00 GiB")

    monkeypatch.setattr("engine.execution.placement.DeviceRunner", full)
    with pytest.raises(EngineError, match=r"no memory for a KV cache of \d+ blocks; lower kv_cache_bytes .* 90.00 GiB"):
        load(kernels="ragged")
