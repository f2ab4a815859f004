"""What operators change of models' versions over HTTP: routing, and rollouts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis import Redis

from producers.admin import routes
from producers.admin.roles import ROLES
from producers.connection.connect import connect
from producers.contract import keys
from producers.rollouts import operations
from producers.rollouts.report import report
from producers.store.fleet import canaries, routing
from producers.store.fleet.canaries import Plan
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import Rule
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
        ({"generation": 1, "aliases": {"default": OTHER.version}}, "The default is no alias"),
        ({"generation": 1, "default": "no such version"}, "no such version"),
        ({"generation": 1, "aliases": {"none": None}}, "\"tiny has no alias 'none'"),
        ({"generation": 1, "aliases": {"x": "no such version"}}, "no such version"),
        ({"generation": 1, "split": {"candidate": 101}}, "101"),
        ({"generation": 1, "split": {"candidate": float("1e308")}}, "percent"),
        ({"generation": 1, "split": {f"v{k}": 0.1 for k in range(200)}}, "split"),
        ({"generation": 1, "rules": [{"to": "candidate"}]}, "a rule looks at one of"),
        ({"generation": 1, "rules": [{"to": "candidate", "tier": "batch", "color": "x"}]}, "rules.0.color"),
        ({"generation": 1, "rules": [{"to": "candidate", "tier": "batch"}] * 17}, "17 rules"),
        ({"generation": 1, "sticky": "caller"}, "sticky"),
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


def test_rules_and_the_default_change_and_the_card_goes_with_it(http: httpx.Client, routed: Redis) -> None:
    rules = [{"to": CARD.version, "tier": "batch"}]
    answer = changed(http, generation=1, default="candidate", rules=rules)
    assert answer.status_code == 200, answer.text
    after = answer.json()
    assert (after["default"], after["rules"]) == (OTHER.version, [{**rules[0], "tenant": None, "header": None}])
    assert routes.current(routed, "tiny").default == OTHER.version
    assert audited(http)[0] == ("local", "model.route", "tiny: 1 rules, default=candidate")
    assert changed(http, generation=2, rules=[]).json()["rules"] == []


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


def test_a_rollout_is_begun_held_moved_and_reported(http: httpx.Client, routed: Redis) -> None:
    def did(action: str, **body: Any) -> tuple[int, Any]:
        answer = http.post(f"/v1/rollouts/tiny/{action}", json=body or None)
        return answer.status_code, answer.json().get("phase") or answer.json()["error"]["code"]

    assert http.get("/v1/rollouts/tiny/report").status_code == 404
    assert did("pause") == (409, "rollout_refused")
    assert did("start", to="candidate", metrics={"diverged": {"margin": 0.3}}) == (409, "rollout_refused")
    body = {"to": "candidate", "steps": [10, 50], "hold_s": 60, "without": ["first_token"], "refusals": ["Nein."]}
    assert did("start", **body) == (200, "preparing")
    state = canaries.read(routed, "tiny")
    assert state is not None
    assert state.plan.refusals == ("nein.",)
    assert did("start", to="candidate") == (409, "rollout_refused")
    assert did("promote") == (200, "judging")
    assert did("pause") == (200, "paused")
    assert did("resume") == (200, "judging")
    report = http.get("/v1/rollouts/tiny/report").json()
    assert (report["phase"], report["percent"], report["steps"], report["hold_s"]) == ("judging", 10.0, [10, 50], 60)
    assert [row["what"] for row in report["decisions"]] == ["start", "raise", "pause", "resume"]
    assert {row["by"] for row in report["decisions"]} == {"local"}
    assert "first_token" not in [metric["name"] for metric in report["metrics"]]
    (failed,) = [metric for metric in report["metrics"] if metric["name"] == "failed"]
    assert (failed["n"], failed["verdict"], failed["candidate"]) == (0, "not found worse", {"share": None})
    assert http.post("/v1/rollouts/tiny/promote?full=true").json()["phase"] == "promoted"
    assert routes.current(routed, "tiny").default == OTHER.version
    assert [what for _, what, _ in audited(http) if what.startswith("rollout")] == [
        f"rollout.{name}" for name in ("promote", "resume", "pause", "promote", "start")
    ]


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "to"),
        ({"to": "candidate", "steps": [50, 10]}, "rising"),
        ({"to": "candidate", "steps": list(range(50))}, "steps"),
        ({"to": "candidate", "alpha": 0.9}, "alpha"),
        ({"to": "candidate", "hold_s": -1}, "hold_s"),
        ({"to": "candidate", "metrics": {"beauty": {}}}, "there is no metric"),
        ({"to": "candidate", "metrics": {"failed": {"margin": 2}}}, "metrics.failed.margin"),
        ({"to": "candidate", "refusals": ["a" * 101]}, "refusals.0"),
        ({"to": "candidate", "reference": "tiny=/etc"}, "reference"),
    ],
)
def test_a_rollout_that_makes_no_sense_is_not_begun(
    http: httpx.Client, valkey: Redis, body: dict[str, Any], words: str
) -> None:
    answer = http.post("/v1/rollouts/tiny/start", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.text
    assert not valkey.exists(keys.CANARIES)


def test_what_it_does_needs_no_more_than_a_gateways_rights(routed: Redis, valkey_url: str) -> None:
    routed.execute_command("ACL", "SETUSER", "gates", "reset", "on", ">pw", "-@all", *ROLES["gateway"].rules().split())
    with connect(valkey_url.replace("://", "://gates:pw@")) as store:
        state = operations.start(store, "tiny", "candidate", Plan(steps=(10.0,)))
        assert operations.promote(store, "tiny").phase == "judging"
        assert report(store, state)["tasks"] == {"candidate": 0, "baseline": 0}
        assert operations.abort(store, "tiny").phase == "aborted"
        routes.set_aliases(store, "tiny", {"default": "candidate"})
        routes.set_rules(store, "tiny", [Rule("candidate", tier="batch")])
    routed.acl_deluser("gates")
