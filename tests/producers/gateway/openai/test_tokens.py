"""`/tokenize`, `/detokenize` and `/v1/responses/input_tokens`: the tokens that a task would have."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from engine.text import ChatTemplate, Tokenizer
from producers.contract import keys
from tests.producers.gateway.conftest import CARD, TINY, Make, Open
from tests.producers.gateway.openai.conftest import MESSAGES, Answering
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture

TOKENIZER = Tokenizer.from_folder(TINY)
TEMPLATE = ChatTemplate.from_folder(TINY)


def test_a_prompt_is_what_a_completion_of_it_has(http: httpx.Client, answering: Answering) -> None:
    told = http.post("/tokenize", json={"model": "tiny", "prompt": "def f(é):", "return_token_strs": True}).json()
    ids = TOKENIZER.encode("def f(é):")
    assert told == {
        "count": len(ids),
        "max_model_len": CARD.context_length,
        "tokens": ids,
        "token_strs": [TOKENIZER.token(token_id) for token_id in ids],
    }
    http.post("/v1/completions", json={"model": "tiny", "prompt": "def f(é):"})
    assert answering.records[0].task["prompt"] == told["tokens"]
    bare = http.post("/tokenize", json={"model": "tiny", "prompt": "def f(é):", "add_special_tokens": False}).json()
    assert bare["tokens"] == TOKENIZER.encode("def f(é):", add_special_tokens=False)
    assert bare["token_strs"] is None


def test_a_chat_is_what_a_chat_completion_of_it_has(http: httpx.Client, answering: Answering) -> None:
    told = http.post("/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    http.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES})
    assert answering.records[0].task["prompt"] == told["tokens"]
    assert TEMPLATE is not None
    text = TEMPLATE.render(MESSAGES, add_generation_prompt=False)
    without = http.post("/tokenize", json={"model": "tiny", "messages": MESSAGES, "add_generation_prompt": False})
    assert without.json()["tokens"] == TOKENIZER.encode(text, add_special_tokens=False)


def test_tokens_come_back_as_their_text(http: httpx.Client, model: str) -> None:
    ids = TOKENIZER.encode("return é🙂", add_special_tokens=False)
    assert http.post("/detokenize", json={"model": model, "tokens": ids}).json() == {"prompt": "return é🙂"}
    assert http.post("/detokenize", json={"model": model, "tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        ("/tokenize", {"prompt": "x"}, 400, "model", "missing"),
        ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model", "none"),
        ("/tokenize", {"model": "tiny"}, 400, "prompt", "either a prompt or messages"),
        ("/tokenize", {"model": "tiny", "prompt": "x", "messages": MESSAGES}, 400, "prompt", "either"),
        ("/tokenize", {"model": "tiny", "prompt": ["x"]}, 400, "prompt", "text"),
        ("/tokenize", {"model": "tiny", "prompt": ""}, 400, "prompt", "characters"),
        ("/tokenize", {"model": "tiny", "prompt": "x", "temperature": 1}, 400, "temperature", "unknown field"),
        ("/tokenize", {"model": "tiny", "messages": [{"role": "robot", "content": "x"}]}, 400, "messages", "robot"),
        ("/tokenize", {"model": "tiny", "prompt": "x" * 300_000}, 413, None, "too large"),
        ("/detokenize", {"model": "tiny"}, 400, "tokens", "missing"),
        ("/detokenize", {"model": "tiny", "tokens": "x"}, 400, "tokens", "list"),
        ("/detokenize", {"model": "tiny", "tokens": [1, -1]}, 400, "tokens", "-1"),
        ("/detokenize", {"model": "tiny", "tokens": [1, None]}, 400, "tokens", "null"),
        ("/detokenize", {"model": "tiny", "tokens": [True]}, 400, "tokens", "true"),
        ("/detokenize", {"model": "tiny", "tokens": [10**30]}, 400, "tokens", "tokens from 0 to"),
        ("/v1/responses/input_tokens", {"model": "tiny"}, 400, "input", "missing"),
        ("/v1/responses/input_tokens", {"model": "none", "input": "x"}, 404, "model", "none"),
    ],
)
def test_what_is_wrong_is_refused(
    http: httpx.Client, model: str, valkey: Redis, path: str, body: dict[str, Any], status: int, param: str, said: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert said in error["message"]
    assert param is None or str(error["param"]).startswith(param)
    assert not valkey.keys(keys.task("*"))


def test_a_key_counts_only_for_models_that_it_may_use(open_door: Open, make: Make, model: str) -> None:
    http = open_door(auth="keys").http
    may, other, reads = make(), make(models=("other",)), make(scopes=("read",))
    body = {"model": model, "prompt": "x"}
    answers = {
        key: http.post("/tokenize", json=body, headers=as_caller(key)).status_code for key in (may, other, reads)
    }
    assert answers == {may: 200, other: 404, reads: 403}
    assert http.post("/tokenize", json=body).status_code == 401
    body, path = {"model": model, "input": "x"}, "/v1/responses/input_tokens"
    assert http.post(path, json=body, headers=as_caller(other)).status_code == 403
    flex = as_caller(make(tiers=("flex",)))
    assert http.post(path, json=body, headers=flex).is_success, "to count tokens has no tier"


def test_the_tokens_of_a_response_are_counted_as_it_would_have_them(
    client: openai.OpenAI, answering: Answering, valkey: Redis
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Write f.", "instructions": "Be brief."}
    first = client.responses.create(**asked)
    assert client.responses.input_tokens.count(**asked).input_tokens == len(answering.records[0].task["prompt"])
    again: dict[str, Any] = {"model": "tiny", "input": "Again.", "previous_response_id": first.id}
    made = len(valkey.keys(keys.task("*")))
    counted = client.responses.input_tokens.count(**again)
    assert (counted.object, len(valkey.keys(keys.task("*")))) == ("response.input_tokens", made)
    client.responses.create(**again)
    assert counted.input_tokens == len(answering.records[1].task["prompt"])
