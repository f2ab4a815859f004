"""A model that thinks, from HTTP to the engine and back: its reasoning comes apart, and its budget is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tokenizers

from tests.engine.random_models import write_model
from tests.producers.gateway.conftest import Door, open_door
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from tests.workers.rig import rig as opened_rig
from workers.library.reference import BUNDLED

__all__ = ["open_door"]

pytestmark = pytest.mark.exhaustive

#: As that of Qwen 3's thinking models in short: the prompt opens the reasoning, or closes it where it is told to.
TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
<think>
{% if enable_thinking is defined and enable_thinking is false %}
</think>

{% endif %}{% endif %}"""
BUDGET = 12


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One with random weights, which would never close its reasoning by itself."""
    folder = write_model(
        tmp_path_factory.mktemp("models") / "thinker", tokenizer=False, vocab_size=2050, max_position_embeddings=1024
    )
    backend = tokenizers.Tokenizer.from_file(str(BUNDLED / "tiny" / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((BUNDLED / "tiny" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    with opened_rig() as made:
        made.worker(model=str(folder), engine_factory="workers.runtime.worker:load_engine", engine={"threads": 1})
        yield made


@pytest.fixture
def door(system: Rig, open_door: Callable[..., Door]) -> Door:
    return open_door(broker=system.url, store=system.store_url)


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is two and two?"}]
    shared = {"model": "thinker", "messages": messages, "max_tokens": 60, "seed": 3, "ignore_eos": True}
    return {**shared, **fields}


def test_reasoning_ends_with_its_budget_and_the_answer_follows(door: Door) -> None:
    answer = httpx.post(f"{door.url}/v1/chat/completions", json=body(thinking_budget=BUDGET), timeout=PATIENCE_S).json()
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    assert "</think>" not in json.dumps(choice)
    usage = answer["usage"]
    # Its tokens, the rest of a character that had begun, and the mark.
    assert BUDGET < usage["completion_tokens_details"]["reasoning_tokens"] <= BUDGET + 4
    assert usage["completion_tokens"] == 60


def test_a_stream_has_the_same_in_parts(door: Door) -> None:
    whole = httpx.post(f"{door.url}/v1/chat/completions", json=body(thinking_budget=BUDGET), timeout=PATIENCE_S).json()
    told: dict[str, str] = {"reasoning_content": "", "content": ""}
    asked = body(thinking_budget=BUDGET, stream=True)
    with httpx.stream("POST", f"{door.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for name in told:
                        told[name] += choice["delta"].get(name) or ""
    assert told == {name: whole["choices"][0]["message"][name] for name in told}


def test_a_form_begins_behind_it_and_without_a_budget_there_is_none(door: Door) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    for budget in (BUDGET, 0):
        asked = body(thinking_budget=budget, response_format=form, max_tokens=200, ignore_eos=False)
        (choice,) = httpx.post(f"{door.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S).json()["choices"]
        assert isinstance(json.loads(choice["message"]["content"])["sum"], int)
        assert bool(choice["message"].get("reasoning_content")) == bool(budget)
