"""`/v1/chat/completions` over real HTTP: what is queued, and what is answered."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from redis import Redis

from engine.text import ChatTemplate, Tokenizer
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import Task
from producers.gateway.openai.parameters import LEAST_TOP_P
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, TINY, Ask, Open
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, chunks, ends, says, send

TOKENIZER = Tokenizer.from_folder(TINY)
TEMPLATE = ChatTemplate.from_folder(TINY)


def prompt_of(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    assert TEMPLATE is not None
    return TOKENIZER.encode(TEMPLATE.render(messages, **options), add_special_tokens=False)


@pytest.mark.parametrize("inline", [True, False], ids=["small", "large"])
def test_the_answer_has_openais_shape(
    chat: Ask, answering: Answering, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.gateway.openai.answer.INLINE", 1000 if inline else 0)
    answer = chat().json()
    (record,) = answering.records
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "id": f"chatcmpl-{record.id}",
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": f"fp_{CARD.version}_test",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_the_messages_are_queued_as_the_template_writes_them(chat: Ask, answering: Answering) -> None:
    chat()
    task = answering.records[0].task
    assert task["prompt"] == prompt_of(MESSAGES)
    assert task["prompt"][0] == CARD.bos_token_id
    assert task["ttl"] == 300


def test_parameters_reach_the_task(chat: Ask, answering: Answering) -> None:
    chat(
        temperature=0.25, top_p=0.5, top_k=7, n=1, seed=11, stop=["a", "b"], max_completion_tokens=9, min_tokens=2,
        ignore_eos=True, stop_token_ids=[3], logprobs=True, top_logprobs=4, service_tier="flex", metadata={"k": "v"},
        user="u", parallel_tool_calls=True, store=False, response_format={"type": "text"}, frequency_penalty=None,
    )  # fmt: skip
    task = answering.records[0].task
    wanted = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 11, "stop": ["a", "b"], "max_tokens": 9,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "logprobs": 4, "tier": "flex",
        "metadata": {"k": "v"},
    }  # fmt: skip
    assert {name: task.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("seed", "stamped"), [(5, 5), (-2, (1 << 63) - 2), (-(1 << 63), 0), ((1 << 63) - 1, (1 << 63) - 1)]
)
def test_a_negative_seed_is_one_of_a_tasks_seeds(chat: Ask, answering: Answering, seed: int, stamped: int) -> None:
    assert chat(seed=seed).status_code == 200
    assert answering.records[0].task["seed"] == stamped


def test_minus_one_asks_for_any_seed(chat: Ask, answering: Answering) -> None:
    for _ in range(2):
        assert chat(seed=-1).status_code == 200
    assert len({record.task["seed"] for record in answering.records}) == 2


def test_no_alternatives_need_no_logprobs(chat: Ask, answering: Answering) -> None:
    assert chat(top_logprobs=0, logprobs=False).json()["choices"][0]["logprobs"] is None
    assert "logprobs" not in answering.records[0].task


def test_what_asks_for_nothing_is_taken(chat: Ask, answering: Answering) -> None:
    for fields in (
        *({"stop": stop} for stop in ("x", ["x", "y"], [], None)),
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": None, "top_logprobs": None},
        {"stream": False, "stream_options": None},
        {"stream": True, "stream_options": {}},
        {"skip_special_tokens": True, "spaces_between_special_tokens": False, "use_beam_search": False},
        {"tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True},
        {"store": False, "user": "u", "safety_identifier": "s", "metadata": {}, "logit_bias": {}},
        {"service_tier": "auto", "modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium"},
        {"n": None, "seed": None, "max_tokens": None, "max_completion_tokens": 5},
    ):
        answer = chat(**fields)
        assert answer.status_code == 200, (fields, answer.text)


def test_a_model_decides_what_was_left_open(chat: Ask, answering: Answering) -> None:
    chat(temperature=None)
    task = answering.records[0].task
    assert (task["temperature"], task.get("max_tokens")) == (CARD.defaults["temperature"], None)


@pytest.mark.parametrize(
    ("asked", "tier", "said"),
    [
        (None, "default", "default"),
        ("auto", "default", "default"),
        ("default", "default", "default"),
        ("flex", "flex", "flex"),
        ("scale", "default", "default"),
        ("priority", "priority", "priority"),
        ("fast", "priority", "priority"),
    ],
)
def test_a_service_tier_is_a_tier(chat: Ask, answering: Answering, asked: str | None, tier: str, said: str) -> None:
    assert chat(service_tier=asked).json()["service_tier"] == said
    assert answering.records[0].tier == tier


USER: dict[str, Any] = {"role": "user", "content": "hi"}


class TestMessages:
    @pytest.mark.parametrize(
        ("sent", "read"),
        [
            ([USER | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], [("user", "a\nb")]),
            ([{"role": "developer", "content": "Be brief."}, USER], [("system", "Be brief."), ("user", "hi")]),
            *(
                ([USER, {"role": "assistant", **none}, USER], [("user", "hi"), ("assistant", ""), ("user", "hi")])
                for none in ({"content": None}, {}, {"content": ""})
            ),
            ([USER | {"id": "m", "cache_control": {}, "\ud800": 1, "k" * 99: []}], [("user", "hi")]),
        ],
        ids=["parts are paragraphs", "a developer is the system", *["an answer without text"] * 3, "more is ignored"],
    )
    def test_are_what_the_template_reads(
        self, chat: Ask, answering: Answering, sent: list[Any], read: list[tuple[str, str]]
    ) -> None:
        answer = chat(messages=sent)
        assert answer.status_code == 200, answer.text
        wanted = prompt_of([{"role": role, "content": content} for role, content in read])
        assert answering.records[0].task["prompt"] == wanted

    def test_an_answer_is_taken_as_it_was_sent(self, chat: Ask, answering: Answering) -> None:
        said = chat().json()["choices"][0]["message"]
        answer = chat(messages=[*MESSAGES, said | {"audio": None, "tool_calls": None}, *MESSAGES])
        assert answer.status_code == 200, answer.text
        wanted = prompt_of([*MESSAGES, {"role": "assistant", "content": "Hello, world"}, *MESSAGES])
        assert answering.records[1].task["prompt"] == wanted

    def test_a_final_message_is_gone_on_with(self, chat: Ask, answering: Answering) -> None:
        begun = [*MESSAGES, {"role": "assistant", "content": "def f("}]
        chat(messages=begun, continue_final_message=True)
        prompt = answering.records[0].task["prompt"]
        assert TOKENIZER.decode(prompt).endswith("def f(")
        assert prompt == prompt_of(begun, add_generation_prompt=False, continue_final_message=True)

    def test_what_the_template_refuses_is_told_in_its_words(self, valkey: Redis, model: str, open_door: Open) -> None:
        """By a gateway of its own: one remembers a card for 2 s."""
        template = b"{{ raise_exception('roles must alternate') }}"
        digest = hashlib.sha256(template).hexdigest()
        valkey.set(keys.blob(digest), template)
        card = replace(CARD, files={**CARD.files, "chat_template.jinja": digest})
        valkey.hset(keys.MODELS, CARD.name, card.to_json())
        answer = send(open_door().http, "/v1/chat/completions", {"model": model, "messages": MESSAGES})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert "roles must alternate" in error["message"]


def streamed(said: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in said for choice in chunk["choices"])


class TestStream:
    def test_role_content_reason_and_done(self, chat: Ask, answering: Answering) -> None:
        *said, done = chunks(chat(stream=True))
        assert done == "[DONE]"
        assert said[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert streamed(said) == "Hello, world"
        assert [c["choices"][0]["finish_reason"] for c in said] == [None] * (len(said) - 1) + ["stop"]
        assert said[-1]["choices"][0]["delta"] == {}
        heads = [{name: chunk[name] for name in chunk if name not in ("choices", "created")} for chunk in said]
        assert heads == [
            {
                "id": f"chatcmpl-{answering.records[0].id}",
                "object": "chat.completion.chunk",
                "model": "tiny",
                "system_fingerprint": f"fp_{CARD.version}_test",
                "service_tier": "default",
            }
        ] * len(said)

    def test_usage_is_the_last_chunk_where_asked_for(self, chat: Ask, answering: Answering) -> None:
        *said, usage, _ = chunks(chat(stream=True, stream_options={"include_usage": True}))
        assert [chunk["usage"] for chunk in said] == [None] * len(said)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 10

    def test_usage_so_far_is_in_every_chunk_where_asked_for(
        self, client: OpenAI, model: str, answering: Answering
    ) -> None:
        answering.scripts = [says("a", "", "b", n=2)]
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        *said, _ = client.chat.completions.create(
            model=model, messages=MESSAGES, n=2, stream=True, stream_options=options
        )
        for index in range(2):
            mine = [chunk for chunk in said if chunk.choices[0].index == index]
            used = [chunk.usage for chunk in mine if chunk.usage]
            assert len(used) == len(mine)
            made = [usage.completion_tokens for usage in used]
            assert (made[0], made[-1]) == (0, 3)
            assert made == sorted(made)
            assert {usage.prompt_tokens for usage in used} == {len(prompt_of(MESSAGES))}
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in used)

    def test_every_choice_is_told_apart(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [says("a", "b", n=3)]
        *said, _ = chunks(chat(stream=True, n=3))
        for index in range(3):
            mine = [c["choices"][0] for c in said if c["choices"][0]["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in mine) == "ab"
            assert [c["finish_reason"] for c in mine].count("stop") == 1

    def test_text_is_the_same_in_one_piece_and_in_many(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [says("é", "\u2028", '"\\', "", "🙂\n", "data: x\n\n")]
        whole = chat().json()["choices"][0]["message"]["content"]
        *said, _ = chunks(chat(stream=True))
        assert streamed(said) == whole

    def test_a_task_that_fails_ends_the_stream_with_its_error(self, chat: Ask, answering: Answering) -> None:
        def fails(worker: Any, record: Any) -> None:
            worker.append(record.id, 0, ["a"])
            worker.finish(record.id, [1], status="failed", error={"code": "engine_error", "message": "It broke."})

        answering.scripts = [fails]
        *said, last = chunks(chat(stream=True))
        assert streamed(said) == "a"
        assert last["error"] == {"message": "It broke.", "type": "server_error", "param": None, "code": "engine_error"}

    def test_a_choice_without_a_token_ends_too(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [ends(reasons=["length"])]
        *said, _ = chunks(chat(stream=True))
        assert [c["choices"][0]["finish_reason"] for c in said] == [None, "length"]


class TestLogprobs:
    LOGPROBS = (-0.5, ((0, -0.5), (5, -2.0)))

    def test_tokens_come_with_their_text_and_bytes(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [says("x", "y", logprobs=[self.LOGPROBS])]
        logprobs = chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
        assert logprobs["refusal"] is None
        assert logprobs["content"][0] == {
            "token": "<|endoftext|>",
            "bytes": list(b"<|endoftext|>"),
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "<|endoftext|>", "bytes": list(b"<|endoftext|>"), "logprob": -0.5},
                {"token": "!", "bytes": [33], "logprob": -2.0},
            ],
        }
        assert len(logprobs["content"]) == 2

    def test_they_are_streamed_with_their_tokens(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [says("x", "", "y", logprobs=[self.LOGPROBS])]
        *said, _ = chunks(chat(stream=True, logprobs=True))
        told = [c["choices"][0]["logprobs"] for c in said]
        assert sum(len(one["content"]) for one in told if one) == 3
        assert answering.records[0].task["logprobs"] == 0


class TestPromptLogprobs:
    """A worker scores the prompt: each token has -1.0, and `!` (5) is the likeliest."""

    @staticmethod
    def scores(worker: FakeWorker, record: Record) -> None:
        ids = record.task["prompt"]
        worker.prompt(record.id, ids, [None, *[(-1.0, ((5, -0.5), (6, -2.0)))] * (len(ids) - 1)])
        says("x")(worker, record)

    def test_each_token_is_there_by_id_with_the_likeliest(self, chat: Ask, answering: Answering) -> None:
        answering.scripts = [self.scores]
        answer = chat(prompt_logprobs=2).json()
        first, *rest = answer["prompt_logprobs"]
        ids = prompt_of(MESSAGES)
        assert (first, len(rest)) == (None, len(ids) - 1)
        for token_id, row in zip(ids[1:], rest, strict=True):
            text = TOKENIZER.token_bytes(token_id).decode(errors="replace")
            wanted = {str(token_id): {"logprob": -1.0, "rank": None, "decoded_token": text}}
            likeliest = {
                "5": {"logprob": -0.5, "rank": 1, "decoded_token": "!"},
                "6": {"logprob": -2.0, "rank": 2, "decoded_token": '"'},
            }
            assert row == wanted | likeliest
        assert answer["choices"][0]["message"]["content"] == "x"
        assert answering.records[0].task["prompt_logprobs"] == 2


def test_a_prompt_is_cut_to_its_last_or_first_tokens(chat: Ask, answering: Answering) -> None:
    ids = prompt_of(MESSAGES)
    for asked, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids),
        ({"truncation_side": "right"}, ids),
    ):
        assert chat(**asked).status_code == 200
        assert answering.records[-1].task["prompt"] == [*kept]
    long = [USER | {"content": "pass\n" * 9000}]
    for asked, most in (({}, 1023), ({"max_tokens": 24}, 1000)):
        answer = chat(messages=long, truncate_prompt_tokens=-1, **asked)
        assert answer.status_code == 200, answer.text
        assert answering.records[-1].task["prompt"] == [*prompt_of(long)[-most:]]


def test_token_ids_of_prompt_and_choices_are_answered(chat: Ask, answering: Answering) -> None:
    answering.scripts = [says("a", "b", n=2), says("a")]
    answer = chat(return_token_ids=True, n=2).json()
    assert answer["prompt_token_ids"] == [*prompt_of(MESSAGES)]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[0, 1], [1000, 1001]]
    assert "token_ids" not in chat().json()["choices"][0]
    answering.scripts = [says("a", "", n=2)]
    *parts, _ = chunks(chat(return_token_ids=True, n=2, stream=True))
    assert [part.get("prompt_token_ids") for part in parts] == [[*prompt_of(MESSAGES)]] + [None] * (len(parts) - 1)
    for choice in range(2):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice]
        # A token without text has its chunk, too.
        assert [token for delta in own for token in delta.get("token_ids", [])] == [choice * 1000, choice * 1000 + 1]


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": [USER | {"content": "x " * 3000}]}), ("completions", {"prompt": "x " * 3000})],
)
def test_an_overflow_is_told_in_the_words_that_clients_know(
    client: OpenAI, model: str, path: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", body={"model": model, **asked}, cast_to=object)
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    assert re.match(
        r"This model's maximum context length is 1024 tokens\. However, you requested \d+ tokens", body["message"]
    )


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": LEAST_TOP_P}),
        ({"top_p": 0.0}, {"top_p": LEAST_TOP_P}),
        ({"include_stop_str_in_output": True, "stop": "x"}, {"include_stop": True}),
    ],
)
def test_what_others_call_otherwise_reaches_the_task(
    chat: Ask, complete: Ask, answering: Answering, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    for ask in (chat, complete):
        assert ask(**fields).status_code == 200
        task = answering.records[-1].task
        assert {name: task[name] for name in wanted} == wanted


@pytest.mark.parametrize("output", [1000, 1024, 5000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/tasks"])
def test_an_overflow_names_the_tokens_of_the_prompt_however_long_the_output(
    http: httpx.Client, path: str, output: int
) -> None:
    messages = [{"role": "user", "content": "def f(x):" * 10}]
    body = {"/v1/responses": {"input": messages, "max_output_tokens": output}}.get(
        path, {"messages": messages, "max_tokens": output}
    )
    error = http.post(path, json={"model": "tiny", **body}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    numbers = re.search(r"requested (\d+) tokens \((\d+) in the prompt, (\d+) in the completion", error["message"])
    assert numbers is not None, error
    whole, prompt, completion = map(int, numbers.groups())
    assert (whole, completion) == (prompt + output, output)
    assert prompt > 40


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"guided_json": {"type": "null"}, "guided_decoding_backend": "auto"}, {"json_schema": {"type": "null"}}),
        ({"guided_json": '{"type": "null"}'}, {"json_schema": {"type": "null"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"choice": ["a", "b"], "disable_fallback": False}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True, "json": None}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": False}}, {}),
    ],
)
def test_forms_are_taken_by_their_names_elsewhere(
    chat: Ask, answering: Answering, asked: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert chat(**asked).status_code == 200
    (record,) = answering.records
    expected = Task(model="m", prompt=[1], **kept).formed()
    for name in ("json_schema", "regex", "grammar", "choice"):
        assert record.task.get(name) == (getattr(expected, name) or None), name
