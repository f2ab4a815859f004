from __future__ import annotations

import math

import pytest

from engine.errors import RequestError
from engine.params import SamplingParams


def test_lists_become_tuples_and_defaults_stand():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)
    assert hash(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("min_tokens", 0),
        ("temperature", 0),
        ("temperature", 2.0),
        ("top_k", 0),
        ("top_p", 0.001),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("stop", ("x" * 256,) * 16),
        ("n", 64),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_the_limits_themselves_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", "text"),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", ["x"] * 17),
        ("stop", [b"x"]),
        ("stop", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 5),
        ("stop_token_ids", list(range(65))),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 65),
        ("n", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.code in ("invalid_value", "invalid_type")


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match="min_tokens=6 is more than max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)
