"""An engine in deterministic mode says the same to the bit, whatever else it does and however it is set up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, EngineError, Event, Output, Request, SamplingParams
from engine.kernels import select
from engine.sequence import Sequence
from tests.engine.conftest import Load, loading
from tests.engine.deterministic.logits import NATIVE, Bits, recorded
from tests.engine.guessing import Guesser
from tests.engine.looping import together
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.histories import examples

SHARED = [(13 * i) % 301 + 4 for i in range(64)]
PROMPTS = [
    *([(7 * i + k) % 310 + 3 for i in range(length)] for k, length in enumerate((3, 30, 17, 58, 140))),
    [*SHARED, 9, 8, 7],
    [*SHARED, 9, 8, 7, 6, 5],
    SHARED[:40],
]
#: Whatever makes a token depend on those before it, asks for sums over the vocabulary, or makes several of one prompt.
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 1.0, "n": 3, "logprobs": 1},
    {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.3, "prompt_logprobs": 3},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "n": 2, "best_of": 3},
    {"temperature": 1.0, "typical_p": 0.8, "logprobs": 0, "banned_token_ids": [1, 2, 3]},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.01, "n": 2, "allowed_token_ids": list(range(100))},
    {"temperature": 0.7, "max_tokens": 1, "logprobs": 5},
]
PARAMS = [
    SamplingParams(**({"max_tokens": 9, "seed": 7 + i, "ignore_eos": True} | each)) for i, each in enumerate(MIXED)
]
BASE = EngineConfig(
    device="cpu", dtype="float32", threads=1, deterministic=True, overlap=0, max_num_seqs=24, kv_cache_bytes=8 << 20
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("gemma3", marks=NATIVE),
        *(pytest.param(name, marks=[NATIVE, pytest.mark.exhaustive]) for name in ("gemma2", "phi3-longrope")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", seed=3, **(VARIANTS | FAMILIES)[request.param])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[tuple[list[Output], Bits]]:
    """Each by itself, with nothing cached: the outputs, and the logits of each place."""
    with recorded() as bits, Engine.load(folder, replace(BASE, enable_prefix_caching=False)) as engine:
        yield [engine.generate([p], params)[0] for p, params in zip(PROMPTS, PARAMS, strict=True)], bits


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    with loading(folder, BASE) as make:
        yield make


def _right(outputs: list[Output]) -> Callable[[Sequence, list[int]], int]:
    def right(seq: Sequence, tokens: list[int]) -> int:
        """What is known to follow; beyond an output's end, and of candidates, anything."""
        choices = outputs[PARAMS.index(seq.request.params)].choices
        rest = choices[seq.choice % len(choices)].token_ids[len(tokens) - seq.prompt_len :]
        return rest[0] if rest else 5

    return right


def same(outputs: list[Output], expected: list[Output]) -> None:
    for found, wanted in zip(outputs, expected, strict=True):
        assert replace(found, cached_tokens=0) == replace(wanted, cached_tokens=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"overlap": 1},
        {"max_num_seqs": 6, "max_num_batched_tokens": 7},
        {"max_num_seqs": 11, "max_num_batched_tokens": 13, "overlap": 1},
        {"max_num_batched_tokens": 130, "block_size": 4},
        {"threads": 2},
        {"speculate": "lookup", "speculate_adaptive": False, "overlap": 1, "max_num_batched_tokens": 29},
    ],
    ids=["together", "ahead", "chunks of 7", "chunks of 13, ahead", "blocks of 4", "two threads", "guessed, ahead"],
)
def test_together_as_alone(
    load: Load, alone: tuple[list[Output], Bits], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, known = alone
    monkeypatch.setattr("engine.execution.placement.Lookup", lambda slots, vocab: Guesser(_right(expected), 0.7, vocab))
    with recorded() as bits:
        engine = load(**changes)
        same(engine.generate(PROMPTS, PARAMS), expected)
    assert bits
    assert all(known[place] == found for place, found in bits.items() if place in known)
    assert (engine.stats().draft_accepted > 5) == ("speculate" in changes)
    # Steps ahead compute what follows a token that ends an output; nothing else is new.
    assert changes.get("overlap") or bits.keys() <= known.keys()


def test_with_cached_prompts(load: Load, alone: tuple[list[Output], Bits]) -> None:
    engine = load()
    for _ in range(2):
        outputs = engine.generate(PROMPTS, PARAMS)
        same(outputs, alone[0])
    assert sum(one.cached_tokens for one in outputs) > 100


def test_with_too_little_memory_for_all(load: Load, alone: tuple[list[Output], Bits]) -> None:
    tokens = load().kv_tokens_total
    engine = load(kv_cache_bytes=BASE.kv_cache_bytes * 240 // tokens, max_model_len=160, block_size=4)  # type: ignore[operator]  # it is given
    together(engine, len(PROMPTS))
    same(engine.generate(PROMPTS, PARAMS), alone[0])
    assert engine.stats().preemptions > 0


def _resumed(engine: Engine, prompt: list[int], params: SamplingParams, tokens: list[list[int]]) -> list[Event]:
    """What a task gives that another engine has brought so far."""
    events: list[Event] = []
    done = threading.Event()

    def take(event: Event) -> None:
        events.append(event)
        if event.done:
            done.set()

    engine.submit(Request("resumed", prompt, params, resume=tokens), take)
    done.wait()
    return events


@pytest.mark.parametrize("which", few([0, 1, 2, 6], 1, 2))
def test_resumed_at_any_token(load: Load, alone: tuple[list[Output], Bits], which: int) -> None:
    whole, known = alone[0][which], alone[1]
    engine = load()
    for kept in (1, 4, 8):
        with recorded() as bits:
            so_far = [choice.token_ids[:kept] for choice in whole.choices]
            events = _resumed(engine, PROMPTS[which], PARAMS[which], so_far)
        for number, choice in enumerate(whole.choices):
            rest = [token for event in events if event.choice == number for token in event.token_ids]
            assert rest == choice.token_ids[kept:]
            logprobs = [one for event in events if event.choice == number for one in event.logprobs or ()]
            assert logprobs == (choice.logprobs or [])[kept:]
        assert bits
        assert all(known[place] == found for place, found in bits.items())


@pytest.fixture(scope="module")
def busy(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, replace(BASE, max_num_seqs=16, max_num_batched_tokens=40)) as engine:
        yield engine


@settings(max_examples=examples(4, 8), deadline=None)
@given(chosen=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=14), more=st.integers(0, 6))
def test_any_mixture_of_requests(busy: Engine, alone: tuple[list[Output], Bits], chosen: list[int], more: int) -> None:
    others = [[5 + more] * (20 * i + 3) for i in range(more)]
    prompts = [PROMPTS[i] for i in chosen] + others
    params = [PARAMS[i] for i in chosen] + [SamplingParams(max_tokens=5, temperature=1.0)] * more
    same(busy.generate(prompts, params)[: len(chosen)], [alone[0][i] for i in chosen])


@NATIVE
def test_native_kernels_are_the_same_in_either_mode(folder: Path) -> None:
    engines = [Engine.load(folder, replace(BASE, kernels="native", deterministic=mode)) for mode in (True, False)]
    assert engines[0].fingerprint == engines[1].fingerprint
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_kernels_that_do_not_have_it_refuse_it_at_once(kernels: str) -> None:
    with pytest.raises(EngineError, match=f"deterministic needs native kernels on a CPU, .*'{kernels}'"):
        select(torch.device("cpu"), torch.float32, kernels, deterministic=True)
