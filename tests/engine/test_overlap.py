"""A real model says the same whether or not a step is planned while another runs, on both runners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Choice, Engine, EngineConfig, Output, SamplingParams
from engine.execution.device import DeviceRunner
from engine.execution.runner import Runner
from engine.plan import StepPlan
from tests.engine.conftest import Load

PROMPTS = [list(range(1, 1 + length)) for length in (3, 30, 17, 58, 59, 75, 16, 33)]
#: Whatever makes the next token depend on those before it, or ends an output where nobody foresaw it.
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "n": 3, "json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
    {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_logprobs": 1, "regex": "[a-z ,]{2,7}"},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "n": 2, "best_of": 3},
    {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": list(range(0, 320, 5))},
    {"temperature": 1.3, "stop_token_ids": list(range(0, 320, 7)), "n": 2},
    {"temperature": 0.0, "max_tokens": 1},
]


@pytest.fixture(scope="module")
def plain(cramped: EngineConfig, awkward: Path) -> Iterator[Engine]:
    with Engine.load(awkward, cramped) as made:
        yield made


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Output]:
    """Of `mixed`."""
    return plain.generate(PROMPTS, mixed())


def mixed() -> list[SamplingParams]:
    return [SamplingParams(**({"max_tokens": 10, "seed": 7 + i} | each)) for i, each in enumerate(MIXED)]


def said(outputs: list[Output]) -> list[Any]:
    def of(choice: Choice) -> tuple[list[int], str, str | None]:
        return choice.token_ids, choice.text, choice.finish_reason

    return [([of(choice) for choice in one.choices], one.prompt_tokens) for one in outputs]


def scored(outputs: list[Output]) -> list[tuple[int, float]]:
    return [
        (each.token_id, pytest.approx(each.logprob, abs=1e-4))
        for one in outputs
        for each in [*(one.prompt_logprobs or ()), *(one.logprobs or ())]
        if each is not None
    ]


def test_whatever_is_asked_for(load_cramped: Load, expected: list[Output]) -> None:
    found = load_cramped(overlap=1).generate(PROMPTS, mixed())
    assert said(found) == said(expected)
    assert scored(found) == scored(expected)
    assert {choice.finish_reason for one in found for choice in one.choices} == {"stop", "length"}


def test_bad_words_that_begin_with_a_token_in_flight(load_cramped: Load, plain: Engine) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = PROMPTS[:4]
    text = plain.generate([prompts[1]], greedy)[0].text
    word = next(word for word in (text[i : i + 3] for i in range(len(text))) if word.isascii() and word.isprintable())
    params = [replace(greedy, bad_words=(word,) if i % 2 else ()) for i in range(len(prompts))]
    found = load_cramped(overlap=1).generate(prompts, params)
    assert said(found) == said(plain.generate(prompts, params))
    assert word not in found[1].text


@pytest.mark.parametrize("methods", [("execute", "_launch"), ("collect", "collect")], ids=["launched", "collected"])
def test_steps_that_fail_change_no_output(
    load_cramped: Load, expected: list[Output], monkeypatch: pytest.MonkeyPatch, methods: tuple[str, str]
) -> None:
    """With one in flight before them, or one after: neither the tokens nor what the runner has counted of them."""
    ahead = load_cramped(overlap=1)
    calls = itertools.count()

    def failing(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def call(self: Any, what: Any) -> Any:
            found = plain(self, what)
            alone = isinstance(what, StepPlan) and len(what.rows) == 1
            if not alone and next(calls) % 6 == 3:
                raise ZeroDivisionError("now and then")
            return found

        return call

    for runner, method in zip((Runner, DeviceRunner), methods, strict=True):
        monkeypatch.setattr(runner, method, failing(getattr(runner, method)))
    assert said(ahead.generate(PROMPTS, mixed())) == said(expected)
    assert next(calls) > 6
