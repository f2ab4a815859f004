"""What operators change of models' versions over HTTP: routing, and the end of a rollout."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis import Redis

from producers.admin import routes
from producers.contract import keys
from producers.rollouts import operations
from producers.store.fleet import canaries, routing
from producers.store.fleet.canaries import Plan
from producers.store.fleet.rollouts import Rollout
from tests.producers.gateway.conftest import CARD
from tests.producers.gateway.test_operations import audited
from tests.producers.gateway.test_routing import OTHER, routed

__all__ = ["routed"]


def changed(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/routing/tiny", json=body)


@pytest.mark.usefixtures("routed")
def test_aliases_and_the_split_change_in_one_step_that_is_audited(http: httpx.Client) -> None:
    answer = changed(http, generation=1, aliases={"candidate": None, "next": OTHER.version}, split={"next": 10})
    assert answer.status_code == 200, answer.text
    after = answer.json()
    assert (after["generation"], after["aliases"], after["split"]) == (2, {"next": OTHER.version}, {"next": 10.0})
    assert after["by"] == "local"
    assert audited(http)[0] == ("local", "model.route", f"tiny: -candidate, next={OTHER.version}, split next 10%")
    assert http.get("/v1/routing").json()["data"] == [after]
    late = changed(http, generation=1, split={})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "routing_changed")
    assert changed(http, generation=2, split={}).json()["split"] == {}


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "generation"),
        ({"generation": "1"}, "generation"),
        ({"generation": 1, "aliases": {"default": OTHER.version}}, "changed by a rollout"),
        ({"generation": 1, "aliases": {"none": None}}, "\"tiny has no alias 'none'"),
        ({"generation": 1, "aliases": {"x": "no such version"}}, "no such version"),
        ({"generation": 1, "split": {"candidate": 101}}, "101"),
        ({"generation": 1, "split": {"candidate": float("1e308")}}, "percent"),
        ({"generation": 1, "split": {f"v{k}": 0.1 for k in range(200)}}, "split"),
        ({"generation": 1, "rules": []}, "rules"),
    ],
)
def test_what_makes_no_sense_changes_nothing(
    http: httpx.Client, valkey: Redis, body: dict[str, Any], words: str
) -> None:
    before = routing.read(valkey, "tiny")
    answer = changed(http, **body)
    assert answer.status_code == 400, answer.text
    assert words in answer.text
    assert routing.read(valkey, "tiny") == before


def test_an_unknown_model_is_not_there(http: httpx.Client, model: str) -> None:
    answer = http.post("/v1/routing/none", json={"generation": 0, "split": {}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_rollout_that_waits_or_judges_is_ended_once(http: httpx.Client, routed: Redis) -> None:
    def aborted() -> tuple[int, str]:
        answer = http.post("/v1/rollouts/tiny/abort")
        return answer.status_code, answer.json().get("phase") or answer.json()["error"]["code"]

    assert aborted() == (409, "rollout_not_aborted")
    waiting = Rollout("tiny", "tiny=/new", OTHER.version, CARD.version, 1, 1.0, 1.0)
    routed.hset(keys.ROLLOUTS, "tiny", waiting.to_json())
    assert aborted() == (200, "cancelled")
    assert audited(http)[0] == ("local", "rollout.abort", f"tiny@{OTHER.version}")
    assert aborted() == (409, "rollout_not_aborted")
    routes.set_aliases(routed, "tiny", {}, ["candidate"])
    operations.start(routed, "tiny", OTHER.version, Plan(steps=(10.0,)))
    assert aborted() == (200, "aborted")
    state = canaries.read(routed, "tiny")
    assert state is not None
    assert state.phase == "aborted"
    assert routes.current(routed, "tiny").split == {}
