from __future__ import annotations

import math

import pytest

from engine.errors import RequestError
from engine.params import SamplingParams
from engine.request import Request
from engine.scheduling.limits import RequestLimits

LIMITS = RequestLimits(max_model_len=20, kv_capacity=16, vocab_size=100)


def request(prompt: int = 4, max_tokens: int | None = None, n: int = 1, **rest) -> Request:
    given = {"id": "a", "prompt_ids": [1] * prompt, "params": SamplingParams(max_tokens=max_tokens, n=n)}
    return Request(**(given | rest))


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, None), (16, None), (16, 1), (16, 0), (1, 16), (8, 9)])
def test_what_fits_context_and_cache_is_taken(prompt, max_tokens):
    LIMITS.check(request(prompt, max_tokens))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "param"),
    [
        (20, None, "context_length_exceeded", "prompt_ids"),
        (21, 1, "context_length_exceeded", "prompt_ids"),
        (10, 11, "context_length_exceeded", "max_tokens"),
        (17, None, "kv_capacity_exceeded", "prompt_ids"),
        (17, 0, "kv_capacity_exceeded", "prompt_ids"),
        (10, 8, "kv_capacity_exceeded", "max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figures(prompt, max_tokens, code, param):
    said = rf"maximum context length is 20 tokens.*\({prompt} in the prompt|{prompt} tokens of prompt.* 16 tokens"
    with pytest.raises(RequestError, match=said) as caught:
        LIMITS.check(request(prompt, max_tokens))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(("prompt", "max_tokens", "limit"), [(4, None, 13), (4, 5, 5), (4, 0, 0), (16, None, 1)])
def test_an_output_ends_where_the_room_does(prompt, max_tokens, limit):
    assert LIMITS.output_limit(request(prompt, max_tokens)) == limit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", ""),
        ("id", 7),
        ("prompt_ids", []),
        ("prompt_ids", [1, 100]),
        ("prompt_ids", [-1, 1]),
        ("prompt_ids", [1, 1.0]),
        ("prompt_ids", [True]),
        ("tier", 4),
        ("tier", -1),
        ("tier", True),
        ("salt", None),
        ("adapter", 1),
        ("tenant", None),
        ("weight", 0.0),
        ("weight", math.nan),
        ("weight", 10**400),
        ("weight", "2"),
        ("resume", [[1], [1]]),
        ("resume", [[100]]),
        ("prompt_ids", [10**5000]),
        ("resume", [[10**400]]),
        ("tier", 10**400),
        ("arrival", 10**400),
        ("arrival", -math.inf),
        ("arrival", math.nan),
        ("arrival", "now"),
        ("params", {}),
    ],
)
def test_a_bad_field_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        LIMITS.check(request(**{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [100]),
        ("allowed_token_ids", [1, 100]),
        ("banned_token_ids", [100, 1]),
        ("banned_token_ids", list(range(100))),
        ("logit_bias", {100: 1.0}),
    ],
)
def test_a_parameter_that_the_model_cannot_meet_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        LIMITS.check(request(params=SamplingParams(**{name: value})))
    assert caught.value.param == name


def test_how_much_is_said_of_a_prompt_is_bounded():
    wide = RequestLimits(max_model_len=1 << 20, kv_capacity=1 << 20, vocab_size=None)
    for prompt, count in ((262_144, 0), (12_483, 20)):
        wide.check(request(prompt, params=SamplingParams(prompt_logprobs=count)))
        with pytest.raises(RequestError, match="at most 262144 are given") as caught:
            wide.check(request(prompt + 1, params=SamplingParams(prompt_logprobs=count)))
        assert caught.value.param == "prompt_logprobs"
