"""A kept state, whatever became of it, is gone on from or begun anew; and people are told something."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric

from producers.admin.fleet import Fleet, Pool, Scaling
from producers.connection.script import parsed
from producers.gateway.metrics import scaling_metrics
from producers.store.fleet.scaling import Pin
from tests.workers.autoscaler.conftest import Recorder
from workers.autoscaler.control import Acting, Control
from workers.autoscaler.explain import explained, summary
from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import PoolSettings, Scaled
from workers.autoscaler.watch import victims

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


def test_tasks_of_a_version_that_no_worker_serves_are_trouble_once_they_have_waited() -> None:
    one, waiting = control(), fleet(AT)
    waiting.pools.append(Pool("tiny@2.cpu", "tiny", workers=[{"worker": "a"}]))
    said = []
    for later in (0.0, 20.0, 31.0):
        state = one.decide(replace(waiting, at=AT + later), AT + later, "one")
        assert state is not None
        said.append(state["trouble"])
    assert said[:2] == ["", ""]
    assert said[2].startswith("tasks wait for version 1, and the workers that are up serve 2")


@cache
def written() -> str:
    state = control().decide(fleet(AT), AT, "one")
    assert state is not None
    return json.dumps(state)


def kept() -> dict[str, Any]:
    return parsed(written())


@settings(max_examples=30)
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
    assert all(isinstance(one, Metric) for one in scaling_metrics(seen))
    decided = control().decide(seen, seen.at, "two")
    assert decided is not None
    assert 1 <= decided["wanted"] <= 4, "there is a task"
    json.dumps(decided, allow_nan=False)


def test_a_pinned_number_stands_for_the_policys_until_it_ends_also_where_nothing_can_be_read() -> None:
    one, pin = control(), Pin(0, "ops", AT, AT + 100)

    def wanted(later: float, pin: Pin | None, *, away: bool = False) -> tuple[int, str]:
        state = one.decide(None if away else fleet(AT + later), AT + later, "one", pin)
        assert state is not None
        return state["wanted"], state["reason"]

    assert wanted(0, None)[0] == 3
    number, reason = wanted(1, pin)
    assert number == 0
    assert reason.startswith("0: pinned by ops; without the pin 3: holds 3")
    assert wanted(2, pin, away=True)[0] == 0
    assert wanted(3, replace(pin, workers=9))[0] == 4, "the most that the settings allow"
    state = one.decide(fleet(AT + 4), AT + 4, "one", pin)
    assert state is not None
    assert "pinned     at 0 by ops since 5 s, for 95 s more" in "\n".join(explained("tiny", state, [], AT + 5))
    number, reason = wanted(101, pin)
    assert number >= 1, "there is a task"
    assert "pinned" not in reason


def test_time_that_nobody_saw_is_no_starts() -> None:
    """Else a version that is rolled out again hours later would begin with a failed start."""
    state = kept()
    state["starts"]["since"] = AT
    one, later = control(), AT + 3600.0
    again = one.decide(fleet(later, {"tiny": state}), later, "two")
    assert again is not None
    assert (again["starts"]["failures"], again["trouble"]) == (0, "")


def test_a_worker_that_is_held_back_for_long_is_replaced() -> None:
    """It goes first, after the start limit; a moment later there are three again."""
    acting = Acting(Recorder(3), lambda: True, 1.0)
    acting.actual = asyncio.run(acting.actuator.actual())
    one = Control(Scaled(PoolSettings("tiny", rules=Rules(min=3, max=4)), acting.actuator), acting)
    workers: list[dict[str, Any]] = [{"worker": f"w{k}", "running": 1} for k in range(3)]
    told, state = [], {}
    for second in range(200):
        if second == 30:
            workers[1]["unready"] = ["its breaker is open: its engine fails a probe"]
        queue = Pool("tiny@1.x", "tiny", in_flight=3, workers=workers)
        seen = Fleet([queue], at=AT + second, versions={"tiny": "1"}, scaling=Scaling(states=state))
        decided = one.decide(seen, seen.at, "one")
        assert decided is not None
        state = {"tiny": decided}
        told.append(decided["told"])
        if decided["told"] == 2:
            assert victims(seen, one.settings)[0] == "w1"
            assert "w1 (its breaker is open: its engine fails a probe)" in decided["trouble"]
    assert [number for number, before in zip(told, [0, *told], strict=False) if number != before] == [3, 2, 3]
