"""`/v1/completions` over real HTTP, as harnesses and old clients send it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from redis import Redis

from engine.text import Tokenizer
from producers.contract import keys
from tests.producers.gateway.conftest import CARD, TINY, Ask, Open, publish
from tests.producers.gateway.openai.conftest import Answering, chunks, nothing_written, says, send

TOKENIZER = Tokenizer.from_folder(TINY)


def test_the_answer_has_openais_shape(complete: Ask, answering: Answering) -> None:
    answer = complete().json()
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer.pop("usage")["total_tokens"] == 10
    assert answer == {
        "id": f"cmpl-{answering.records[0].id}",
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": f"fp_{CARD.version}_test",
        "choices": [{"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop"}],
    }


def test_sixteen_tokens_are_made_unless_told_otherwise(complete: Ask, answering: Answering) -> None:
    complete()
    complete(max_tokens=3)
    complete(prompt=[5] * (CARD.context_length - 4))
    assert [record.task["max_tokens"] for record in answering.records] == [16, 3, 4]


def test_a_service_tier_is_told_where_it_was_asked_for(complete: Ask, answering: Answering) -> None:
    assert complete(service_tier="fast").json()["service_tier"] == "priority"
    assert answering.records[0].tier == "priority"


def test_each_choice_has_the_token_ids_of_its_cut_prompt_and_its_own(complete: Ask, answering: Answering) -> None:
    answering.scripts = [says("a", "b", n=2), says("a", n=2)]
    asked = {"n": 2, "return_token_ids": True, "truncate_prompt_tokens": 2}
    choices = complete(prompt=[[5, 6, 7], [8]], **asked).json()["choices"]
    assert sorted(record.task["prompt"] for record in answering.records) == [[6, 7], [8]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[6, 7], [6, 7], [8], [8]]
    assert sorted(len(choice["token_ids"]) for choice in choices) == [1, 1, 2, 2]
    assert [choice["token_ids"][0] for choice in choices] == [0, 1000, 0, 1000]
    answering.scripts = [says("a", "", n=2), says("a", n=2)]
    *parts, _ = chunks(complete(prompt=[[5, 6, 7], [8]], stream=True, **asked))
    for choice in choices:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        prompts = [part["prompt_token_ids"] for part in own if "prompt_token_ids" in part]
        assert prompts == [choice["prompt_token_ids"]] == [own[0]["prompt_token_ids"]]
        assert next(token for part in own for token in part["token_ids"]) == choice["token_ids"][0]
    answering.scripts = [says("a")]
    complete(prompt=[5] * 2000, truncate_prompt_tokens=-1)
    assert len(answering.records[-1].task["prompt"]) == CARD.context_length - 16


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "queued"),
        [
            ("def f", ["def f"]),
            (["def f"], ["def f"]),
            (["def f", "import"], ["def f", "import"]),
            ([5, 6], [[5, 6]]),
            ([[5, 6]], [[5, 6]]),
            ([[5], [6, 7]], [[5], [6, 7]]),
            (["a", [5]], ["a", [5]]),
        ],
    )
    def test_each_prompt_is_a_task(self, complete: Ask, answering: Answering, prompt: Any, queued: list[Any]) -> None:
        answer = complete(prompt=prompt)
        assert answer.status_code == 200, answer.text
        wanted = [TOKENIZER.encode(one) if isinstance(one, str) else one for one in queued]
        assert sorted(record.task["prompt"] for record in answering.records) == sorted(wanted)
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(queued)))

    def test_choices_are_in_order_of_prompts_and_usage_is_of_all(self, complete: Ask, answering: Answering) -> None:
        def by_prompt(worker: Any, record: Any) -> None:
            (first, *_) = record.task["prompt"]
            time.sleep(0.05 if first == 5 else 0)  # the first prompt is answered last
            for choice in range(2):
                worker.append(record.id, 0, [f"{first}.{choice}"], choice=choice, finish_reason="length")
            worker.finish(record.id, [1, 1], reasons=["length", "length"], prompt_tokens=1)

        answering.scripts = [by_prompt]
        answer = complete(prompt=[[5], [6], [7]], n=2).json()
        assert [c["text"] for c in answer["choices"]] == ["5.0", "5.1", "6.0", "6.1", "7.0", "7.1"]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 6)

    def test_a_text_may_come_without_the_tokenizers_own_tokens(self, complete: Ask, answering: Answering) -> None:
        complete(prompt="<|user|>\nx", add_special_tokens=False)
        assert answering.records[0].task["prompt"] == TOKENIZER.encode("<|user|>\nx", add_special_tokens=False)

    @pytest.mark.parametrize("special", [True, False])
    def test_an_empty_text_is_the_beginning_of_a_document(
        self, complete: Ask, answering: Answering, special: bool
    ) -> None:
        for prompt in ("", ["", "def f"]):
            answer = complete(prompt=prompt, echo=True, add_special_tokens=special).json()
            assert answer["choices"][0]["text"] == "Hello, world"
        assert sorted(len(record.task["prompt"]) for record in answering.records) == [1, 1, 2]
        assert [CARD.bos_token_id] in [record.task["prompt"] for record in answering.records]

    @pytest.mark.parametrize(
        ("has", "wanted"),
        [({"bos_token_id": None}, [CARD.eos_token_ids[0]]), ({"bos_token_id": None, "eos_token_ids": []}, None)],
    )
    def test_a_model_without_a_beginning_begins_with_an_end_or_refuses(
        self,
        open_door: Open,
        answering: Answering,
        valkey: Redis,
        has: dict[str, Any],
        wanted: list[int] | None,
    ) -> None:
        valkey.hset(keys.MODELS, "tiny", json.dumps({**json.loads(CARD.to_json()), **has}))
        # a gateway that knows no other "tiny"
        http = open_door().http
        answer = send(http, "/v1/completions", {"model": "tiny", "prompt": ["x", ""]})
        if wanted is None:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "empty_prompt", "prompt[1]")
            assert error["message"].startswith("prompt[1] is empty")
            assert nothing_written(valkey)
        else:
            assert wanted in [record.task["prompt"] for record in answering.records]

    @pytest.mark.parametrize(
        ("prompt", "param", "says"),
        [
            ([], "prompt", "empty"),
            ([[5], []], "prompt[1]", "prompt[1] is empty"),
            ([[5], [-1]], "prompt[1]", "prompt[1][0] is -1"),
            ([5, "a"], "prompt", 'prompt[1] is "a"'),
            ([5, [6]], "prompt", "prompt[1] is [6]"),
            ([[5], [[6]]], "prompt[1]", "prompt[1][0] is [6]"),
            ({"a": 1}, "prompt", "text or a list"),
            (5, "prompt", "text or a list"),
            ([[5]] * 257, "prompt", "at most 256"),
            ([[5], [2048]], "prompt[1]", "0 to 2047"),
            ([[5], [5] * 1024], "prompt[1]", "1024 in the prompt"),
            (["a", "pass\n" * 2000], "prompt[1]", "context"),
        ],
    )
    def test_one_bad_prompt_refuses_all(self, complete: Ask, valkey: Redis, prompt: Any, param: str, says: str) -> None:
        answer = complete(prompt=prompt)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
        assert nothing_written(valkey)


class TestStream:
    def test_text_reason_usage_and_done(self, complete: Ask, answering: Answering) -> None:
        *said, usage, done = chunks(complete(stream=True, stream_options={"include_usage": True}))
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in said) == "Hello, world"
        assert [c["choices"][0]["finish_reason"] for c in said] == [None] * (len(said) - 1) + ["stop"]
        assert {c["object"] for c in said} == {"text_completion"}
        assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 10)

    @pytest.mark.parametrize("echo", [False, True])
    def test_usage_so_far_is_in_every_chunk_where_asked_for(
        self, complete: Ask, answering: Answering, echo: bool
    ) -> None:
        answering.scripts = [says("a", "b", n=2)]
        options = {"include_usage": True, "continuous_usage_stats": True}
        *said, _, _ = chunks(complete(stream=True, prompt=[[5], [5, 6]], n=2, echo=echo, stream_options=options))
        for index in range(4):
            used = [chunk["usage"] for chunk in said if chunk["choices"][0]["index"] == index]
            assert {one["prompt_tokens"] for one in used} == {1 + index // 2}
            assert used[-1]["completion_tokens"] == 2
            assert (used[0]["completion_tokens"] == 0) == echo

    def test_usage_so_far_goes_with_usage(self, complete: Ask, answering: Answering) -> None:
        *said, _ = chunks(complete(stream=True, stream_options={"continuous_usage_stats": True}))
        assert not any("usage" in chunk for chunk in said)

    def test_several_prompts_and_choices_come_as_they_are_made(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [says("a", "b", n=2)]
        *said, _ = chunks(complete(stream=True, prompt=["x", "y"], n=2))
        texts = ["".join(c["choices"][0]["text"] for c in said if c["choices"][0]["index"] == k) for k in range(4)]
        assert texts == ["ab"] * 4
        assert sum(c["choices"][0]["finish_reason"] == "stop" for c in said) == 4


class TestLimitsOfOneAnswer:
    """With a model that has room for more."""

    @pytest.fixture
    def model(self, valkey: Redis) -> str:
        publish(valkey)
        card = {**json.loads(CARD.to_json()), "name": "long", "context_length": 1 << 20}
        valkey.hset(keys.MODELS, "long", json.dumps(card))
        return "long"

    @pytest.mark.parametrize(
        ("asked", "param", "says"),
        [
            ({"prompt": [5] * 20_000, "echo": True, "logprobs": 20}, "logprobs", "logprobs is 20: with 20000 prompt"),
            (
                {"prompt": [5] * 200, "max_tokens": 60_000, "logprobs": 20},
                "logprobs",
                "lower max_tokens, n or logprobs",
            ),
            ({"prompt": [[5], [6]], "max_tokens": 100_000, "n": 64}, "max_tokens", "ask for a stream"),
        ],
    )
    def test_what_is_too_much_is_told_in_the_callers_words(
        self, complete: Ask, valkey: Redis, asked: dict[str, Any], param: str, says: str
    ) -> None:
        answer = complete(**asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
        assert "prompt_logprobs" not in error["message"]
        assert nothing_written(valkey)

    def test_a_stream_may_have_any_length(self, complete: Ask, answering: Answering) -> None:
        answering.scripts, answering.queue = [says("a", n=64)], keys.version_queue("long", CARD.version)
        assert len(chunks(complete(prompt=[[5], [6]], max_tokens=100_000, n=64, stream=True))) > 128
