"""Every parameter of a task, from the client library through queue and worker to the engine and back."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.text import Tokenizer
from producers import Client, InvalidTask, Prompt, Result, TaskFailed, Token
from tests.conformance.conftest import TINY, System
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = "def read(path):\n"


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[Client]:
    with Client(system.store_url) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def ask(client: Client, **task: Any) -> Result:
    shared = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return client.submit(**shared | task).result(timeout=PATIENCE_S)


def test_penalties_reach_the_engine(client: Client) -> None:
    plain = Counter(ask(client).token_ids)
    assert max(plain.values()) > 3
    assert max(Counter(ask(client, presence_penalty=2.0, frequency_penalty=2.0).token_ids).values()) < max(
        plain.values()
    )
    assert len(set(ask(client, repetition_penalty=10.0).token_ids)) > len(plain)


def test_lists_reach_the_engine(client: Client, tokenizer: Tokenizer) -> None:
    first = ask(client).token_ids[0]
    assert first not in ask(client, banned_token_ids=[first]).token_ids
    assert first not in ask(client, logit_bias={first: -100}).token_ids
    few = tokenizer.encode("lx")
    free = {"allowed_token_ids": few, "temperature": 50.0, "max_tokens": 60, "seed": 1}
    assert set(ask(client, **free).token_ids) <= set(few)
    assert "xl" in ask(client, **free).text
    assert "xl" not in ask(client, bad_words=["xl"], **free).text


def test_forms_reach_the_engine(client: Client) -> None:
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 3}
    assert set(json.loads(ask(client, json_schema=schema, max_tokens=100).text)) <= {"a", 1}
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", ask(client, regex="[0-9]{3}-[a-f]{2}").text)
    assert ask(client, grammar='start: "a" (" b" | " c")').text in ("a b", "a c")
    with pytest.raises(TaskFailed, match=r"regex cannot be followed.*unclosed group") as failed:
        ask(client, regex="(a")
    assert failed.value.code == "invalid_value"


def test_filters_reach_the_engine(client: Client) -> None:
    """At a high temperature, what only the likeliest tokens pass is as greedy as greedy is."""
    greedy = ask(client).token_ids
    for filter_ in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert ask(client, temperature=2.0, seed=3, **filter_).token_ids == greedy
    assert ask(client, temperature=2.0, seed=3).token_ids != greedy
    typical = ask(client, temperature=2.0, seed=3, typical_p=0.1).token_ids
    assert typical != ask(client, temperature=2.0, seed=3).token_ids


def test_a_stop_string_may_stay(client: Client) -> None:
    whole = ask(client).text
    stop = whole[5:8]
    cut = ask(client, stop=stop)
    kept = ask(client, stop=stop, include_stop=True)
    assert kept.text == cut.text + stop
    assert kept.choices[0].finish_reason == "stop"


def test_a_prompt_is_scored_before_anything_is_said(client: Client, tokenizer: Tokenizer) -> None:
    handle = client.submit(model="tiny", prompt=PROMPT, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    events = list(handle.stream())
    assert [type(event) for event in events[:-1]] == [Prompt, Token, Token, Token]
    assert [event.position for event in events] == [0, 1, 2, 3, 4]
    result = handle.result()
    assert result.prompt_token_ids == tuple(tokenizer.encode(PROMPT))
    assert result.prompt_logprobs is not None
    none, *logprobs = result.prompt_logprobs
    assert none is None
    assert all(one is not None and one[0] <= 0 and len(one[1]) == 2 for one in logprobs)
    assert ask(client, prompt_logprobs=2, max_tokens=0).prompt_logprobs == result.prompt_logprobs


def test_nothing_may_be_asked_for(client: Client) -> None:
    result = ask(client, max_tokens=0, n=2)
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [("", "length")] * 2
    assert result.usage["output_tokens"] == 0


def test_all_candidates_are_counted_and_the_best_given(client: Client) -> None:
    asked = {"temperature": 1.0, "seed": 7, "max_tokens": 8}
    best, every = ask(client, n=1, best_of=4, **asked), ask(client, n=4, logprobs=0, **asked)

    def score(choice: Any) -> float:
        return sum(one[0] for one in choice.logprobs) / len(choice.logprobs)

    assert best.token_ids == max(every.choices, key=score).token_ids
    assert len(best.choices) == 1
    assert best.usage["output_tokens"] == every.usage["output_tokens"] == 32


def test_beams_reach_the_engine(client: Client) -> None:
    """Nothing is drawn, though the model has a temperature of its own, and all come at the end."""
    asked: dict[str, Any] = {"temperature": None, "max_tokens": 6, "beam_width": 4, "n": 3, "length_penalty": 0.0}
    found = ask(client, logprobs=0, **asked)
    totals = [sum(one[0] for one in choice.logprobs or ()) for choice in found.choices]
    assert totals == sorted(totals, reverse=True)
    assert len({choice.token_ids for choice in found.choices}) == 3
    greedy = ask(client, logprobs=0, max_tokens=6)
    assert totals[0] >= sum(one[0] for one in greedy.choices[0].logprobs or ())
    # The prompt's row, and four beams in each further step.
    assert found.usage["output_tokens"] == 1 + 4 * 5
    handle = client.submit(model="tiny", prompt=PROMPT, ignore_eos=True, early_stopping="never", **asked)
    events = [event for event in handle.stream() if isinstance(event, Token)]
    assert [event.token_id for event in events] == [
        token_id for choice in handle.result().choices for token_id in choice.token_ids
    ]


def test_what_only_the_worker_can_know_fails_the_task_with_its_name(client: Client) -> None:
    with pytest.raises(InvalidTask, match="logit_bias"):
        ask(client, logit_bias={1 << 20: 1.0})
    with pytest.raises(TaskFailed, match="no token is left to choose") as failed:
        ask(client, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=3)
    assert failed.value.code == "invalid_value"
