"""`/api/*` over real HTTP, as Ollama answers there: what is queued, and what is answered."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.record import Record
from producers.gateway.ollama.models import VERSION
from producers.store.fleet.adapters import StoredAdapter
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, Door, Make, Open, until
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, ends, says, send
from tests.producers.gateway.openai.test_chat_tools import PIECES, TOOLS
from tests.producers.gateway.test_keys import as_caller
from tests.waiting import PATIENCE_S

TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_a_line_for_each_piece_and_one_with_counts_and_times(
    http: httpx.Client, answering: Answering
) -> None:
    first, *others, last = lines(send(http, "/api/chat", {"model": "tiny:latest", "messages": MESSAGES}))
    assert first.keys() == {"model", "created_at", "message", "done"}
    assert first["created_at"].endswith("Z")
    text = "".join(line["message"]["content"] for line in (first, *others))
    assert (text, last["message"]) == ("Hello, world", {"role": "assistant", "content": ""})
    assert {line["model"] for line in (first, *others, last)} == {"tiny:latest"}
    assert not any(line["done"] for line in (first, *others))
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 3)
    total, *parts = (last[name] for name in TIMES)
    assert total == sum(parts)
    assert all(type(part) is int and part >= 0 for part in parts)


def test_both_endpoints_in_one_piece(http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says("one", reason="length"), says("two")]
    chat = send(http, "/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False}).json()
    assert (chat["message"], chat["done_reason"]) == ({"role": "assistant", "content": "one"}, "length")
    one = send(http, "/api/generate", {"model": "tiny", "prompt": "Write f.", "stream": False}).json()
    assert (one["response"], one["done"], one["eval_count"]) == ("two", True, 1)
    assert "message" not in one
    asked, told = (record.task for record in answering.records)
    assert asked["prompt"] == told["prompt"], "a prompt is a user's message"


def test_options_and_format_reach_the_task(http: httpx.Client, answering: Answering) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 40.0,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": -1,
        "num_predict": 9,
        "stop": ["x"],
    }
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.5, "num_ctx": 4096, "mirostat": 2, "num_keep": None}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"model": "tiny", "prompt": "f", "stream": False, "keep_alive": "5m", "format": schema, "options": options}
    answer = send(http, "/api/generate", body | {"keep": 1, "think": False, "images": [], "context": []})
    assert answer.headers["penstock-warning"] == "unknown fields are ignored: keep; options are not followed: mirostat"
    for endless in (-1, 0):
        body = {"model": "tiny", "prompt": "f", "format": "json", "options": {"num_predict": endless}}
        assert send(http, "/api/generate", body).status_code == 200
    task, *others = (record.task for record in answering.records)
    wanted = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "max_tokens": 9, "stop": ["x"]}
    wanted |= {"repetition_penalty": 1.1, "presence_penalty": 0.5}
    assert {name: task[name] for name in wanted} == wanted
    assert task["json_schema"]["properties"].keys() == {"a"}
    assert task["seed"] >= 0, "a random one"
    for other in others:
        assert "max_tokens" not in other
        assert other["json_schema"]["type"] == "object"


def test_only_a_prompt_that_leaves_no_room_is_cut_and_to_no_less_than_half_of_it(
    http: httpx.Client, answering: Answering
) -> None:
    half = CARD.context_length // 2
    wanted = {3: CARD.context_length - 3, CARD.context_length - 1: half, 10**6: half, -1: half}
    for length in wanted:
        long = {"model": "tiny", "prompt": "f " * 2000, "truncate": True, "options": {"num_predict": length}}
        assert send(http, "/api/generate", long).status_code == 200
    assert [len(record.task["prompt"]) for record in answering.records] == [*wanted.values()]
    short: dict[str, Any] = {"model": "tiny", "prompt": "f", "options": {"num_predict": CARD.context_length - 1}}
    for body in (short, short | {"truncate": True}):
        assert send(http, "/api/generate", body).status_code == 200
    whole, kept = (record.task["prompt"] for record in answering.records[len(wanted) :])
    assert kept == whole


def test_a_raw_prompt_and_one_for_a_model_without_a_template_are_sent_as_they_are(
    http: httpx.Client, answering: Answering, valkey: Redis
) -> None:
    send(http, "/v1/completions", {"model": "tiny", "prompt": "def f"})
    send(http, "/api/generate", {"model": "tiny", "prompt": "def f", "raw": True})
    plain = replace(CARD, name="plain", capabilities=("generate",))
    valkey.hset(keys.MODELS, plain.name, plain.to_json())
    answering.queue = keys.Pool(plain.name, plain.version, "test").version_queue
    assert send(http, "/api/show", {"model": "plain"}).json()["capabilities"] == ["completion"]
    assert send(http, "/api/generate", {"model": "plain", "prompt": "def f"}).status_code == 200
    assert [record.task["prompt"] for record in answering.records] == [answering.records[0].task["prompt"]] * 3
    refused = send(http, "/api/generate", {"model": "plain", "prompt": "def f", "system": "Be brief."})
    assert (refused.status_code, refused.json()["code"]) == (400, "unsupported_model")


def test_a_last_message_of_the_assistants_goes_on(http: httpx.Client, answering: Answering) -> None:
    body = {"model": "tiny", "messages": [*MESSAGES, {"role": "assistant", "content": "def"}]}
    send(http, "/v1/chat/completions", body | {"continue_final_message": True})
    assert send(http, "/api/chat", body).status_code == 200
    ours, theirs = (record.task["prompt"] for record in answering.records)
    assert theirs == ours


@pytest.mark.parametrize("stream", [True, False])
def test_calls_have_their_arguments_as_objects(open_door: Open, calls: str, answering: Answering, stream: bool) -> None:
    http = open_door().http
    answering.scripts = [says(*PIECES), says(*PIECES[:4], reason="length")]
    before = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "content": "Noon.", "tool_name": "now"},
    ]
    body = {"model": calls, "messages": [*MESSAGES, *before], "tools": TOOLS, "stream": stream}
    whole, cut = (send(http, "/api/chat", body) for _ in range(2))

    def told(answer: httpx.Response) -> tuple[str, list[Any], str]:
        objects = lines(answer) if stream else [answer.json()]
        messages = [part["message"] for part in objects]
        found = [call for message in messages for call in message.get("tool_calls", ())]
        return "".join(message["content"] for message in messages), found, objects[-1]["done_reason"]

    content, found, reason = told(whole)
    assert (content, reason) == ("Well.", "stop")
    functions = [
        {"index": 0, "name": "weather", "arguments": {"place": "}{"}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert [call["function"] for call in found] == functions
    assert told(cut)[1:] == ([], "length"), "a call that is cut is none"


@pytest.mark.parametrize("stream", [True, False])
def test_arguments_are_those_that_the_model_wrote_whatever_stands_in_them(
    open_door: Open, calls: str, answering: Answering, stream: bool
) -> None:
    arguments = (
        '{"place": "half \\ud83d, \N{LINE SEPARATOR}\N{GRINNING FACE}",\n"far": 1e999, "n": 0.10000000000000000001}'
    )
    answering.scripts = [says(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')]
    body = {"model": calls, "messages": MESSAGES, "tools": TOOLS, "stream": stream}
    answer = send(open_door().http, "/api/chat", body)
    objects = lines(answer) if stream else [answer.json()]
    (call,) = (call for part in objects for call in part["message"].get("tool_calls", ()))
    assert call["function"]["arguments"] == json.loads(arguments)
    assert "1e999" in answer.text, "JSON has no infinity"
    assert answer.text.isascii()


def test_thinking_comes_apart_and_is_turned_off(http: httpx.Client, thinker: str, answering: Answering) -> None:
    answering.scripts = [says("<think>\nLet me", " see.\n</think>\n\n", "4.")]
    body = {"model": thinker, "messages": MESSAGES}
    parts = [line["message"] for line in lines(send(http, "/api/chat", body))]
    assert "".join(part.get("thinking", "") for part in parts) == "Let me see."
    assert "".join(part["content"] for part in parts) == "4."
    one = send(http, "/api/generate", {"model": thinker, "prompt": "f", "think": True, "stream": False}).json()
    assert (one["thinking"], one["response"]) == ("Let me see.", "4.")
    assert send(http, "/api/chat", body | {"think": False}).status_code == 200
    unset, thinks, off = (record.task for record in answering.records)
    assert "grammar" not in unset
    assert "grammar" not in thinks
    assert len(off["prompt"]) > len(unset["prompt"]), "the template closes the reasoning"
    bounded = send(http, "/api/chat", body | {"think": "low"})
    assert (bounded.status_code, bounded.json()["error"].split()[0]) == (400, "think"), "its marks are no tokens"
    opened = {"model": thinker, "prompt": "<think>", "raw": True, "think": False}
    assert send(http, "/api/generate", opened).json()["error"].startswith("think cannot be kept")
    assert send(http, "/api/show", {"model": thinker}).json()["capabilities"] == ["completion", "tools", "thinking"]


def test_a_stream_that_waits_gets_spaces_before_its_next_line(open_door: Open, answering: Answering) -> None:
    seen = threading.Event()

    def play(worker: FakeWorker, record: Record) -> None:
        assert seen.wait(PATIENCE_S)
        says("Hi")(worker, record)

    answering.scripts = [play]
    body = {"model": "tiny", "messages": MESSAGES}
    with open_door(heartbeat=0.05).http.stream("POST", "/api/chat", json=body) as answer:
        chunks = answer.iter_raw()
        first = next(chunks)
        seen.set()
        rest = b"".join(chunks)
    assert first.strip() == b""
    assert b"\n" not in first
    assert [json.loads(line)["done"] for line in (first + rest).splitlines()] == [False, True]


def test_latest_is_an_adapter_where_one_is_called_so(open_door: Open, model: str, valkey: Redis) -> None:
    http = open_door().http
    valkey.hset(keys.ADAPTERS, "latest", json.dumps(asdict(StoredAdapter("latest", "tiny", "0123456789ab", 8, 1, 1))))
    assert [entry["name"] for entry in http.get("/api/tags").json()["models"]] == ["tiny", "latest"]
    parents = [send(http, "/api/show", {"model": name}).json() for name in ("tiny:latest", "tiny", "latest:latest")]
    assert [parent["details"]["parent_model"] for parent in parents] == ["tiny", "", "tiny"]


def test_a_tag_has_nobody_read_all_models(open_door: Open, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_all(cards: Any) -> Any:
        raise AssertionError(f"{len(cards)} models were read for one request")

    http = open_door().http
    monkeypatch.setattr("producers.client.directory.listed", read_all)
    assert send(http, "/api/generate", {"model": f"{model}:latest"}).status_code == 200


def test_a_withdrawn_model_takes_no_tag_from_another(open_door: Open, model: str, valkey: Redis) -> None:
    card = json.loads(replace(CARD, name=f"{model}:latest").to_json())
    valkey.hset(keys.MODELS, f"{model}:latest", json.dumps(card | {"withdrawn": 1}))
    shown = send(open_door().http, "/api/show", {"model": f"{model}:latest"}).json()
    assert shown["model_info"]["general.basename"] == model


def test_a_name_with_a_tag_gets_no_other(open_door: Open, model: str, valkey: Redis) -> None:
    for name in ("llama3.2:1b", "other", "other:latest"):
        valkey.hset(keys.MODELS, name, replace(CARD, name=name).to_json())
    http = open_door().http
    names = [entry["name"] for entry in http.get("/api/tags").json()["models"]]
    assert names == ["llama3.2:1b", "other", "other:latest", "tiny:latest"]
    found = [send(http, "/api/show", {"model": name}).json()["model_info"]["general.basename"] for name in names]
    assert found == ["llama3.2:1b", "other", "other:latest", "tiny"]


def test_log_probabilities_stand_beside_the_text(http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [says("a", logprobs=[(-0.5, ((5, -0.5), (6, -1.5)))])]
    body = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    first, *_ = lines(send(http, "/api/chat", body))
    (entry,) = first["logprobs"]
    assert (entry["logprob"], [other["logprob"] for other in entry["top_logprobs"]]) == (-0.5, [-0.5, -1.5])
    assert send(http, "/api/chat", body | {"stream": False}).json()["logprobs"] == [entry]


def test_no_prompt_asks_whether_the_model_is_there(http: httpx.Client, model: str, valkey: Redis) -> None:
    loads = send(http, "/api/generate", {"model": "tiny:latest"}).json()
    assert (loads["response"], loads["done"], loads["done_reason"]) == ("", True, "load")
    assert send(http, "/api/chat", {"model": "tiny", "messages": [], "keep_alive": 0}).json()["done_reason"] == "unload"
    assert send(http, "/api/generate", {"model": "none"}).status_code == 404
    assert not [name for name in valkey.keys("penstock:*") if name.decode().startswith(keys.task(""))]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": MESSAGES}, 400, "model is missing"),
        ({"model": "none:latest", "messages": MESSAGES}, 404, '"none"'),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "f", "images": ["aGk="]}]},
            400,
            "messages[0].images",
        ),
        ({"model": "tiny", "messages": [{"role": "nobody", "content": "f"}]}, 400, "messages[0].role"),
        ({"model": "tiny", "messages": MESSAGES, "options": {"temperature": "hot"}}, 400, "options.temperature"),
        ({"model": "tiny", "messages": MESSAGES, "options": {"temperature": 101}}, 400, "options.temperature"),
        ({"model": "tiny", "messages": MESSAGES, "options": {"seed": float("inf")}}, 400, ""),
        ({"model": "tiny", "messages": MESSAGES, "options": []}, 400, "options is []"),
        ({"model": "tiny", "messages": MESSAGES, "format": "xml"}, 400, "format is"),
        ({"model": "tiny", "messages": MESSAGES, "think": True}, 400, "think is given"),
        ({"model": "tiny", "messages": MESSAGES, "think": "deep"}, 400, "think is"),
        ({"model": "tiny", "messages": MESSAGES, "template": "{{ .Prompt }}"}, 400, "template is"),
        ({"model": "tiny", "messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ],
)
def test_errors_are_texts_that_name_what_is_wrong(
    http: httpx.Client, model: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = send(http, "/api/chat", body)
    assert (answer.status_code, answer.json().keys()) == (status, {"error", "code"})
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("chat", {"messages": 0}, "messages is 0"),
        ("generate", {"prompt": False}, "prompt is false"),
        ("generate", {"prompt": "f", "system": 5}, "system is 5"),
        ("embed", {"input": {}}, "input is {}"),
        ("embeddings", {"prompt": ["a", "b"]}, 'prompt is ["a", "b"]'),
        *((path, {"model": "\ud800:latest"}, "model is") for path in ("chat", "embed", "show")),
        *((path, {"model": "x" * 506 + ":latest"}, "model is") for path in ("generate", "embeddings", "pull")),
    ],
)
def test_values_of_wrong_types_are_refused_and_none_is_taken_for_nothing(
    http: httpx.Client, model: str, path: str, body: dict[str, Any], wrong: str
) -> None:
    answer = send(http, f"/api/{path}", {"model": model, **body})
    assert (answer.status_code, answer.json()["error"][: len(wrong)]) == (400, wrong)


def test_texts_to_embed_tell_of_fields_that_are_ignored(http: httpx.Client, model: str) -> None:
    answer = send(http, "/api/embed", {"model": model, "input": "a", "keep_alive": 5, "keep": 1})
    assert (answer.status_code, answer.json()["code"]) == (400, "unsupported_model")
    assert answer.headers["penstock-warning"] == "unknown fields are ignored: keep"


def test_an_error_in_the_middle_of_a_stream_is_its_last_line(http: httpx.Client, answering: Answering) -> None:
    answering.scripts = [ends(status="failed", error={"code": "engine_error", "message": "It broke."})]
    last = lines(send(http, "/api/chat", {"model": "tiny", "messages": MESSAGES}))[-1]
    assert last == {"error": "It broke.", "code": "engine_error"}
    answer = send(http, "/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False})
    assert (answer.status_code, answer.json()) == (500, last)


def test_models_are_listed_shown_and_pulled(http: httpx.Client, model: str) -> None:
    (listed,) = http.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"], len(listed["digest"])) == ("tiny:latest", "tiny:latest", 64)
    shown = send(http, "/api/show", {"model": listed["name"]}).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == listed["details"]["context_length"]
    assert (shown["details"], shown["capabilities"]) == (listed["details"], ["completion", "tools"])
    for unset in ({}, {"stream": None}):
        assert lines(send(http, "/api/pull", {"name": "tiny", **unset})) == [{"status": "success"}]
    assert send(http, "/api/pull", {"model": "llama3", "stream": False}).status_code == 404
    assert http.get("/api/version").json() == {"version": VERSION}
    assert http.get("/api/ps").json() == {"models": []}
    for method, path in (("POST", "/api/create"), ("DELETE", "/api/delete"), ("POST", "/api/blobs/sha256:0")):
        answer = http.request(method, path, json={"model": "tiny"})
        assert (answer.status_code, answer.json()["code"]) == (501, "not_offered")


def test_keys_open_what_they_may(open_door: Open, make: Make, model: str) -> None:
    door = open_door(auth="keys")
    ours, reads = make(), make(scopes=("read",))
    body = {"model": "tiny"}
    answers = [httpx.post(f"{door.url}/api/generate", json=body, headers=as_caller(key)) for key in (ours, reads, "x")]
    assert [answer.status_code for answer in answers] == [200, 403, 401]
    assert answers[2].json() == {
        "error": "This key does not work: it is unknown, wrong, expired, disabled or revoked.",
        "code": "invalid_api_key",
    }
    other = make(models=("other",))
    assert httpx.get(f"{door.url}/api/tags", headers=as_caller(other)).json() == {"models": []}
    for path in ("/api/show", "/api/generate", "/api/pull"):
        refused = httpx.post(f"{door.url}{path}", json=body, headers=as_caller(other))
        assert (refused.status_code, refused.json()["code"]) == (404, "model_not_found")


def test_a_large_body_without_a_prompt_counts_in_a_minutes_requests(
    open_door: Open, make: Make, model: str, valkey: Redis
) -> None:
    url, headers = open_door(auth="keys").url, as_caller(make(rpm=5))
    for path in ("chat", "embed"):
        body = {"model": model, "junk": "x" * 2**16}
        assert httpx.post(f"{url}/api/{path}", json=body, headers=headers).status_code == 200
        assert httpx.post(f"{url}/api/{path}", json={"model": model}, headers=headers).status_code == 200
    (account,) = valkey.keys(keys.account("*"))
    assert int(valkey.hget(account, "requests") or 0) in (1, 2), "of this minute, which may have begun between"


def test_a_caller_who_leaves_ends_the_task(door: Door, model: str, valkey: Redis) -> None:
    with door.http.stream("POST", "/api/chat", json={"model": "tiny", "messages": MESSAGES}) as answer:
        assert answer.status_code == 200
        (name,) = [name for name in valkey.keys("penstock:*") if name.decode().startswith(keys.task(""))]
    until(lambda: valkey.hget(name, "status") == b"cancelled")
