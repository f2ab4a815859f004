"""The unmodified `openai` client against a real gateway, queue and worker."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionChoice
from pydantic import BaseModel

from engine.text import ModelCard, Tokenizer
from tests.conformance.conftest import TINY, System
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Write the function add(a, b)."},
]
PROMPT = "def read(path):\n"
BODY = {"model": "tiny", "prompt": "import ", "max_tokens": 5}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY})


class Verdict(BaseModel):
    right: bool
    why: Literal["style", "speed", "none of these"]


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=180, max_retries=0) as made:
        yield made


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").owned_by == "penstock"


class TestChat:
    def test_an_answer(self, client: OpenAI, system: System) -> None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, seed=1)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.completion_tokens <= 20
        assert answer.system_fingerprint
        assert answer.service_tier == "default"
        assert system.status(answer.id) == "completed"

    def test_a_prompt_is_scored_as_completions_score_it(self, client: OpenAI) -> None:
        more = {"prompt_logprobs": 0}
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=more)
        assert answer.model_extra is not None
        first, *rows = answer.model_extra["prompt_logprobs"]
        ids = [int(token) for row in rows for token in row]
        assert first is None
        begin = ModelCard.from_folder(TINY).bos_token_id  # with which the template begins
        echo = client.completions.create(model="tiny", prompt=[begin or 0, *ids], echo=True, logprobs=0, max_tokens=0)
        assert echo.choices[0].logprobs is not None
        told = [entry["logprob"] for row in rows for entry in row.values()]
        assert told == pytest.approx(echo.choices[0].logprobs.token_logprobs[1:], abs=1e-3)

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_is_of_the_schema(self, client: OpenAI, stream: bool) -> None:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "response_format": Verdict}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.parse(**asked)
        assert isinstance(answer.choices[0].message.parsed, Verdict)
        assert answer.choices[0].finish_reason == "stop"

    def test_a_stream_says_what_an_answer_in_one_piece_says(self, client: OpenAI) -> None:
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 0.8, "seed": 7, "n": 3}
        whole = client.chat.completions.create(**asked)
        texts, reasons = ["", "", ""], {}
        *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        assert texts == [choice.message.content for choice in whole.choices]
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert len(set(texts)) > 1
        assert whole.usage is not None
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens

    def test_the_clients_own_accumulation_of_a_stream(self, client: OpenAI) -> None:
        # It refuses an answer that was cut at its length.
        asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "seed": 3, "stop": "("}
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content

    def test_logprobs_come_with_their_tokens(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert answer.usage is not None
        assert len(logprobs.content) == answer.usage.completion_tokens
        for token in logprobs.content:
            assert len(token.top_logprobs) == 3
            assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the likeliest"
            assert bytes(token.bytes or []).decode(errors="replace") == token.token
        ended = 1 if answer.choices[0].finish_reason == "stop" else 0  # the token that ends is no part of the text
        said = b"".join(bytes(t.bytes or []) for t in logprobs.content[: len(logprobs.content) - ended])
        assert said.decode(errors="replace") == answer.choices[0].message.content

    def test_an_answer_goes_on_from_a_final_message(self, client: OpenAI) -> None:
        begun = [*MESSAGES, {"role": "assistant", "content": "def add(a, b):\n    return"}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.chat.completions.create(
            model="tiny", messages=begun, max_tokens=5, temperature=0, extra_body=options
        )
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.content.startswith("def")


class TestCompletions:
    def test_an_answer_and_its_stream(self, client: OpenAI) -> None:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "seed": 5}
        whole = client.completions.create(**asked)
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
        assert "".join(pieces) == whole.choices[0].text
        assert len(pieces) > 1

    def test_stop_ends_the_text_before_it(self, client: OpenAI) -> None:
        whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, temperature=0).choices[0].text
        stop = whole[10:13]
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop)
        assert answer.choices[0].text == whole[: whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"

    def test_text_and_its_token_ids_are_one_prompt(self, client: OpenAI) -> None:
        ids = Tokenizer.from_folder(TINY).encode(PROMPT)
        asked = {"model": "tiny", "max_tokens": 10, "temperature": 0}
        (text,) = client.completions.create(prompt=PROMPT, **asked).choices
        many = client.completions.create(prompt=[ids, ids], n=2, **asked).choices
        assert [choice.text for choice in many] == [text.text] * 4
        assert [choice.index for choice in many] == [0, 1, 2, 3]

    def test_penalties_and_biases_change_what_is_said(self, client: OpenAI) -> None:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        plain = client.completions.create(**asked).choices[0].text
        assert client.completions.create(**asked, frequency_penalty=2, presence_penalty=2).choices[0].text != plain
        (first,) = Tokenizer.from_folder(TINY).encode("!")
        biased = client.completions.create(**asked, logit_bias={str(first): 100}).choices[0].text
        assert biased == "!" * 40

    def test_the_best_of_many_are_given(self, client: OpenAI) -> None:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 1, "logprobs": 0}
        best = client.completions.create(**asked, n=2, best_of=8)
        every = client.completions.create(**asked, n=8)

        def mean(choice: CompletionChoice) -> float:
            values = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
            return sum(values) / len(values)

        assert [mean(choice) for choice in best.choices] == sorted(map(mean, every.choices), reverse=True)[:2]
        assert best.usage is not None
        assert every.usage is not None
        assert best.usage.completion_tokens == every.usage.completion_tokens, "all that were made are counted"

    def test_beams_by_either_name_and_in_a_stream(self, client: OpenAI) -> None:
        asked: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
        vllm = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
        found = client.completions.create(**asked, n=3, extra_body=vllm)
        texts = [choice.text for choice in found.choices]
        assert len(set(texts)) == 3
        again = client.completions.create(**asked, n=3, extra_body={**vllm, "beam_width": 3})
        assert [choice.text for choice in again.choices] == texts
        streamed = [""] * 3
        for chunk in client.completions.create(**asked, n=3, stream=True, extra_body=vllm):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts
        chat = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, n=2, extra_body={"beam_width": 4}
        )
        assert len({choice.message.content for choice in chat.choices}) == 2
        for extra, param in (
            ({"beam_width": 2}, "beam_width"),
            ({"beam_width": 4, "use_beam_search": False}, "use_beam_search"),
            ({"use_beam_search": 1}, "use_beam_search"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(**asked, n=3, extra_body=extra)
            assert refused.value.param == param

    def test_a_prompt_is_scored(self, client: OpenAI) -> None:
        """What greedy decoding said is the likeliest at each place, also when it is scored as a prompt."""
        said = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10, temperature=0, logprobs=1)
        text = PROMPT + said.choices[0].text
        scored = client.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=1)
        logprobs, before = scored.choices[0].logprobs, said.choices[0].logprobs
        assert logprobs is not None
        assert before is not None
        assert scored.choices[0].text == text
        assert (logprobs.token_logprobs or [0])[0] is None
        tokens = before.tokens or []
        assert (logprobs.tokens or [])[-len(tokens) :] == tokens
        values = (logprobs.token_logprobs or [])[-len(tokens) :]
        assert values == pytest.approx(before.token_logprobs, abs=1e-3)
        assert values == [max(top.values()) for top in (logprobs.top_logprobs or [])[-len(tokens) :]]

    def test_an_echo_with_its_scores_is_streamed_as_it_is_given_whole(self, client: OpenAI) -> None:
        asked = {"model": "tiny", "prompt": [PROMPT, "import"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 8}
        asked |= {"seed": -7, "stop": ["(self", "\n\n"]}
        whole = client.completions.create(**asked)
        texts, tokens, offsets = ({index: [] for index in range(4)} for _ in range(3))
        for chunk in client.completions.create(**asked, stream=True):
            for part in chunk.choices:
                texts[part.index].append(part.text)
                if part.logprobs:
                    tokens[part.index] += part.logprobs.tokens or []
                    offsets[part.index] += part.logprobs.text_offset or []
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert "".join(texts[choice.index]) == choice.text
            assert tokens[choice.index] == choice.logprobs.tokens
            assert offsets[choice.index] == choice.logprobs.text_offset
            assert choice.text.startswith(PROMPT if choice.index < 2 else "import")

    def test_an_empty_prompt_begins_a_document(self, client: OpenAI) -> None:
        answer = client.completions.create(model="tiny", prompt="", max_tokens=5, echo=True)
        assert answer.choices[0].text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1

    def test_logprobs_are_of_each_token(self, client: OpenAI) -> None:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert answer.usage is not None
        lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
        assert {len(one or []) for one in lists} == {answer.usage.completion_tokens}
        for logprob, top in zip(logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
            assert logprob == max(top.values())
            assert all(math.isfinite(value) and value <= 0 for value in top.values())


class TestErrors:
    def test_an_unknown_model(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    def test_a_parameter_out_of_its_limits(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="0 \\(greedy\\) to 100") as caught:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")

    def test_what_is_not_offered(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, modalities=["audio"], stream=True)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "modalities")

    def test_a_prompt_that_does_not_fit(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x " * 3000)
        assert caught.value.code == "context_length_exceeded"


class TestLeaving:
    LONG = {"model": "tiny", "messages": MESSAGES, "n": 4, "max_tokens": 900, "extra_body": {"ignore_eos": True}}  # noqa: RUF012

    def test_a_stream_that_is_closed_cancels_its_task(self, client: OpenAI, system: System) -> None:
        with system.steps.held():
            stream = client.chat.completions.create(**self.LONG, stream=True)
            first = next(iter(stream))
            stream.close()
            until(lambda: system.status(first.id) == "cancelled")

    async def test_a_call_that_is_cancelled_cancels_its_task(self, system: System) -> None:
        before = set(system.store.keys("penstock:task:*"))
        async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
            with system.steps.held():
                call = asyncio.create_task(client.chat.completions.create(**self.LONG))
                (name,) = await asyncio.to_thread(until, lambda: set(system.store.keys("penstock:task:*")) - before)
                await asyncio.to_thread(until, lambda: system.store.hget(name, "status") == "in_progress")
                call.cancel()
                await asyncio.to_thread(until, lambda: system.store.hget(name, "status") == "cancelled")


async def test_many_calls_at_once(system: System) -> None:
    async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=180, max_retries=0) as client:

        async def stream(seed: int) -> str:
            text = ""
            async for chunk in await client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=16, seed=seed % 4, stream=True
            ):
                text += chunk.choices[0].text
            return text

        texts = await asyncio.gather(*(stream(seed) for seed in range(16)))
    assert all(texts[k] == texts[k % 4] for k in range(16))
    assert len(set(texts)) > 1


@pytest.fixture
async def asking(system: System) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_models_and_webhook_endpoints(asking: AsyncOpenAI) -> None:
    assert [model.id async for model in asking.models.list()] == ["tiny"]
    made = await asking.webhooks.create(name="a", url="https://1.1.1.1/", event_types=["batch.completed"])
    assert (await asking.webhooks.update(made.id, name="b")).name == "b"
    rotated = await asking.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != made.signing_secret
    assert [one.id async for one in asking.webhooks.list()] == [made.id]
    assert (await asking.webhooks.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await asking.webhooks.retrieve(made.id)


async def test_a_batch_made_many_times_with_one_key_is_one_and_is_cancelled(asking: AsyncOpenAI) -> None:
    file = await asking.files.create(file=("in.jsonl", LINE.encode()), purpose="batch")
    ids = await asyncio.gather(
        *(
            asking.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                extra_headers={"Idempotency-Key": "one"},
            )
            for _ in range(8)
        )
    )
    (batch_id,) = {one.id for one in ids}
    assert [one.id async for one in asking.batches.list() if one.input_file_id == file.id] == [batch_id]
    assert (await asking.batches.cancel(batch_id)).status in ("cancelling", "cancelled")
    assert (await asking.batches.retrieve(batch_id)).input_file_id == file.id
