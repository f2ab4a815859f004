"""What a response says, whichever way it is read, and how one goes on from another."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from engine.errors import ErrorText
from producers.contract import keys
from producers.contract.record import Record, error_json
from producers.gateway.openai.responses import routes
from producers.gateway.openai.responses.view import ResponseMetadata
from producers.store.protocol import DEFAULT_TTL_S
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, Open, Submit, until
from tests.producers.gateway.openai.conftest import Answering, says

ASKED: dict[str, Any] = {"model": "tiny", "input": "Write f."}
PIECES = ["Hé", "", " world\u2028"]
#: The events of such an output in the background, in order.
EVENTS = [
    *("response.created", "response.queued", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"),
]


def told(events: Any) -> list[dict[str, Any]]:
    return [event.to_dict() for event in events]


def task_id(response_id: str) -> str:
    return response_id.removeprefix("resp_")


def test_all_ways_of_reading_agree(client: OpenAI, answering: Answering) -> None:
    answering.scripts = [says(*PIECES)]
    asked = {**ASKED, "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50, "top_p": 0}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.top_p) == ("".join(PIECES), 0)
    assert (whole.status, whole.instructions, whole.metadata) == ("completed", "Be brief.", {"a": "b"})
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (7, 3, 10)
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    live = told(client.responses.create(**ASKED, background=True, stream=True))
    assert [event["type"] for event in live] == EVENTS
    assert [event["sequence_number"] for event in live] == list(range(len(EVENTS)))
    response_id = live[0]["response"]["id"]
    assert told(client.responses.retrieve(response_id, stream=True)) == live
    for after in range(-1, len(live)):
        assert told(client.responses.retrieve(response_id, stream=True, starting_after=after)) == live[after + 1 :]
    assert client.responses.retrieve(response_id).to_dict() == live[-1]["response"]
    with client.responses.stream(**ASKED) as stream:
        assert stream.get_final_response().output_text == "".join(PIECES)


def test_a_foreground_stream_is_in_progress_at_once(client: OpenAI, answering: Answering) -> None:
    live = told(client.responses.create(**ASKED, stream=True))
    assert [event["type"] for event in live[:3]] == ["response.created", "response.in_progress", EVENTS[3]]
    assert told(client.responses.retrieve(live[0]["response"]["id"], stream=True, starting_after=3)) == live[4:]


async def test_the_asyncio_client(door: Door, answering: Answering) -> None:
    async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
        made = await client.responses.create(**ASKED, background=True)
        assert (made.status, made.output, made.usage, made.background) == ("queued", [], None, True)
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
        assert events[-1].type == "response.completed"
        assert (await client.responses.retrieve(made.id)).output_text == "Hello, world"
        assert (await client.responses.cancel(made.id)).status == "completed"
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


def test_each_end_is_told(client: OpenAI, answering: Answering) -> None:
    """Status and reason of what was cut, what failed, and what never began."""
    failed = json.loads(
        error_json("dead_lettered", ErrorText.of("given up on max_tokens; lower {max_tokens}"), "max_tokens")
    )

    def fails(worker: FakeWorker, record: Record) -> None:
        worker.finish(record.id, [0], status="failed", reasons=[], error=failed)

    def late(worker: FakeWorker, record: Record) -> None:
        worker.append(record.id, 0, ["so far"])
        worker.finish(
            record.id, [1], status="incomplete", reasons=["deadline"], error={"code": "expired", "message": ""}
        )

    answering.scripts = [says("cut", reason="length"), fails, late]
    cut, broken, ended = (told(client.responses.create(**ASKED, background=True, stream=True))[-1] for _ in range(3))
    assert (cut["type"], cut["response"]["status"]) == ("response.incomplete", "incomplete")
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["response"]["output"][0]["status"] == "incomplete"
    assert (broken["type"], broken["response"]["output"]) == ("response.failed", [])
    assert broken["sequence_number"] == 2, "what never began was never in progress"
    message = "given up on max_tokens; lower max_output_tokens"
    error = {"code": "dead_lettered", "message": message, "param": "max_output_tokens"}
    assert broken["response"]["error"] == error
    assert (ended["type"], ended["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "deadline"})
    assert ended["response"]["error"]["code"] == "expired"
    answering.scripts = [fails]
    with pytest.raises(openai.InternalServerError, match="given up"):
        client.responses.create(**ASKED)


def test_log_probabilities_are_in_deltas_and_in_the_whole(client: OpenAI, answering: Answering, valkey: Redis) -> None:
    answering.scripts = [says("a", "", logprobs=[(-0.5, ((5, -0.5), (6, -1.0)))])]
    live = told(client.responses.create(**ASKED, stream=True, include=["message.output_text.logprobs"], top_logprobs=2))
    deltas = [event["logprobs"] for event in live if event["type"] == "response.output_text.delta"]
    assert [len(one) for one in deltas] == [1, 1], "each token has its own, also one without text"
    assert [top["logprob"] for top in deltas[0][0]["top_logprobs"]] == [-0.5, -1.0]
    (part,) = live[-1]["response"]["output"][0]["content"]
    assert part["logprobs"] == [*deltas[0], *deltas[1]]
    response_id = live[0]["response"]["id"]
    assert client.responses.retrieve(response_id).to_dict() == live[-1]["response"]
    valkey.hset(keys.task(task_id(response_id)), "encoding", "another")
    again = told(client.responses.retrieve(response_id, stream=True))
    assert [event["type"] for event in again] == [event["type"] for event in live], "whatever its tokenizer is now"
    assert [event["logprobs"] for event in again if "delta" in event] == [[], []]


class TestConversation:
    def test_it_goes_on_from_the_one_before_alone(self, client: OpenAI, answering: Answering, valkey: Redis) -> None:
        first = client.responses.create(**ASKED, instructions="Be brief.")
        second = client.responses.create(model="tiny", input="And g?", previous_response_id=first.id)
        client.responses.delete(first.id)
        parts = [
            {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "h?"}]}
        ]
        third = client.responses.create(model="tiny", input=parts, previous_response_id=second.id)
        (prompt,) = {tuple(record.task["prompt"]) for record in answering.records if record.id == task_id(third.id)}
        messages = ["Write f.", "Hello, world", "And g?", "Hello, world", "And\nh?"]
        listed = client.responses.input_items.list(third.id, order="asc", limit=2)
        items = list(listed)
        assert ["\n".join(part.text for part in item.content) for item in items] == messages
        assert [item.id for item in client.responses.input_items.list(third.id, after=items[2].id)] == [
            items[1].id,
            items[0].id,
        ]
        for query, param in (("order", "up"), ("limit", 101), ("after", "x")):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.input_items.list(third.id, extra_query={query: param})
            assert caught.value.param == query
        chat = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(messages)]
        client.chat.completions.create(model="tiny", messages=chat)
        assert tuple(answering.records[-1].task["prompt"]) == prompt, "instructions are for one response alone"

    @pytest.mark.parametrize("large", [False, True])
    def test_a_large_one_is_read_on_no_event_loop(
        self,
        door: Door,
        client: OpenAI,
        answering: Answering,
        valkey: Redis,
        monkeypatch: pytest.MonkeyPatch,
        large: bool,
    ) -> None:
        response_id = client.responses.create(**ASKED).id
        task = keys.task(task_id(response_id))
        kept = json.loads(valkey.hget(task, "response") or "")
        kept["items"] = [[f"msg_{at}", "user", ["x" * 100]] for at in range(1000 if large else 10)]
        valkey.hset(task, "response", json.dumps(kept))
        threads: list[int] = []

        def noted(make: Any) -> Any:
            return lambda *arguments: threads.append(threading.get_ident()) or make(*arguments)

        monkeypatch.setattr(ResponseMetadata, "of", noted(ResponseMetadata.of))
        monkeypatch.setattr(routes, "item_page", noted(routes.item_page))
        assert [item.id for item in client.responses.input_items.list(response_id, limit=2).data] == [
            kept["items"][at][0] for at in (-1, -2)
        ]
        client.responses.retrieve(response_id)
        assert len(threads) == 3
        assert (door.thread_id in threads) is not large

    def test_one_that_is_gone_or_runs(self, client: OpenAI, answering: Answering) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASKED, previous_response_id="resp_x")
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        answering.scripts = [lambda worker, record: None]
        runs = client.responses.create(**ASKED, background=True)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ASKED, previous_response_id=runs.id)
        assert caught.value.code == "previous_response_not_ready"

    def test_the_oldest_go_where_they_must(self, client: OpenAI, answering: Answering) -> None:
        long = "word " * 300
        turns = [{"role": "system", "content": "You write Python."}]
        for at in range(4):
            turns += [{"role": "user", "content": f"{at} {long}"}, {"role": "assistant", "content": str(at)}]
        turns.append({"role": "user", "content": "last"})
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=turns)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        cut = client.responses.create(model="tiny", input=turns, truncation="auto", max_output_tokens=100)
        left = [item.content[0].text for item in client.responses.input_items.list(cut.id, order="asc")]
        assert left[0] == "You write Python."
        assert 1 < len(left) < len(turns)
        assert left[1:] == [str(turn["content"]) for turn in turns[len(turns) - len(left) + 1 :]]
        client.responses.create(model="tiny", input=turns, truncation="auto")
        assert len(answering.records[-1].task["prompt"]) <= 1024 * 3 // 4, "there is room for an answer"
        client.responses.create(model="tiny", input="word " * 450, truncation="auto")
        assert len(answering.records[-1].task["prompt"]) > 1024 * 3 // 4, "as far as there can be"
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input=long * 9, truncation="auto")


class TestKeeping:
    def test_for_how_long(self, client: OpenAI, answering: Answering, valkey: Redis) -> None:
        def ttl(**fields: Any) -> int:
            made = client.responses.create(**ASKED, **fields)
            return int(valkey.hget(keys.task(task_id(made.id)), "ttl"))

        assert ttl() == DEFAULT_TTL_S
        assert ttl(extra_body={"ttl": 30 * 24 * 3600}) == 30 * 24 * 3600
        assert ttl(store=False) == 300
        unstored = client.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(unstored.id)
        assert caught.value.code == "response_not_found"

    def test_a_task_is_no_response(self, http: httpx.Client, submit: Submit) -> None:
        name = submit()
        assert http.get(f"/v1/responses/resp_{name}").status_code == 404
        assert http.delete(f"/v1/responses/resp_{name}").status_code == 404
        assert http.get(f"/v1/tasks/{name}").status_code == 200

    def test_another_tenant_finds_nothing(self, client: OpenAI, answering: Answering) -> None:
        mine = client.with_options(default_headers={"Penstock-Tenant": "acme"})
        made = mine.responses.create(**ASKED)
        assert mine.responses.retrieve(made.id).id == made.id
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**ASKED, previous_response_id=made.id)

    @pytest.mark.parametrize("fields", [{}, {"background": True}])
    def test_a_repeated_request_makes_nothing_twice(
        self, client: OpenAI, answering: Answering, valkey: Redis, fields: dict[str, Any]
    ) -> None:
        keyed = {**ASKED, **fields, "extra_headers": {"Idempotency-Key": "k"}}
        first, again = client.responses.create(**keyed), client.responses.create(**keyed)
        (entry,) = valkey.keys(keys.idempotency("*"))
        valkey.hdel(entry, "made")  # as while the first is being made
        at_once = client.responses.create(**keyed)
        assert {first.id, again.id, at_once.id} == {first.id}
        until(lambda: client.responses.retrieve(first.id).status == "completed")
        assert len(answering.records) == 1
        assert not valkey.zcard(keys.READERS)


class TestEnding:
    @pytest.fixture
    def holding(self, answering: Answering) -> Answering:
        """Every task begins, and is held."""
        answering.scripts = [lambda worker, record: worker.append(record.id, 0, ["so far"]) and None]
        return answering

    def test_a_cancelled_stream_has_an_end(self, client: OpenAI, holding: Answering) -> None:
        stream = client.responses.create(**ASKED, background=True, stream=True)
        events = iter(stream)
        made = next(events)
        until(lambda: holding.records)
        holding.worker.die()
        cancelled = client.responses.cancel(made.response.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "so far")
        last = list(events)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert client.responses.cancel(made.response.id).to_dict() == cancelled.to_dict()

    @pytest.mark.parametrize("alive", [True, False])
    def test_a_deleted_one_is_unknown_and_leaves_nothing(
        self, client: OpenAI, holding: Answering, valkey: Redis, alive: bool
    ) -> None:
        events = iter(client.responses.create(**ASKED, background=True, stream=True))
        made = next(events).response
        name = task_id(made.id)
        until(lambda: next(events).type == "response.output_text.delta")
        with valkey.pubsub() as control:
            control.subscribe(keys.control(holding.worker.incarnation))
            until(lambda: control.get_message(timeout=1))
            if not alive:
                holding.worker.die()
            client.responses.delete(made.id)
            if alive:
                assert until(lambda: control.get_message(timeout=1))["data"] == f"cancel {name}".encode()
        last = list(events)[-1]
        assert (last.type, last.code, last.sequence_number) == ("error", "response_not_found", 5)
        assert holding.worker.append(name, 1, ["more"])[0] == "gone"
        assert holding.worker.finish(name, [1]) == ["gone"]
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert [key for key in valkey.scan_iter("*") if name.encode() in key] == [keys.erased(name).encode()]
        for index in (keys.SUBMITTING, keys.DEADLINES, keys.UNSETTLED, keys.SETTLED, keys.READERS):
            assert valkey.zscore(index, name) is None

    def test_leaving_cancels_a_foreground_one_alone(self, client: OpenAI, holding: Answering, valkey: Redis) -> None:
        """What it left is kept."""
        ids = []
        for background in (True, False):
            stream = client.responses.create(**ASKED, stream=True, background=background)
            ids.append(task_id(next(iter(stream)).response.id))
            until(lambda: valkey.exists(keys.stream(ids[-1])))
            stream.close()
        until(lambda: valkey.hexists(keys.task(ids[1]), "cancel"))
        assert not valkey.hexists(keys.task(ids[0]), "cancel")
        assert client.responses.retrieve(f"resp_{ids[1]}").status == "in_progress"


def test_a_webhook_says_what_the_response_says(
    open_door: Open, model: str, answering: Answering, valkey: Redis
) -> None:
    """Of a background response: one whose output was cut is incomplete."""
    client = open_door(webhook_allow=("127.0.0.0/8",)).openai
    answering.scripts = [says("cut", reason="length")]
    hook = {"webhook": {"url": "http://127.0.0.1:1/hook"}}
    made = client.responses.create(**ASKED, background=True, extra_body=hook)
    (name,) = until(lambda: valkey.keys("penstock:webhooks:row:*"))
    assert valkey.hmget(name, "type", "object") == [b"response.incomplete", made.id.encode()]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, extra_body=hook)
    assert caught.value.param == "webhook"


def test_a_gateway_that_stops_says_where_to_go_on(
    open_door: Open, model: str, valkey: Redis, worker: FakeWorker
) -> None:
    door, other = open_door(), open_door()
    with httpx.stream("POST", f"{door.url}/v1/responses", json={**ASKED, "background": True, "stream": True}) as answer:
        lines = answer.iter_lines()
        made = json.loads(next(line for line in lines if line.startswith("data:"))[5:])["response"]
        name = worker.take(QUEUE, 10)
        assert name is not None
        worker.claim(name)
        worker.append(name, 0, ["a"])
        next(line for line in lines if "delta" in line)
        door.end_streams()
        *_, last = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    assert (last["type"], last["code"]) == ("error", "stopping")
    worker.append(name, 1, ["b"])
    worker.finish(name, [2])
    rest = list(other.openai.responses.retrieve(made["id"], stream=True, starting_after=last["sequence_number"]))
    assert [event.sequence_number for event in rest] == list(range(6, 11))
    assert rest[0].delta == "b"


def test_an_output_may_have_a_form(client: OpenAI, answering: Answering) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}}}
    named = {"type": "json_schema", "name": "answer", "schema": schema}
    asked: list[dict[str, Any]] = [
        {"extra_body": {"choice": ["yes", "no"]}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"text": {"format": named}},
        {"text": {"format": named}, "extra_body": {"open_objects": True}},
    ]
    for fields in asked:
        client.responses.create(**ASKED, **fields)
    chosen, same, closed, opened = (record.task for record in answering.records)
    assert chosen["grammar"] == same["grammar"] == 'start: CHOICE\nCHOICE: "yes" | "no"'
    assert closed["json_schema"]["additionalProperties"] is False
    assert "$ref" in opened["json_schema"]["additionalProperties"]
    with pytest.raises(openai.BadRequestError, match="Penstock-Tenant") as refused:
        client.responses.create(**ASKED, extra_body={"cache_salt": "s"})
    assert refused.value.param == "cache_salt"


def test_what_coding_agents_send_is_taken(http: httpx.Client, model: str, answering: Answering) -> None:
    """Codex and pi ask for any summary of reasoning, of whatever model; Codex tells of itself."""
    agent = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}
    body = {"model": model, "input": "x", "client_metadata": {"session_id": "s"}, **agent}
    response = http.post("/v1/responses", json=body).json()
    assert (response["status"], [item["type"] for item in response["output"]]) == ("completed", ["message"])
