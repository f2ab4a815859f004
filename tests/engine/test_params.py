from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.declared import declared
from engine.errors import RequestError
from engine.params import SamplingParams


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
def test_the_defaults_are_within_their_bounds(kind: type) -> None:
    """They are not checked again for each request."""
    for name, declaration in declared(kind).items():
        if declaration.default is not None:
            assert declaration.bound.check(name, declaration.default) == declaration.default


def test_lists_become_tuples_and_defaults_stand():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop="text").stop == ("text",)
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)
    assert hash(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1),
        ("min_tokens", 0),
        ("temperature", 0),
        ("temperature", 2.0),
        ("top_k", 0),
        ("top_p", 0.001),
        ("min_p", 0),
        ("min_p", 1.0),
        ("typical_p", 0.001),
        ("typical_p", 1),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 10),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("logit_bias", tuple((token_id, -100.0) for token_id in range(1024))),
        ("allowed_token_ids", tuple(range(4096))),
        ("banned_token_ids", (0,) * 4096),
        ("bad_words", ("x" * 256,) * 64),
        ("include_stop", True),
        ("best_of", 1),
        ("best_of", 64),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
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
        *((name, None) for name in ("min_p", "allowed_token_ids", "include_stop", "min_tokens", "temperature", "stop")),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: None}),
        ("logit_bias", [(1, 1.0), (1, 2.0)]),
        ("logit_bias", [(1,)]),
        ("logit_bias", ["ab"]),
        ("stop", [b"x"]),
        ("temperature", 10**400),
    ],
)
def test_what_only_python_can_say_is_refused_by_name(name, value):
    """Values that a task's JSON can have too are in tests/producers/test_bounds_agree.py."""
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.code in ("invalid_value", "invalid_type")


def test_min_tokens_may_not_exceed_max_tokens():
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match="min_tokens=6 is more than max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_a_mapping_of_biases_becomes_pairs():
    params = SamplingParams(logit_bias={7: -1, 3: 2.5})
    assert params.logit_bias == ((3, 2.5), (7, -1.0))
    assert SamplingParams(logit_bias=params.logit_bias) == params
    assert hash(params)


def test_best_of_makes_at_least_what_is_given():
    assert (SamplingParams(n=3).width, SamplingParams(n=3, best_of=5).width) == (3, 5)
    assert [SamplingParams(n=2, best_of=k).selects for k in (None, 2, 3)] == [False, False, True]
    with pytest.raises(RequestError, match="best_of=2 is less than n=3"):
        SamplingParams(n=3, best_of=2)


def test_a_ban_must_leave_something_of_what_is_allowed():
    SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[2, 3])
    with pytest.raises(RequestError, match="no token that banned_token_ids does not ban"):
        SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[2, 1])


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "seed", "n", "logprobs"])
def test_a_number_that_python_does_not_print_is_refused_too(name):
    with pytest.raises(RequestError, match=f"{name}=a huge int"):
        SamplingParams(**{name: 10**5000})


def test_a_schema_too_deep_to_be_printed_is_refused_as_any_other() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="json_schema=a huge dict must be a JSON object"):
        SamplingParams(json_schema=schema)
