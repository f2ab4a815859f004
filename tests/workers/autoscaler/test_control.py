"""A kept state, whatever became of it, is gone on from or begun anew; and people are told something."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric

from producers.admin.fleet import Fleet, Pool, Scaling
from producers.connection.script import parsed
from producers.gateway.metrics.scaling import described
from tests.workers.autoscaler.conftest import Recorder
from workers.autoscaler.acting import Acting
from workers.autoscaler.control import Control
from workers.autoscaler.explain import explained, summary
from workers.autoscaler.policy.rules import Rules
from workers.autoscaler.pools import PoolSettings, Scaled

SETTINGS = PoolSettings("tiny", rules=Rules(max=4))
AT = 1000.0
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def fleet(at: float, states: dict[str, dict[str, Any]] | None = None) -> Fleet:
    queue = Pool("tiny@1", "tiny", queued={"default": 1})
    return Fleet([queue], at=at, versions={"tiny": "1"}, scaling=Scaling(states=states or {}))


def control() -> Control:
    """Of a platform with three workers."""
    acting = Acting(Recorder(3), lambda: True, 1.0)
    acting.actual = asyncio.run(acting.actuator.actual())
    return Control(Scaled(SETTINGS, acting.actuator), acting)


def kept() -> dict[str, Any]:
    state = control().decide(fleet(AT), AT, "one")
    assert state is not None
    return parsed(json.dumps(state))


@settings(max_examples=50)
@given(st.data(), JSON)
def test_a_state_with_anything_in_it_makes_no_harm(data: st.DataObject, odd: Any) -> None:
    state = kept()
    place: Any = state
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner and data.draw(st.booleans())):
            break
        place = inner
    place[key] = odd
    state = parsed(json.dumps(state))
    assert explained("tiny", state, [state], AT)
    assert summary("tiny", state, AT)
    seen = fleet(AT + 1, {"tiny": state})
    assert all(isinstance(one, Metric) for one in described(seen))
    decided = control().decide(seen, seen.at, "two")
    assert decided is not None
    assert 1 <= decided["wanted"] <= 4, "there is a task"
    json.dumps(decided, allow_nan=False)


def test_time_that_nobody_saw_is_no_starts() -> None:
    """Else a version that is rolled out again hours later would begin with a failed start."""
    state = kept()
    state["starts"]["since"] = AT
    one, later = control(), AT + 3600.0
    again = one.decide(fleet(later, {"tiny": state}), later, "two")
    assert again is not None
    assert (again["starts"]["failures"], again["trouble"]) == (0, "")
