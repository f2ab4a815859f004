"""What a worker reads of a stream that it goes on with is what readers are given of it."""

from __future__ import annotations

import json

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from producers.contract import keys
from producers.contract.stream import Token, encode_token
from workers.flow.stream import CHUNK, read_first, read_stream, tokens_of


def _write(redis: Redis, task_id: str, entries: list[str]) -> None:
    pipe = redis.pipeline(transaction=False)
    for at, entry in enumerate(entries, 1):
        pipe.xadd(keys.stream(task_id), {"e": entry}, id=f"{at}-0")
    pipe.execute()


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_the_tokens_of_each_choice_whatever_else_stands_there(valkey: Redis, count: int) -> None:
    prompt = [json.dumps({"prompt": 0, "token_ids": [1], "logprobs": [None]})]
    tokens = [encode_token(k % 2, k // 2, k % 99, 'é"\u2028\\', (-1.5, []) if k % 3 else None) for k in range(count)]
    _write(valkey, "long", prompt + tokens)
    _write(valkey, "short", [encode_token(0, 0, 7, "x")])
    ids = ["long", "none", "short"]
    read = read_first(valkey, ids)
    found = [list(tokens_of(valkey, name, first)) for name, first in zip(ids, read, strict=True)]
    assert found == [list(tokens_of(valkey, name)) for name in ids]
    assert found == [[(k % 2, k % 99) for k in range(count)], [], [(0, 7)]]
    events = [event for event in read_stream(valkey, "long") if isinstance(event, Token)]
    assert found[0] == [(event.choice, event.token_id) for event in events]


def test_a_stream_that_is_none_is_an_error_of_its_own(valkey: Redis) -> None:
    _write(valkey, "good", [encode_token(0, 0, 7, "x")])
    valkey.set(keys.stream("bad"), "no stream")
    bad, good = read_first(valkey, ["bad", "good"])
    assert isinstance(bad, ResponseError)
    assert isinstance(good, list)
    assert list(tokens_of(valkey, "good", good)) == [(0, 7)]
