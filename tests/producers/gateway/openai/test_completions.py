"""`/v1/completions` over real HTTP, as harnesses and old clients send it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import Tokenizer
from tests.producers.gateway.conftest import CARD, TINY
from tests.producers.gateway.openai.conftest import Answering, chunks, nothing_written, says

Ask = Callable[..., httpx.Response]
TOKENIZER = Tokenizer.from_folder(TINY)


def test_the_answer_has_openais_shape(complete: Ask, answering: Answering) -> None:
    answer = complete().json()
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer.pop("usage")["total_tokens"] == 10
    assert answer == {
        "id": f"cmpl-{answering.records[0].id}",
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "fp_test",
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

    @pytest.mark.parametrize(
        ("prompt", "param", "says"),
        [
            ([], "prompt", "empty"),
            ("", "prompt", "empty"),
            (["a", ""], "prompt[1]", "prompt[1] is empty"),
            ([[5], []], "prompt[1]", "prompt[1] is empty"),
            ([[5], [-1]], "prompt[1]", "prompt[1][0] is -1"),
            ([5, "a"], "prompt", "prompt[1] is 'a'"),
            ([5, [6]], "prompt", "prompt[1] is [6]"),
            ([[5], [[6]]], "prompt[1]", "prompt[1][0] is [6]"),
            ({"a": 1}, "prompt", "text or a list"),
            (5, "prompt", "text or a list"),
            ([[5]] * 257, "prompt", "at most 256"),
            ([[5], [2048]], "prompt[1]", "0 to 2047"),
            ([[5], [5] * 1024], "prompt[1]", "1024 prompt tokens"),
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

    def test_several_prompts_and_choices_come_as_they_are_made(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [says("a", "b", n=2)]
        *said, _ = chunks(complete(stream=True, prompt=["x", "y"], n=2))
        texts = ["".join(c["choices"][0]["text"] for c in said if c["choices"][0]["index"] == k) for k in range(4)]
        assert texts == ["ab"] * 4
        assert sum(c["choices"][0]["finish_reason"] == "stop" for c in said) == 4


class TestEcho:
    def test_the_prompt_comes_first(self, complete: Ask, answering: Answering) -> None:
        ids = TOKENIZER.encode("class Q")
        assert complete(echo=True).json()["choices"][0]["text"] == "def fHello, world"
        assert complete(echo=True, prompt=ids).json()["choices"][0]["text"] == "class QHello, world"

    def test_a_stream_begins_with_it(self, complete: Ask, answering: Answering) -> None:
        *said, _ = chunks(complete(echo=True, stream=True))
        assert "".join(c["choices"][0]["text"] for c in said) == "def fHello, world"


def scores(*pieces: str) -> Any:
    """A worker that scores the prompt too: token k has the log probability -k, and one alternative, `!`."""

    def play(worker: Any, record: Any) -> None:
        ids = record.task["prompt"]
        found = [None, *((-float(k), ((5, -0.25),)) for k in range(1, len(ids)))]
        worker.prompt(record.id, ids, found)
        says(*pieces, logprobs=[(-0.5, ())])(worker, record)

    return play


class TestScores:
    """echo and logprobs: how likely the prompt is, as harnesses ask for it."""

    PROMPT = "class Queue:\n    pass 🙂"

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_the_prompts_tokens_come_before_the_outputs(
        self, complete: Ask, answering: Answering, as_ids: bool
    ) -> None:
        answering.scripts = [scores("x", "y")]
        ids = TOKENIZER.encode(self.PROMPT)
        (choice,) = complete(prompt=ids if as_ids else self.PROMPT, echo=True, logprobs=1).json()["choices"]
        assert answering.records[0].task["prompt_logprobs"] == 1
        assert choice["text"] == self.PROMPT + "xy"
        logprobs = choice["logprobs"]
        count = len(ids)
        assert logprobs["token_logprobs"] == [None, *(-float(k) for k in range(1, count)), -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1]["!"] == -0.25
        assert len(logprobs["top_logprobs"][1]) == 2, "the token itself is there, too"
        ends = [*logprobs["text_offset"][1:], len(choice["text"])]
        texts = [choice["text"][at:end] for at, end in zip(logprobs["text_offset"], ends, strict=True)]
        assert "".join(texts) == choice["text"]
        plain = [(name, text) for name, text in zip(logprobs["tokens"], texts, strict=True) if "bytes:" not in name]
        assert all(name == text for name, text in plain[: count - 4])

    def test_nothing_need_be_generated(self, complete: Ask, answering: Answering) -> None:
        def only_scores(worker: Any, record: Any) -> None:
            worker.prompt(record.id, record.task["prompt"], [None, *[(-1.0, ())] * (len(record.task["prompt"]) - 1)])
            worker.finish(record.id, [0], reasons=["length"])

        answering.scripts = [only_scores]
        for stream in (False, True):
            answer = complete(prompt="import os", echo=True, logprobs=0, max_tokens=0, stream=stream)
            (choice,) = chunks(answer)[0]["choices"] if stream else answer.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("import os", "length")
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0]

    def test_a_stream_of_two_prompts_begins_each_choice_with_its_own(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [scores("x")]
        *said, _ = chunks(complete(prompt=["import os", "def f"], echo=True, logprobs=1, stream=True))
        for index, prompt in enumerate(["import os", "def f"]):
            mine = [c["choices"][0] for c in said if c["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in mine) == prompt + "x"
            values = [value for one in mine for value in one["logprobs"]["token_logprobs"]]
            assert values == [None, *(-float(k) for k in range(1, len(TOKENIZER.encode(prompt)))), -0.5]


class TestLogprobs:
    def test_the_four_lists(self, complete: Ask, answering: Answering) -> None:
        top = ((9, -0.1), (6, -3.0))
        answering.scripts = [says("ab", "c", logprobs=[(-5.0, top)])]
        logprobs = complete(logprobs=2).json()["choices"][0]["logprobs"]
        # The fake worker's tokens are 0 and 1; neither is among the likeliest.
        assert logprobs == {
            "tokens": ["<|endoftext|>", "<|user|>"],
            "token_logprobs": [-5.0, -5.0],
            "top_logprobs": [{"%": -0.1, '"': -3.0, name: -5.0} for name in ("<|endoftext|>", "<|user|>")],
            "text_offset": [0, 2],
        }
        assert answering.records[0].task["logprobs"] == 2

    def test_offsets_go_on_through_a_stream(self, complete: Ask, answering: Answering) -> None:
        answering.scripts = [says("ab", "", "c", logprobs=[(-1.0, ())])]
        *said, _ = chunks(complete(logprobs=0, stream=True))
        offsets = [at for c in said for at in (c["choices"][0]["logprobs"] or {}).get("text_offset", [])]
        assert offsets == [0, 2, 2]

    def test_half_a_character_is_named_by_its_bytes(self, complete: Ask, answering: Answering) -> None:
        (half, *_) = TOKENIZER.encode("🙂")
        data = TOKENIZER.token_bytes(half)
        answering.scripts = [says("x", logprobs=[(-1.0, ((half, -0.5),))])]
        (top,) = complete(logprobs=1).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) in top
