from __future__ import annotations

import gc
import math
import re
from typing import Any

import pytest

from engine.params import MAX_SEED
from producers import InvalidTask, Task
from producers.contract import model_fit
from producers.contract.fields import MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS
from producers.contract.task import ASSUMED_OUTPUT
from tests.producers.conftest import CARD

#: (fields, the field that is named, code)
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model": ""}, "model", "invalid_value"),
    ({"model": "m" * 201}, "model", "invalid_value"),
    ({"model": None}, "model", "invalid_type"),
    ({"model": ["tiny@a"]}, "model", "invalid_type"),
    ({"model": "\ud800"}, "model", "invalid_value"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages", "invalid_value"),
    ({"prompt": None, "messages": []}, "messages", "empty_array"),
    ({"prompt": None, "messages": "x"}, "messages", "invalid_type"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
    (
        {"prompt": None, "messages": [{"role": "user", "content": "é" * (MAX_PROMPT_BYTES // 2 - 10)}]},
        "messages",
        "invalid_value",
    ),
    ({"prompt": b"bytes"}, "prompt", "invalid_type"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_type"),
    ({"prompt": "a lone \udc80 surrogate"}, "prompt", "invalid_value"),
    ({"prompt": "é" * (MAX_PROMPT_BYTES // 2 + 1)}, "prompt", "invalid_value"),
    ({"prompt": [1] * (MAX_PROMPT_TOKENS + 1)}, "prompt", "invalid_value"),
    ({"prompt": [1, -1]}, "prompt", "invalid_value"),
    ({"prompt": [1, 2.0]}, "prompt", "invalid_value"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": ["a"]}, "prompt", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"webhook": "https://example.com"}, "webhook", "invalid_type"),
    ({"webhook": {"url": "https://example.com", "method": "GET"}}, "webhook", "unknown_parameter"),
    ({"webhook": {"secret": "x"}}, "webhook.url", "missing_parameter"),
    ({"webhook": {"url": 5}}, "webhook.url", "invalid_type"),
    *(
        ({"webhook": {"url": url}}, "webhook.url", "invalid_value")
        for url in (
            *("example.com/hook", "ftp://example.com", "https://", "https:///hook", "https://[::1", "https://x:0/"),
            *("https://x:65536/", "https://u:p@example.com/", "https://example.com/#top", "https://ex ample.com/"),
            *("https://exämple.com/", "https://example.com/" + "x" * 2048, "https://example.com/\nHost: x"),
        )
    ),
    *(
        ({"webhook": {"url": "https://example.com", "secret": secret}}, "webhook.secret", "invalid_value")
        for secret in ("c2VjcmV0", "whsec_" + "YWJj" * 7, "whsec_" + "YWJj" * 22, "whsec_é", "whsec_YWJj=YWJj" * 8)
    ),
    ({"webhook": {"url": "https://example.com", "secret": 5}}, "webhook.secret", "invalid_type"),
    ({"webhook": {"url": "https://example.com", "events": []}}, "webhook.events", "invalid_value"),
    ({"webhook": {"url": "https://example.com", "events": "response.failed"}}, "webhook.events", "invalid_type"),
    ({"webhook": {"url": "https://example.com", "events": ["batch.failed"]}}, "webhook.events", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": math.nan}, "temperature", "invalid_value"),
    ({"temperature": math.inf}, "temperature", "invalid_value"),
    ({"temperature": 10**5000}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"top_k": -1}, "top_k", "invalid_value"),
    ({"top_k": 1.0}, "top_k", "invalid_type"),
    ({"top_p": 0.0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_p": math.nan}, "top_p", "invalid_value"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"min_p": "0"}, "min_p", "invalid_type"),
    ({"typical_p": 0}, "typical_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 10**400}, "repetition_penalty", "invalid_type"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"self": 1}, "self", "unknown_parameter"),
    ({"k" * 70: 1}, "k" * 64 + "...", "unknown_parameter"),
    ({"\ud800": 1}, r"\ud800", "unknown_parameter"),
    ({"metadata": {"k" * 3_000_000: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"\ud800": "v"}}, "metadata", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {-5: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {5: "1"}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {str(k): 1 for k in range(1025)}}, "logit_bias", "invalid_value"),
    ({"allowed_token_ids": [10**400]}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1]}, "allowed_token_ids", "invalid_value"),
    ({"banned_token_ids": [1.0]}, "banned_token_ids", "invalid_type"),
    ({"bad_words": "word"}, "bad_words", "invalid_type"),
    ({"bad_words": ["x" * 257]}, "bad_words", "invalid_value"),
    ({"bad_words": ["x"] * 65}, "bad_words", "invalid_value"),
    ({"include_stop": "yes"}, "include_stop", "invalid_type"),
    ({"best_of": 65}, "best_of", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"watermark": True}, "watermark", "invalid_type"),
    ({"watermark": ""}, "watermark", "invalid_value"),
    ({"watermark": "a b"}, "watermark", "invalid_value"),
    ({"watermark": "x" * 65}, "watermark", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"seed": MAX_SEED + 1}, "seed", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["ok", ""]}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": ["x" * 257]}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"stop": ["\ud800"]}, "stop", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 65}, "n", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"tier": "fast"}, "tier", "invalid_value"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"timeout": 8 * 24 * 3600}, "timeout", "invalid_value"),
    ({"tenant": ""}, "tenant", "invalid_value"),
    ({"metadata": {"k": 1}}, "metadata", "invalid_type"),
    ({"metadata": {"": "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    ({"metadata": {str(k): "v" for k in range(17)}}, "metadata", "invalid_value"),
    ({"ttl": 59}, "ttl", "invalid_value"),
    ({"ttl": 31 * 24 * 3600}, "ttl", "invalid_value"),
    ({"temprature": 1.0}, "temprature", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=[f"{k}-{b[1]}" for k, b in enumerate(BAD)])
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidTask, match=re.escape(param.rstrip("."))) as refused:
        Task(**{"model": "tiny", "prompt": "hello", **fields})
    assert (refused.value.param, refused.value.code) == (param, code)
    assert len(str(refused.value)) < 700
    str(refused.value).encode()  # it can be sent: a bad value's surrogates are escaped


def test_the_message_gives_value_and_limits() -> None:
    with pytest.raises(InvalidTask, match=r"top_p is 1\.5; top_p must be a number above 0, up to 1"):
        Task(model="tiny", prompt="x", top_p=1.5)
    with pytest.raises(InvalidTask, match=r"prompt\[1\] is -7; a token id is an integer from 0 to 2147483647"):
        Task(model="tiny", prompt=(1, -7))
    with pytest.raises(InvalidTask, match='did you mean "temperature"'):
        Task.parse({"model": "tiny", "prompt": "x", "temprature": 1})
    for fields in ({"metadata": {"k": "a\udc80"}}, {"metadata": {"a\udc80": "v"}}, {"stop": ["a\udc80"]}):
        with pytest.raises(InvalidTask, match=r'is not valid Unicode: "a\\udc80" has a lone surrogate'):
            Task(model="tiny", prompt="x", **fields)
    with pytest.raises(InvalidTask, match="prompt is missing"):
        Task.parse({"model": "tiny"})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xff\xfe", "invalid_utf8"),
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"n":' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'{"model":"m","prompt":"x","temperature":NaN}', "invalid_value"),
        (b'{"model":"m","prompt":"\\ud800"}', "invalid_value"),
    ],
)
def test_a_body_that_is_no_task_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        Task.parse_json(body)
    assert refused.value.code == code


def test_a_message_says_null_true_and_false_as_json_does() -> None:
    with pytest.raises(InvalidTask, match="a task is a JSON object, not null"):
        Task.parse_json("null")
    with pytest.raises(InvalidTask, match="max_tokens is true"):
        Task.parse_json('{"model":"m","prompt":"x","max_tokens":true}')


@pytest.mark.parametrize("name", sorted(set(Task.model_fields) - {"model", "prompt"}))
def test_what_is_null_was_left_out(name: str) -> None:
    plain = Task(model="m", prompt="x")
    assert Task.parse({"model": "m", "prompt": "x", name: None}) == plain


def test_unknown_fields_are_not_counted_up() -> None:
    """One is enough to refuse a body that has nothing else: pydantic would make a message for each."""
    with pytest.raises(InvalidTask, match='unknown field "k0"') as refused:
        Task.parse({f"k{at}": at for at in range(100_000)})
    assert refused.value.__context__ is None


def test_what_people_write_is_taken() -> None:
    task = Task.parse_json(
        '{"model":"m","prompt":[1,2],"stop":"\\n","tier":"auto","temperature":1,"stop_token_ids":[7]}'
    )
    assert (task.prompt, task.stop, task.tier, task.temperature, task.stop_token_ids) == (
        (1, 2),
        ("\n",),
        "default",
        1.0,
        (7,),
    )
    assert Task.parse_json(task.model_dump_json()) == task
    assert Task(model="m", prompt="é" * (MAX_PROMPT_BYTES // 2)).prompt_tokens is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": [999, 1000]}, "prompt", "invalid_value"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", "invalid_value"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias", "invalid_value"),
        ({"allowed_token_ids": [1000, 1]}, "allowed_token_ids", "invalid_value"),
        ({"banned_token_ids": [1, 1000]}, "banned_token_ids", "invalid_value"),
        ({"banned_token_ids": list(range(1000))}, "banned_token_ids", "invalid_value"),
        ({"prompt": [1] * 513, "max_tokens": 0}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [1] * 500, "min_tokens": 13}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "text", "max_tokens": 512}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_what_the_model_cannot_run_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    task = Task(**{"model": "tiny", "prompt": "x", **fields})
    with pytest.raises(InvalidTask, match=r"tiny") as refused:
        model_fit.check(task, CARD)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1] * 101, "max_tokens": 0, "prompt_logprobs": 1}, "prompt"),
        ({"prompt": [1] * 101}, "prompt"),
        ({"prompt": [1] * 90, "max_tokens": 12}, "max_tokens"),
        ({"prompt": "text", "max_tokens": 101}, "max_tokens"),
    ],
)
def test_what_no_workers_cache_has_room_for_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(
        InvalidTask, match=r'10[1-9] tokens of KV cache; the workers of "tiny" have room for 100;'
    ) as no:
        model_fit.check(Task(model="tiny", **fields), CARD | {"kv_capacity": 100})
    assert (no.value.param, no.value.code) == (param, "kv_capacity_exceeded")


def test_a_workers_cache_may_be_filled_to_the_last_token() -> None:
    small = CARD | {"kv_capacity": 100}
    model_fit.check(Task(model="tiny", prompt=[1] * 100), small)
    model_fit.check(Task(model="tiny", prompt=[1] * 90, max_tokens=11), small)
    model_fit.check(Task(model="tiny", prompt="text", max_tokens=100), small)


def test_a_model_that_generates_nothing_is_refused() -> None:
    with pytest.raises(InvalidTask, match="cannot generate; it can"):
        model_fit.check(Task(model="tiny", prompt="x"), CARD | {"capabilities": ["embed"]})


def test_the_context_may_be_filled_to_the_last_token() -> None:
    model_fit.check(Task(model="tiny", prompt=[1] * 500, max_tokens=12), CARD)
    model_fit.check(Task(model="tiny", prompt=[1] * 511), CARD)
    model_fit.check(Task(model="tiny", prompt=[1] * 512, max_tokens=0, prompt_logprobs=1), CARD)
    model_fit.check(Task(model="tiny", prompt="text", max_tokens=511), CARD)


def test_what_would_be_stored_at_once_is_bounded() -> None:
    wide = CARD | {"context_length": 1 << 20}
    model_fit.check(Task(model="tiny", prompt=[1] * 12_483, prompt_logprobs=20), wide)
    with pytest.raises(InvalidTask, match=r"262164 log probabilities; at most 262144") as refused:
        model_fit.check(Task(model="tiny", prompt=[1] * 12_484, prompt_logprobs=20), wide)
    assert refused.value.param == "prompt_logprobs"
    model_fit.check(Task(model="tiny", prompt=[1], n=64, max_tokens=780, logprobs=20), wide)
    with pytest.raises(InvalidTask, match=r"n = 64 and up to 781 output tokens these are 1049664 log") as refused:
        model_fit.check(Task(model="tiny", prompt=[1], n=64, max_tokens=781, logprobs=20), wide)
    assert refused.value.param == "logprobs"
    model_fit.check(Task(model="tiny", prompt=[1], n=4, best_of=5, max_tokens=4096), wide)
    model_fit.check(Task(model="tiny", prompt=[1], n=64, best_of=64), wide)
    for fields in ({"max_tokens": 4097, "n": 4}, {"n": 1}):
        with pytest.raises(InvalidTask, match="more than the 16384 tokens") as refused:
            model_fit.check(Task(model="tiny", prompt=[1], best_of=5, **fields), wide)
        assert refused.value.param == "best_of"


def test_token_ids_of_biases_may_be_strings_as_json_has_them() -> None:
    task = Task.parse_json('{"model":"m","prompt":"x","logit_bias":{"7":-100,"0":1.5}}')
    assert task.logit_bias == {7: -100.0, 0: 1.5}
    assert Task.parse_json(task.model_dump_json()) == task
    assert Task(model="m", prompt="x", logit_bias={7: 1}).logit_bias == {7: 1.0}


def test_the_worker_is_told_everything() -> None:
    task = Task(model="tiny", prompt="x", top_p=0.5).resolved(CARD)
    assert (task.temperature, task.top_k, task.top_p) == (0.6, 0, 0.5)  # the card's, ours, the caller's
    assert (task.min_p, task.typical_p, task.repetition_penalty) == (0.0, 1.0, 1.0)
    own = {"min_p": 0.1, "typical_p": 0.2, "repetition_penalty": 1.1}
    assert Task(model="tiny", prompt="x").resolved(CARD | {"defaults": own}).model_dump().items() >= own.items()
    assert task.seed is not None
    assert Task(model="tiny", prompt="x", seed=5, temperature=0).resolved(CARD).seed == 5
    long = CARD | {"context_length": 1 << 20}
    assert Task(model="tiny", prompt="x", logprobs=20, n=4).resolved(long).max_tokens == (1 << 20) // 84
    assert Task(model="tiny", prompt="x", logprobs=20).resolved(CARD).max_tokens is None
    assert Task(model="tiny", prompt="x", n=4).resolved(long).max_tokens is None
    assert Task(model="tiny", prompt="x", temperature=0).resolved(CARD).temperature == 0
    seeds = {Task(model="tiny", prompt="x").resolved(CARD).seed for _ in range(20)}
    assert len(seeds) == 20


def test_kv_tokens_count_the_prompt_once_and_the_output_for_each_choice() -> None:
    assert Task(model="m", prompt=[1] * 10, max_tokens=5, n=3).kv_tokens(512) == 25
    assert Task(model="m", prompt="ééé!", max_tokens=5).kv_tokens(512) == 3 + 5  # 7 bytes
    assert Task(model="m", prompt=[1]).kv_tokens(512) == 1 + ASSUMED_OUTPUT
    assert Task(model="m", prompt=[1], max_tokens=500, n=2).kv_tokens(100) == 200
    assert Task(model="m", prompt=[1] * 10, max_tokens=5, n=2, best_of=3).kv_tokens(512) == 25
    assert Task(model="m", prompt=[1] * 10, max_tokens=0).kv_tokens(512) == 10


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k"])
def test_a_number_that_is_too_large_is_told_the_largest(name: str) -> None:
    with pytest.raises(InvalidTask, match=f"^{name} is 2147483648; {name} must be an integer from 0 .*to 2147483647"):
        Task(model="m", prompt="p", **{name: 1 << 31})


@pytest.mark.parametrize(
    "fields", [{"prompt": ""}, {"prompt": [-1]}, {"prompt": "x", "min_tokens": 5, "max_tokens": 1}]
)
def test_what_was_refused_is_not_kept(fields: dict[str, Any]) -> None:
    """Pydantic's error holds ours, and the garbage collector cannot see into it."""
    gc.collect()
    for _ in range(20):
        with pytest.raises(InvalidTask):
            Task(model="m", **fields)
    gc.collect()
    assert [kept for kept in gc.get_objects() if type(kept) is InvalidTask] == []


def test_messages_are_counted_as_their_text() -> None:
    """In the record they come back as they went in."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "é" * 300}]}]
    task = Task(model="tiny", messages=messages, max_tokens=10)
    assert task.messages == ({"role": "user", "content": "é" * 300},)
    assert task.prompt_tokens is None
    assert 200 + 10 <= task.kv_tokens(4096) <= 220 + 10
    assert Task.parse_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("metadata", {f"name{n}": 1 for n in range(10_000)}),
        ("logit_bias", {f"name{n}": "" for n in range(10_000)}),
        ("stop", [1] * 10_000),
        ("stop_token_ids", [{}] * 10_000),
        ("allowed_token_ids", [""] * 10_000),
        ("banned_token_ids", [-1] * 10_000),
        ("bad_words", [None] * 10_000),
    ],
)
def test_too_many_entries_are_refused_before_each_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, name: str, entries: Any
) -> None:
    """pydantic makes an error of each wrong one: thousands of them took a twentieth of a second, in 64 KB."""
    monkeypatch.setattr("producers.contract.task.refusal", lambda *_: pytest.fail("pydantic has looked at it"))
    with pytest.raises(InvalidTask, match=f"{name} must be") as refused:
        Task(model="m", prompt="x", **{name: entries})
    assert (refused.value.param, refused.value.code) == (name, "invalid_value")


def test_a_schema_as_text_is_not_read_beyond_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.declared.json.loads", lambda text: pytest.fail(f"{len(text)} were read"))
    with pytest.raises(InvalidTask, match="characters") as refused:
        Task(model="m", prompt="x", json_schema="[" * 1_000_000)
    monkeypatch.undo()
    assert refused.value.param == "json_schema"
    assert Task(model="m", prompt="x", json_schema="{" + " " * 200_000 + "}").json_schema == {}


def test_a_record_keeps_the_schema_that_its_outputs_follow() -> None:
    asked = {"type": "object", "properties": {"n": {"type": "number"}}}
    task = Task(model="tiny", prompt=[1], json_schema=asked)
    assert task.json_schema == asked
    resolved = task.resolved(CARD)
    assert resolved.json_schema is not None
    assert (resolved.json_schema["additionalProperties"], resolved.json_schema["$comment"]) == (False, "penstock:2")
    assert Task.parse_json(resolved.to_json()).resolved(CARD) == resolved, "a retry keeps it"
    begun = Task.parse_json(task.to_json())
    assert begun.json_schema == asked, "a worker follows what is recorded"
    opened = Task(model="tiny", prompt=[1], json_schema=asked, open_objects=True).resolved(CARD)
    assert opened.json_schema is not None
    assert "$ref" in opened.json_schema["additionalProperties"]
    assert "open_objects" not in opened.to_json(), "a worker of the release before does not know it"
    assert Task.parse_json(opened.to_json()).resolved(CARD) == opened


def test_a_record_keeps_a_choice_as_a_grammar() -> None:
    """A worker of the release before knows no choice."""
    resolved = Task(model="tiny", prompt=[1], choice=["a", "b"]).resolved(CARD)
    assert (resolved.choice, resolved.grammar) == ((), 'start: CHOICE\nCHOICE: "a" | "b"')
    assert Task.parse_json(resolved.to_json()).resolved(CARD) == resolved


def test_a_schema_that_would_be_too_large_is_followed_to_the_letter() -> None:
    letter = {"$comment": "penstock:0"}
    numbers = {"type": "object", "properties": {f"p{at}": {"type": ["number", "null"]} for at in range(1400)}}
    resolved = Task(model="tiny", prompt=[1], json_schema=numbers).resolved(CARD)
    assert resolved.json_schema == numbers | letter
    assert Task.parse_json(resolved.to_json()).resolved(CARD) == resolved, "a retry keeps it"
    dense = {"prefixItems": [{"allOf": [{"$ref": "#/$defs/a"}]}] * 900, "$defs": {"a": {"properties": {"x": {}}}}}
    assert Task(model="tiny", prompt=[1], json_schema=dense).resolved(CARD).json_schema == dense | letter
    texts = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(127)}}
    parts = {"model": "tiny", "prompt": [1], "json_schema": texts}
    assert Task(**parts, n=64).resolved(CARD).json_schema == texts, "it has 256 parts, as many as 64 outputs may have"
    assert Task(**parts, n=63).resolved(CARD).json_schema != texts


def test_texts_whose_parts_are_labelled_are_cut_where_their_result_would_be_too_large() -> None:
    card = CARD | {"capabilities": ["token_classify"], "pooling": {"labels": ["O", "PER"], "several_labels": False}}
    task = Task(model="tiny", kind="token_classify", input=["x" * 400] * 400)
    chunks = model_fit.chunks(task, card)
    assert [at for chunk in chunks for at in chunk] == [*range(400)]
    assert max(len(chunk) for chunk in chunks) == 122, "each of 400 tokens may be a part of four numbers"
    assert len(model_fit.chunks(task.model_copy(update={"input": ("x",) * 256}), card)) == 1
    with pytest.raises(InvalidTask, match=r"labelled parts may take \d+ bytes") as refusal:
        model_fit.check(Task(model="tiny", kind="token_classify", input=["x" * 1000] * 9000), card)
    assert refusal.value.code == "array_above_max_length"
    several = card | {"pooling": {"labels": ["O", "PER"], "several_labels": True}}
    assert model_fit.result_bytes(task, several) == 2 * model_fit.result_bytes(task, card)
