"""`/v1/scaling`, `/v1/rollouts`, `/v1/webhook_deliveries`, `/v1/whoami`: what operators look up and do."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import outbox
from producers.store.fleet import scaling
from producers.store.fleet.canaries import Canary, Plan
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.routing import Routing, Rule, Shadow
from producers.store.outbox import Attempt
from producers.store.shadows import Pair
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.test_dead_letters import bury, page
from tests.producers.gateway.test_fleet import announce
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture


def audited(http: httpx.Client) -> list[tuple[str, str, str]]:
    """(by, did, what), the latest first."""
    return [(row["by"], row["did"], row["what"]) for row in http.get("/v1/audit").json()["data"]]


def data(http: httpx.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    answer = http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ---- scaling --------------------------------------------------------------------------------------------------------


def decide(valkey: Redis, pool: str, **state: Any) -> None:
    state = {"at": time.time(), "by": "scaler", "wanted": 3, "told": 2, "reason": "30 tasks wait", **state}
    valkey.set(keys.SCALE_LEADER, "scaler")
    assert run(valkey, scaling.keep("scaler", pool, state, changed=True)) == 1


def test_decisions_come_with_what_was_seen_and_why_the_latest_first(http: httpx.Client, valkey: Redis) -> None:
    decide(valkey, "tiny@1", wanted=1, reason="work came", actual={"up": 0}, signals={"queued": 4, "knee": None})
    decide(valkey, "other@2")
    decide(valkey, "tiny@1", wanted=0, reason="no work", trouble="", actual=None, signals="broken")
    latest, other, first = data(http, "/v1/scaling/decisions")
    assert [row["pool"] for row in (latest, other, first)] == ["tiny@1", "other@2", "tiny@1"]
    assert (first["before"], first["desired"], first["reason"]) == (0, 1, "work came")
    assert first["signals"] == {"queued": 4.0}
    assert (latest["before"], latest["signals"]) == (None, {})
    assert [row["desired"] for row in data(http, "/v1/scaling/decisions", pool="tiny@1")] == [0, 1]
    assert len(data(http, "/v1/scaling/decisions", limit=1)) == 1


def test_a_pool_s_decisions_are_looked_for_among_the_last_ones_alone(http: httpx.Client, valkey: Redis) -> None:
    """The stream has 10,000, of kilobytes each."""
    decide(valkey, "rare@1")
    with valkey.pipeline() as pipe:
        for number in range(2000):
            pipe.xadd(keys.SCALE_DECISIONS, {"pool": "busy@1", "decision": json.dumps({"wanted": number % 2})})
            if number == 1900:
                pipe.xadd(keys.SCALE_DECISIONS, {"pool": "rare@1", "decision": json.dumps({"wanted": 7})})
        pipe.execute()
    assert [row["desired"] for row in data(http, "/v1/scaling/decisions", pool="rare@1")] == [7]


def test_another_try_is_asked_for_and_audited(http: httpx.Client, valkey: Redis) -> None:
    decide(valkey, "org/tiny@1", trouble="no machine")
    assert http.post("/v1/scaling/org/tiny@1/retry").json()["at_once"] is True
    assert valkey.hget(keys.SCALE_RETRIES, "org/tiny@1") is not None
    assert audited(http)[0] == ("local", "scaling.retry", "org/tiny@1")
    assert code(http.post("/v1/scaling/none@1/retry")) == (404, "pool_not_found")
    assert len(audited(http)) == 1


def test_a_pool_s_number_is_pinned_and_let_go_of(http: httpx.Client, valkey: Redis) -> None:
    decide(valkey, "org/tiny@1", rules={"max": 4})
    answer = http.post("/v1/scaling/org/tiny@1/pin", json={"workers": 2, "for_s": 60}).json()
    assert (answer["workers"], answer["current"], 0 < answer["until"] - time.time() < 70) == (2, True, True)
    pin = scaling.Pin.of(valkey.hget(keys.SCALE_PINS, "org/tiny@1"))
    assert pin is not None
    assert (pin.workers, pin.by, pin.until) == (2, "local", answer["until"])
    for body, words in (
        ({"workers": 5}, "0 to 4"),
        ({"workers": -1}, "workers"),
        ({"workers": 1, "for_s": 0}, "for_s"),
        ({"workers": 1, "for_s": 367 * 86_400}, "for_s"),
    ):
        refused = http.post("/v1/scaling/org/tiny@1/pin", json=body)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text
    assert http.delete("/v1/scaling/org/tiny@1/pin").json()["workers"] is None
    assert not valkey.exists(keys.SCALE_PINS)
    assert code(http.post("/v1/scaling/none@1/pin", json={"workers": 1})) == (404, "pool_not_found")
    assert audited(http) == [
        ("local", "scaling.unpin", "org/tiny@1"),
        ("local", "scaling.pin", "org/tiny@1: 2"),
    ]


def test_a_pool_of_whatever_version_is_current_is_named_as_the_fleet_names_it(
    http: httpx.Client, valkey: Redis, model: str
) -> None:
    decide(valkey, model)
    (row,) = [row for row in http.get("/v1/fleet").json()["pools"] if row["decision"]]
    assert row["name"] != model
    assert http.post(f"/v1/scaling/{row['name']}/pin", json={"workers": 1}).json()["pool"] == model
    assert valkey.hkeys(keys.SCALE_PINS) == [model.encode()]
    assert http.post(f"/v1/scaling/{row['name']}/retry").json()["pool"] == model
    assert [row["pool"] for row in data(http, "/v1/scaling/decisions", pool=row["name"])] == [model]
    assert data(http, "/v1/scaling/decisions", pool=f"{model}@other") == []
    assert code(http.post(f"/v1/scaling/{model}@other/retry")) == (404, "pool_not_found")


def test_a_decision_tells_who_pinned_it(http: httpx.Client, valkey: Redis) -> None:
    decide(valkey, "tiny@1", pin={"workers": 3, "by": "ops", "at": 1.0, "until": 9.5})
    decide(valkey, "tiny@1", pin={"workers": "x"})
    last, first = data(http, "/v1/scaling/decisions")
    assert (first["pinned"], first["pinned_by"], first["pinned_until"]) == (3, "ops", 9.5)
    assert (last["pinned"], last["pinned_by"]) == (None, None)


# ---- workers --------------------------------------------------------------------------------------------------------


def test_a_worker_is_told_to_drain_and_one_that_cannot_hear_is_not_said_to(http: httpx.Client, valkey: Redis) -> None:
    announce(valkey, "w1.x")
    assert code(http.post("/v1/workers/w1.x/drain")) == (409, "worker_not_listening")
    with valkey.pubsub(ignore_subscribe_messages=True) as control:
        control.subscribe(keys.control("w1.x"))
        control.get_message(timeout=10)
        assert http.post("/v1/workers/w1.x/drain").json() == {"id": "w1.x", "object": "worker.draining"}
        message = control.get_message(timeout=10)
    assert message is not None
    assert message["data"] == b"drain"
    assert code(http.post("/v1/workers/none/drain")) == (404, "worker_not_found")
    assert audited(http) == [("local", "worker.drain", "w1.x")]


# ---- routing --------------------------------------------------------------------------------------------------------


def test_where_new_tasks_go_is_told(http: httpx.Client, valkey: Redis, model: str) -> None:
    assert data(http, "/v1/routing") == []
    state = Routing(
        model, 3, "v1", {"next": "v2"}, {"next": 10}, (Rule("next", tier="batch"),), "tenant", 5000, "cli:x"
    )
    state = replace(state, shadow=Shadow("v2", 5))
    valkey.hset(keys.routing(model), "now", state.to_json())
    (view,) = data(http, "/v1/routing")
    assert (view["model"], view["generation"], view["default"], view["sticky"]) == (model, 3, "v1", "tenant")
    assert (view["aliases"], view["split"]) == ({"next": "v2"}, {"next": 10.0})
    assert view["rules"] == [{"to": "next", "tenant": None, "tier": "batch", "header": None}]
    assert (view["changed_at"], view["by"], view["shadow"]) == (5.0, "cli:x", {"to": "v2", "percent": 5.0})
    valkey.hset(keys.routing(model), "now", "{")
    assert data(http, "/v1/routing") == []


def test_copies_are_told_beside_their_tasks(http: httpx.Client, valkey: Redis, model: str) -> None:
    for same in (1.0, 0.5):
        row = Pair("t", "v1", "v2", ("completed",) * 2, (4, 2), same, (("stop",), ("length",)), (9, None), (None, 0.5))
        valkey.xadd(keys.shadow_pairs(model), {"row": row.to_json()})
    valkey.xadd(keys.shadow_pairs(model), {"row": "{"})
    valkey.hset(keys.shadow_drops(model), "late", 2)
    report = http.get(f"/v1/shadows/{model}", params={"limit": 1}).json()
    assert report["drops"] == {"late": 2}
    (pair,) = report["data"]
    assert (pair["same"], pair["tokens"], pair["reasons"], pair["ms"]) == (
        0.5,
        [4, 2],
        [["stop"], ["length"]],
        [9, None],
    )
    (summary,) = report["summaries"]
    assert (summary["pairs"], summary["completed"], summary["same"], summary["equal"]) == (2, 2, 0.75, 0.5)
    assert (summary["same_reason"], summary["length"], summary["time"]) == (0.0, 0.5, None)
    assert http.get("/v1/shadows/other").json()["data"] == []


# ---- rollouts -------------------------------------------------------------------------------------------------------


def test_the_last_rollout_of_each_model_is_told(http: httpx.Client, valkey: Redis) -> None:
    failed = Rollout("tiny", "tiny=/x", "v2", "v1", 2, 100.0, 160.0, "failed", "no worker was ready in time")
    done = replace(failed, model="other", phase="done", reason="", changed=170.0)
    for rollout in (failed, done):
        valkey.hset(keys.ROLLOUTS, rollout.model, rollout.to_json())
    valkey.hset(keys.ROLLOUTS, "broken", "{")
    other, tiny = data(http, "/v1/rollouts")
    assert (other["model"], other["phase"]) == ("other", "done")
    assert tiny == {
        "object": "rollout",
        "model": "tiny",
        "version": "v2",
        "before": "v1",
        "workers": 2,
        "phase": "failed",
        "reason": "no worker was ready in time",
        "asked_at": 100.0,
        "changed_at": 160.0,
    }


def test_the_last_judged_rollout_of_each_model_is_told(http: httpx.Client, valkey: Redis) -> None:
    state = Canary("tiny", "r", "v2", "v1", Plan(), 100_000, "me").decided("judging", "its workers are ready", 1)
    valkey.hset(keys.CANARIES, mapping={"tiny": state.acted(160_000).to_json(), "broken": "{"})
    (judged,) = http.get("/v1/rollouts").json()["judged"]
    assert judged == {
        "object": "rollout.judged",
        "model": "tiny",
        "version": "v2",
        "before": "v1",
        "phase": "judging",
        "percent": 5.0,
        "reason": "its workers are ready",
        "begun_at": 100.0,
        "changed_at": 160.0,
    }


# ---- sources --------------------------------------------------------------------------------------------------------


def test_schedules_and_waiting_replies_are_told(http: httpx.Client, valkey: Redis) -> None:
    valkey.hset(keys.SCHEDULES, mapping={"nightly": "1790000000", "broken": "x"})
    put(valkey, "evt_2.reply", source="orders", reply="{}")
    answer = http.get("/v1/sources").json()
    assert answer["schedules"] == [{"name": "broken", "last_at": None}, {"name": "nightly", "last_at": 1790000000.0}]
    (replies,) = answer["replies"]
    assert (replies["source"], replies["due"]) == ("orders", 1)
    assert replies["oldest_due_s"] >= 0
    assert answer["items"] == []
    valkey.hset(keys.METRICS_SOURCES, mapping={"source_items orders done n": 7, "source_items files missed n": 2})
    assert http.get("/v1/sources").json()["items"] == [
        {"source": "files", "done": 0, "refused": 0, "missed": 2},
        {"source": "orders", "done": 7, "refused": 0, "missed": 0},
    ]


# ---- deliveries -----------------------------------------------------------------------------------------------------


def put(valkey: Redis, name: str, **fields: str) -> None:
    row = {"webhook_id": "evt_1", "type": "response.failed", "object": "t1", "url": "https://x.example/h"}
    assert run(valkey, outbox.put(name, row | fields)) == 1


def give_up(valkey: Redis, attempt: Attempt) -> None:
    (row,) = outbox.read_take(run(valkey, outbox.take("me", 1, 60_000))).rows
    assert run(valkey, outbox.dead(row, "me", attempt)) == 1


def test_a_delivery_that_was_given_up_is_shown_with_its_tries_and_delivered_again(
    http: httpx.Client, valkey: Redis
) -> None:
    put(valkey, "evt_1.whe_1", endpoint="whe_1", tenant="acme")
    give_up(valkey, Attempt(100, 30, 500, "<script>" * 1000))
    (row,) = data(http, "/v1/webhook_deliveries")
    assert (row["id"], row["state"], row["endpoint"], row["tenant"]) == ("evt_1.whe_1", "dead", "whe_1", "acme")
    (attempt,) = row["attempts"]
    assert (attempt["status"], attempt["latency_ms"], attempt["answer"][:8]) == (500, 30, "<script>")
    assert len(attempt["answer"]) == 500
    assert "secret" not in json.dumps(row)
    assert http.post("/v1/webhook_deliveries/evt_1.whe_1/replay").status_code == 200
    assert audited(http)[0] == ("local", "delivery.replay", "evt_1.whe_1")
    assert [row["id"] for row in data(http, "/v1/webhook_deliveries", state="due")] == ["evt_1.whe_1"]
    assert data(http, "/v1/webhook_deliveries") == []


def test_a_delivery_that_is_under_way_or_gone_is_not_delivered_again(http: httpx.Client, valkey: Redis) -> None:
    put(valkey, "evt_1.own")
    run(valkey, outbox.take("me", 1, 60_000))
    assert code(http.post("/v1/webhook_deliveries/evt_1.own/replay")) == (409, "delivery_under_way")
    assert code(http.post("/v1/webhook_deliveries/none/replay")) == (404, "delivery_not_found")
    assert audited(http) == []


# ---- dead letters, the caller ---------------------------------------------------------------------------------------


def test_replayed_and_removed_dead_letters_are_audited(http: httpx.Client, valkey: Redis, model: str) -> None:
    bury(valkey, "{", "[", of="penstock:queue:none:default")
    first, second = (letter["key"] for letter in page(http)["data"])
    http.post(f"/v1/dead_letters/{first}/replay")
    assert http.delete(f"/v1/dead_letters/{second}").status_code == 200
    assert code(http.delete(f"/v1/dead_letters/{second}")) == (404, "dead_letter_not_found")
    entries = audited(http)
    assert ("local", "dead_letter.delete", second) in entries
    assert [entry[1] for entry in entries].count("dead_letter.delete") == 1


def test_without_keys_everybody_may_do_everything(http: httpx.Client) -> None:
    caller = http.get("/v1/whoami").json()
    assert (caller["keys"], caller["key"], caller["tenant"], caller["sees_all"]) == (False, None, None, True)
    assert caller["scopes"] == ["admin", "cancel", "metrics", "read", "submit"]


@pytest.fixture
def keyed(open_door: Open, model: str) -> Door:
    return open_door(auth="keys")


def test_any_key_is_told_whose_it_is_and_what_it_may_do(keyed: Door, make: Make) -> None:
    token = make("acme", ("metrics",), models=("tiny",))
    caller = keyed.http.get("/v1/whoami", headers=as_caller(token)).json()
    assert (caller["tenant"], caller["scopes"], caller["models"]) == ("acme", ["metrics"], ["tiny"])
    assert (caller["keys"], caller["key"], caller["sees_all"]) == (True, token.split("_")[1], False)
    assert code(keyed.http.get("/v1/whoami")) == (401, "missing_api_key")


def test_what_an_operator_does_with_others_tasks_is_audited_and_what_they_do_is_not(
    keyed: Door, make: Make, worker: FakeWorker
) -> None:
    admin, owner = make("ops", ("admin",)), make("acme")

    def submitted(token: str) -> str:
        body = {"model": "tiny", "prompt": "def f"}
        return str(keyed.http.post("/v1/tasks", json=body, headers=as_caller(token)).json()["id"])

    own, first, second = submitted(admin), submitted(owner), submitted(owner)
    for token, task_id in ((owner, submitted(owner)), (admin, own), (admin, first)):
        assert keyed.http.post(f"/v1/tasks/{task_id}/cancel", headers=as_caller(token)).json()["accepted"]
    assert keyed.http.delete(f"/v1/tasks/{second}", headers=as_caller(admin)).status_code == 200
    worker.serve(ended := submitted(owner))
    for token in (owner, admin, admin):
        retried = keyed.http.post(
            f"/v1/tasks/{ended}/retry", headers={**as_caller(token), "idempotency-key": token[-8:]}
        )
        assert retried.status_code == 202, retried.text
    changes = keyed.http.get("/v1/audit", headers=as_caller(admin)).json()["data"]
    done = [(change["did"], change["what"], change["tenant"]) for change in changes if change["did"] != "key.create"]
    assert done == [
        ("task.retry", ended, "acme"),
        ("task.delete", second, "acme"),
        ("task.cancel", first, "acme"),
    ]


def test_an_operators_test_of_anothers_endpoint_is_audited(
    keyed: Door, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.gateway.webhooks.TEST_S", 0.01)
    admin, owner = make("ops", ("admin",)), make("acme")
    body = {"url": "https://93.184.216.34/hook", "event_types": ["response.completed"]}
    endpoint = keyed.http.post("/v1/webhook_endpoints", json=body, headers=as_caller(owner)).json()["id"]
    for token in (owner, admin):
        asked = {"event_type": "response.completed"}
        tested = keyed.http.post(f"/v1/webhook_endpoints/{endpoint}/test", json=asked, headers=as_caller(token))
        assert code(tested) == (503, "webhooks_stopped")
    changes = keyed.http.get("/v1/audit", headers=as_caller(admin)).json()["data"]
    done = [(change["by"], change["tenant"]) for change in changes if change["did"] == "endpoint.test"]
    assert done == [(admin.split("_")[1], "acme")]


def test_what_an_operator_does_with_others_responses_and_files_is_audited_once_it_is_done(
    keyed: Door, make: Make, worker: FakeWorker
) -> None:
    admin, owner = as_caller(make("ops", ("admin",))), as_caller(make("acme"))

    def made(path: str, **content: Any) -> str:
        return str(keyed.http.post(path, headers=owner, **content).json()["id"])

    ended, response = (
        made("/v1/responses", json={"model": "tiny", "input": "hi", "background": True}) for _ in range(2)
    )
    worker.serve(ended.removeprefix("resp_"))
    file = made("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
    for method, path in (
        ("POST", f"/v1/responses/{ended}/cancel"),
        ("POST", f"/v1/tasks/{ended.removeprefix('resp_')}/cancel"),
        ("POST", f"/v1/responses/{response}/cancel"),
        ("DELETE", f"/v1/responses/{response}"),
        ("DELETE", f"/v1/files/{file}"),
    ):
        assert keyed.http.request(method, path, headers=admin).status_code == 200
    changes = keyed.http.get("/v1/audit", headers=admin).json()["data"]
    done = [(change["did"], change["what"], change["tenant"]) for change in changes if change["did"] != "key.create"]
    task_id = response.removeprefix("resp_")
    assert done == [
        ("file.delete", file, "acme"),
        ("task.delete", task_id, "acme"),
        ("task.cancel", task_id, "acme"),
    ]


def test_changes_name_the_key_that_made_them(keyed: Door, valkey: Redis, make: Make) -> None:
    admin, reader = make("ops", ("admin",)), make("acme", ("read", "metrics"))
    decide(valkey, "tiny@1", trouble="no machine")
    assert code(keyed.http.post("/v1/scaling/tiny@1/retry", headers=as_caller(reader))) == (403, "missing_scope")
    assert keyed.http.post("/v1/scaling/tiny@1/retry", headers=as_caller(admin)).status_code == 200
    latest = keyed.http.get("/v1/audit", headers=as_caller(admin)).json()["data"][0]
    assert (latest["by"], latest["did"], latest["address"]) == (admin.split("_")[1], "scaling.retry", "127.0.0.1")
