"""Which version a request's tasks go to, and how its answer says so."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import ModelCard
from producers import AsyncClient, Client
from producers.admin import routes
from producers.client import directory
from producers.client.steps import Read, Step, drive
from producers.contract import keys
from producers.errors import IdempotencyKeyReused, UnknownModel
from producers.store.fleet import cards
from producers.store.fleet.adapters import StoredAdapter
from producers.store.fleet.routing import Rule, Selection
from tests.producers.gateway.conftest import CARD, TINY, Open
from tests.producers.gateway.test_resolved import renumbered, same_tokenizer
from tests.waiting import PATIENCE_S

OTHER = same_tokenizer()


@pytest.fixture
def routed(valkey: Redis, model: str) -> Redis:
    """`tiny` with a second version, `candidate`, which has the same tokenizer."""
    files = {name: data for name, data in ModelCard.tokenizer_files(TINY).items() if name in CARD.files}
    cards.publish(valkey, json.loads(CARD.to_json()), files)
    cards.add_version(valkey, json.loads(OTHER.to_json()), {})
    routes.set_aliases(valkey, model, {"candidate": OTHER.version})
    return valkey


def submitted(door: Any, **fields: Any) -> tuple[httpx.Response, dict[str, Any]]:
    answer = httpx.post(f"{door.url}/v1/tasks", json={"model": CARD.name, "prompt": "x", **fields})
    assert answer.status_code == 202, answer.text
    return answer, httpx.get(f"{door.url}/v1/tasks/{answer.json()['id']}").json()


def test_a_request_names_an_alias_or_a_version(routed: Redis, open_door: Open) -> None:
    door = open_door()
    for named in ({"model": "tiny@candidate"}, {"version": "candidate"}):
        answer, task = submitted(door, **named)
        assert (answer.headers["penstock-version"], answer.headers["penstock-alias"]) == (OTHER.version, "candidate")
        assert answer.headers["penstock-generation"] == "1"
        assert (task["model"], task["version"], task["alias"], task["generation"]) == (
            *("tiny", OTHER.version),
            *("candidate", 1),
        )
    answer, task = submitted(door, model=f"tiny@{OTHER.version}")
    assert (task["version"], task.get("alias")) == (OTHER.version, None)
    answer, task = submitted(door)
    assert (task["version"], task["alias"]) == (CARD.version, "default")


def test_the_ledger_says_which_tasks_were_drawn(routed: Redis, open_door: Open) -> None:
    """Others tell nothing of a rollout's candidate: callers or operators chose them, or one draw was for many."""
    routes.set_split(routed, "tiny", {"candidate": 100})
    routes.set_rules(routed, "tiny", [Rule("candidate", tenant="acme")])
    door = open_door()
    sent: list[dict[str, Any]] = [{}, {"model": "tiny@candidate"}, {"version": "default"}, {"tenant": "acme"}]
    sent += [{"sticky": "a"}, {"sticky": "a"}, {"sticky": "b"}]
    for fields in sent:
        _, task = submitted(door, **fields)
        httpx.delete(f"{door.url}/v1/tasks/{task['id']}")
    rows: Any = routed.xrange(keys.LEDGER)
    assert [(fields[b"alias"], fields[b"drawn"]) for _, fields in rows] == [
        (b"candidate", b"1"),
        (b"candidate", b""),
        (b"default", b""),
        (b"candidate", b""),
        *((b"candidate", f"{zlib.crc32(key):08x}".encode()) for key in (b"a", b"a", b"b")),
    ]


def test_a_chat_follows_it_too(routed: Redis, open_door: Open) -> None:
    body = {"model": "tiny@candidate", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
    door = open_door()
    with httpx.stream("POST", f"{door.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.headers["penstock-version"] == OTHER.version


def test_what_is_not_there_is_refused_by_name(routed: Redis, open_door: Open) -> None:
    answer = httpx.post(f"{open_door().url}/v1/tasks", json={"model": "tiny@nothing", "prompt": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "its aliases are candidate, default" in error["message"]
    answer = httpx.post(f"{open_door().url}/v1/tasks", json={"model": "tiny@a", "version": "b", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")


def test_models_are_listed_with_their_aliases(routed: Redis, open_door: Open) -> None:
    door = open_door()
    rows = httpx.get(f"{door.url}/v1/models").json()["data"]
    assert [(row["id"], row.get("parent"), row["version"]) for row in rows] == [
        ("tiny", None, CARD.version),
        ("tiny@candidate", "tiny", OTHER.version),
    ]
    one = httpx.get(f"{door.url}/v1/models/tiny@candidate").json()
    assert (one["id"], one["version"]) == ("tiny@candidate", OTHER.version)


def test_a_list_of_thousands_of_adapters_asks_the_store_for_models_aliases_alone(
    routed: Redis, open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed.hset(keys.ADAPTERS, "mine", json.dumps(asdict(StoredAdapter("mine", "tiny", "0123456789ab", 8, 1, 1))))
    asked, aliases = list[str](), AsyncClient.aliases

    async def noted(self: AsyncClient, models: Sequence[str]) -> Any:
        asked.extend(models)
        return await aliases(self, models)

    monkeypatch.setattr(AsyncClient, "aliases", noted)
    rows = httpx.get(f"{open_door().url}/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["tiny", "tiny@candidate", "mine"]
    assert asked == ["tiny"]


def test_keys_stay_with_their_version(routed: Redis, open_door: Open) -> None:
    routes.set_split(routed, "tiny", {"candidate": 50})
    door = open_door()

    def version(headers: dict[str, str] | None = None, **body: Any) -> str:
        fields = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
        url = f"{door.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**fields, **body}, headers=headers, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            return str(answer.headers["penstock-version"])

    for key in map(str, range(6)):
        assert len({version({"Penstock-Sticky": key}) for _ in range(3)}) == 1
        assert version({"Penstock-Sticky": key}) == version(user=key) == submitted(door, sticky=key)[1]["version"]
    assert {version(user=str(number)) for number in range(12)} == {CARD.version, OTHER.version}


def test_a_version_that_is_left_meanwhile_gets_no_task(
    routed: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "FRESH_S", 60.0)
    routes.set_aliases(routed, "tiny", {"default": "candidate"}, ["candidate"])
    with Client(valkey_url) as client:
        first = client.submit(model="tiny", prompt="x")
        routes.set_aliases(routed, "tiny", {"default": CARD.version})
        second = client.submit(model="tiny", prompt="x")
        named = client.submit(model=f"tiny@{OTHER.version}", prompt="x")
        versions = [handle.status().fields["version"] for handle in (first, second, named)]
        assert versions == [OTHER.version, CARD.version, OTHER.version]
        assert second.status().fields["generation"] == "3"
        with pytest.raises(UnknownModel, match='no version or alias "candidate"'):
            client.submit(model="tiny@candidate", prompt="x")


def test_the_first_change_of_a_model_is_one_step_too(
    valkey: Redis, model: str, open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a tenant's rule decides where a task goes that was on its way."""
    monkeypatch.setattr(directory, "FRESH_S", 60.0)
    files = {name: data for name, data in ModelCard.tokenizer_files(TINY).items() if name in CARD.files}
    cards.publish(valkey, json.loads(CARD.to_json()), files)
    third = json.loads(OTHER.to_json()) | {"version": "0" * len(OTHER.version)}
    for card in (json.loads(OTHER.to_json()), third):
        cards.add_version(valkey, card, {})
    door = open_door()
    assert submitted(door)[1]["version"] == CARD.version
    routes.set_aliases(valkey, model, {"default": OTHER.version})
    routes.add_rule(valkey, model, Rule(third["version"], tenant="acme"))
    assert submitted(door, tenant="acme")[1]["version"] == third["version"]
    assert submitted(door)[1]["version"] == OTHER.version


async def test_the_version_that_ran_a_task_is_found_and_that_of_an_adapters_base(
    routed: Redis, aclient: AsyncClient, valkey_url: str
) -> None:
    """For labels and spellings of what it made."""
    routed.hset(keys.ADAPTERS, "mine", json.dumps(asdict(StoredAdapter("mine", "tiny", "0123456789ab", 8, 1, 1))))
    for name in ("tiny", "mine", "tiny:mine"):
        record = await (await aclient.submit(model=f"{name}@candidate", prompt="x")).status()
        assert record.model == name.removeprefix("tiny:")
        assert (await aclient.version_of(record)).card["version"] == OTHER.version
    routed.hdel(keys.VERSIONS, f"tiny@{OTHER.version}")
    routed.hdel(keys.routing("tiny"), "now", "generation")
    async with AsyncClient(valkey_url) as later:
        assert (await later.version_of(record)).card["version"] == CARD.version


def test_a_key_belongs_to_the_version_that_its_task_names(routed: Redis, valkey_url: str) -> None:
    with Client(valkey_url) as client:
        first = client.submit(model="tiny@candidate", prompt="x", idempotency_key="k")
        assert client.submit(model="tiny", version="candidate", prompt="x", idempotency_key="k").id == first.id
        with pytest.raises(IdempotencyKeyReused):
            client.submit(model="tiny", prompt="x", idempotency_key="k")


def test_a_version_that_nobody_looks_after_is_refused(routed: Redis, valkey_url: str) -> None:
    old = json.loads(OTHER.to_json()) | {"version": "0" * len(OTHER.version)}
    cards.add_version(routed, old, {})
    with Client(valkey_url) as client:
        assert client.submit(model=f"tiny@{old['version']}", prompt="x").status().fields["version"] == old["version"]
    routed.hdel(keys.POOLS, keys.pool_queue("tiny", old["version"], keys.UNSERVED))
    with Client(valkey_url) as client, pytest.raises(UnknownModel, match="No worker serves the version 0"):
        client.submit(model=f"tiny@{old['version']}", prompt="x")


def test_a_look_reads_a_routing_s_versions_in_one_round_trip(routed: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "FRESH_S", 0.0)
    models, reads = directory.Directory(), list[Read]()

    def find() -> directory.ResolvedModel:
        def perform(step: Step) -> Any:
            assert isinstance(step, Read)
            reads.append(step)
            return [routed.execute_command(*command) for command in step.commands]

        return drive(models.find("tiny", 0.0, Selection(version="candidate")), perform)

    assert find().card["version"] == OTHER.version
    reads.clear()
    changed = json.loads(OTHER.to_json()) | {"kv_capacity": 77}
    routed.hset(keys.VERSIONS, f"tiny@{OTHER.version}", json.dumps(changed))
    assert find().card["kv_capacity"] == 77
    assert len(reads) == 1
    routes.set_aliases(routed, "tiny", {"candidate": CARD.version})
    assert (find().card["version"], find().generation) == (CARD.version, 2)


def test_an_archived_version_is_refused_by_name(routed: Redis, open_door: Open) -> None:
    routes.set_aliases(routed, "tiny", {}, ["candidate"])
    routes.set_stages(routed, "tiny", {OTHER.version: "archived"})
    door = open_door()
    answer = httpx.post(f"{door.url}/v1/tasks", json={"model": f"tiny@{OTHER.version}", "prompt": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert f"{OTHER.version} of the model" in error["message"]
    assert "is archived" in error["message"]
    (row,) = httpx.get(f"{door.url}/v1/routing").json()["data"]
    assert (row["stages"], row["approval"]) == ({OTHER.version: "archived"}, False)


def test_a_prompt_of_another_tokenizer_is_not_moved(
    routed: Redis, open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was encoded for a version that is left meanwhile is text again, or the caller sends it again."""
    monkeypatch.setattr(directory, "FRESH_S", 60.0)
    monkeypatch.setattr(directory, "PREPARED_S", 60.0)
    door = open_door()
    submitted(door)
    other = renumbered(routed)
    cards.add_version(routed, json.loads(other.to_json()), {})
    routes.set_aliases(routed, "tiny", {"default": other.version})
    answer = httpx.post(f"{door.url}/v1/tasks", json={"model": "tiny", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_changed")
    assert submitted(door)[1]["version"] == other.version, "its next try"


def test_all_prompts_of_a_request_have_one_version(routed: Redis, open_door: Open) -> None:
    routes.set_split(routed, "tiny", {"candidate": 50})
    door, seen = open_door(), set[bytes]()
    both: set[bytes] = set()
    while len(both) < 2:  # it is drawn at random
        body = {"model": "tiny", "prompt": ["x"] * 4, "max_tokens": 1, "stream": True}
        with httpx.stream("POST", f"{door.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
        new = {*routed.scan_iter(keys.task("*"))} - seen
        versions = {routed.hget(key, "version") for key in new}
        assert len(new) == 4
        assert len(versions) == 1
        assert [routed.hget(key, "drawn") for key in new].count(b"1") == 1, "one draw was for all of them"
        seen |= new
        both |= versions
