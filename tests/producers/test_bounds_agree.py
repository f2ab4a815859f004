"""What `Task` takes, the engine's `SamplingParams` takes, and the other way round."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.params import SamplingParams
from producers import InvalidTask, Task
from tests.producers.conftest import CARD
from tests.producers.contract.test_task import BAD

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
EDGES = [-1, 0, 1, 2, 16, 17, 20, 21, 63, 64, 65, 100, 101, 2**31 - 1, 2**31, 2**63 - 1, 2**63]
NUMBERS = st.one_of(
    st.sampled_from([0.01, 0.0099, 10.0, 10.1, -2, -2.1, 2.0, 2.1, -100, -100.5, 10**400, -(10**400)]),
    st.just(5000).map(lambda digits: 10**digits),  # which Python does not print, nor Hypothesis
    st.sampled_from(EDGES),
    st.integers(-(2**65), 2**65),
    st.sampled_from([-0.0, 1e-300, 1.0, 1.0000001, 100.0, 100.1, math.nan, math.inf, -math.inf]),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
)
# A Task also refuses lone surrogates, which reach an engine only from Python.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.integers(254, 258).map(lambda n: "x" * n)
LISTS = st.one_of(
    st.lists(TEXTS, max_size=18),
    st.lists(st.none() | NUMBERS, max_size=4),
    st.sampled_from([63, 64, 65, 66, 4095, 4096, 4097]).map(lambda n: [7] * n),
    st.integers(62, 66).map(lambda n: ["x"] * n),
    st.dictionaries(NUMBERS, st.none() | NUMBERS, max_size=3),
    st.integers(1023, 1025).map(lambda n: dict.fromkeys(range(n), 1.5)),
    NUMBERS,
)


def refused(make: Any, fields: dict[str, Any]) -> bool:
    try:
        make(**fields)
    except (InvalidTask, RequestError):
        return True
    return False


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), st.one_of(NUMBERS, LISTS), max_size=2))
@example({"temperature": 100})
@example({"min_tokens": 2, "max_tokens": 1})
@example({"n": 2, "best_of": 1})
@example({"n": 2, "best_of": 2})
@example({"allowed_token_ids": [7], "banned_token_ids": [7]})
@example({"logit_bias": {5: 10**400}})
@example({"logit_bias": {10**400: 1}})
def test_the_edge_and_the_engine_refuse_the_same(fields: dict[str, Any]) -> None:
    if isinstance(fields.get("logit_bias"), list):  # pairs are the engine's own way to write it
        del fields["logit_bias"]
    assert refused(lambda **f: Task(model="m", prompt="x", **f), fields) == refused(SamplingParams, fields)


#: But for a lone surrogate, which a task alone refuses.
BAD_HERE = [
    (fields, param) for fields, param, _ in BAD if fields.keys() <= {*FIELDS} and fields != {"stop": ["\ud800"]}
]


@pytest.mark.parametrize(("fields", "param"), BAD_HERE, ids=[f"{k}-{param}" for k, (_, param) in enumerate(BAD_HERE)])
def test_the_engine_refuses_by_name_what_a_task_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as refused:
        SamplingParams(**fields)
    assert refused.value.param == param
    assert refused.value.code in ("invalid_value", "invalid_type")


@pytest.mark.parametrize("name", FIELDS)
def test_a_resolved_task_has_a_value_for_every_parameter(name: str) -> None:
    task = Task(model="m", prompt="x").resolved(CARD)
    SamplingParams(**{name: getattr(task, name)})
