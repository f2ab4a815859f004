"""Lists and counts: a tenant's have its own things alone, and take no longer for what others have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.client import listing
from producers.contract import keys
from producers.contract.webhook import Webhook
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.isolation.conftest import ENDPOINT, TASK, Made, batch, one_of_each, posted, upload
from tests.producers.gateway.isolation.test_ids import commands

LISTS = ("/v1/tasks", "/v1/files", "/v1/batches", "/v1/webhook_endpoints")


def test_a_list_has_ones_own_alone(other: httpx.Client, theirs: Made, worker: FakeWorker, files_dir: Path) -> None:
    for path in LISTS:
        page = other.get(path).json()
        assert (page["data"], page["first_id"], page["last_id"], page["has_more"]) == ([], None, None, False), path
    mine = one_of_each(other, worker, files_dir, "other")
    for path in LISTS:
        page = other.get(path, params={"limit": 2}).json()
        assert page["data"], path
        assert not page["has_more"], path
        listed = {one["id"] for one in page["data"]}
        assert listed <= set(mine.ids()), path
        assert not listed & set(theirs.ids()), path
        assert page["last_id"] in listed, path


@pytest.mark.parametrize(
    "query",
    [
        {"metadata[m]": "1"},
        {"status": "completed"},
        {"model": "tiny"},
        {"tier": "default"},
        {"created_after": "1"},
        {"order": "asc", "limit": "1"},
    ],
)
def test_no_filter_finds_what_others_have(other: httpx.Client, theirs: Made, query: dict[str, str]) -> None:
    page = other.get("/v1/tasks", params=query).json()
    assert (page["data"], page["last_id"], page["has_more"]) == ([], None, False)


def test_no_filter_names_another_tenant_there_or_not(other: httpx.Client, theirs: Made) -> None:
    def told(tenant: str) -> list[tuple[int, str]]:
        asked = [
            other.get("/v1/tasks", params={"tenant": tenant}),
            *(other.get(path, headers={"penstock-tenant": tenant}) for path in ("/v1/files", "/v1/batches")),
            other.post("/v1/tasks", json=TASK | {"tenant": tenant}),
            other.post("/v1/completions", json=TASK, headers={"penstock-tenant": tenant}),
            other.post("/v1/responses", json={"model": "tiny", "input": "x"}, headers={"penstock-tenant": tenant}),
            other.post("/v1/webhook_endpoints", json=ENDPOINT | {"tenant": tenant}),
        ]
        return [(answer.status_code, answer.text.replace(tenant, "T")) for answer in asked]

    assert told("acme") == told("nobody")
    assert {status for status, _ in told("acme")} == {403}


def test_a_long_list_of_others_does_not_show_in_ones_own(
    acme: httpx.Client, other: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call looks at so many tasks; then it says where to go on, which would be another tenant's time."""
    monkeypatch.setattr(listing, "MAX_SCANNED", 3)
    monkeypatch.setattr(listing, "PAGE", 2)
    mine = posted(other, "/v1/tasks", json=TASK)["id"]
    for _ in range(9):
        posted(acme, "/v1/tasks", json=TASK)
    page = other.get("/v1/tasks", params={"status": "queued"}).json()
    assert ([one["id"] for one in page["data"]], page["last_id"], page["has_more"]) == ([mine], mine, False)


@pytest.mark.parametrize("path", LISTS)
def test_a_list_takes_the_same_calls_however_many_others_have(
    acme: httpx.Client, other: httpx.Client, valkey: Redis, path: str
) -> None:
    def asked() -> list[str]:
        other.get("/v1/models")
        return commands(valkey, lambda: other.get(path, params={"limit": 1}))[1]

    def make_more() -> None:
        file_id = upload(acme)
        for _ in range(5):
            posted(acme, "/v1/tasks", json=TASK)
            batch(acme, file_id)
            posted(acme, "/v1/webhook_endpoints", json=ENDPOINT)

    make_more()
    asked()  # the store keeps the scripts that a list calls from now on
    before = asked()
    assert before
    make_more()
    assert asked() == before


def test_a_tenants_index_goes_with_its_tasks(
    acme: httpx.Client, caller: Callable[..., httpx.Client], valkey: Redis
) -> None:
    """An operator lists all; a tenant's list is a set of its own, and neither is the other's."""
    theirs = posted(acme, "/v1/tasks", json=TASK)["id"]
    admin = caller("ops", scopes=("admin",))
    own = posted(admin, "/v1/tasks", json=TASK)["id"]
    assert {one["id"] for one in admin.get("/v1/tasks").json()["data"]} == {theirs, own}
    assert [one["id"] for one in acme.get("/v1/tasks").json()["data"]] == [theirs]
    assert valkey.smembers(keys.TENANTS) == {b"acme", b"ops"}


def test_ids_of_others_are_not_to_be_guessed(acme: httpx.Client, theirs: Made) -> None:
    """Each has at least 80 random bits: two that were made at once have nothing in common but their time."""
    for first, second in (
        (theirs.file, upload(acme)),
        (theirs.batch, batch(acme, theirs.file)),
        (theirs.endpoint, posted(acme, "/v1/webhook_endpoints", json=ENDPOINT)["id"]),
    ):
        tails = [one[-20:] for one in (first, second)]
        assert all(re.fullmatch("[0-9a-f]{20}", tail) for tail in tails)
        assert sum(a == b for a, b in zip(*tails, strict=True)) < 12
    made: Any = [theirs.task, theirs.running, theirs.response.removeprefix("resp_")]
    assert all(re.fullmatch("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", one) for one in made)


def test_a_webhook_of_a_task_is_shown_without_its_secret(acme: httpx.Client, valkey: Redis) -> None:
    hook = Webhook("http://127.0.0.1:9/own", ("response.completed",), "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0")
    made = posted(acme, "/v1/tasks", json=TASK | {"webhook": {"url": hook.url, "secret": hook.secret}})
    assert valkey.hget(keys.task(made["id"]), "webhook_secret") == str(hook.secret).encode()
    assert str(hook.secret) not in acme.get(f"/v1/tasks/{made['id']}").text + acme.get("/v1/tasks").text


@pytest.mark.parametrize("by", ["", "tenant", "key", "model,tier"])
def test_usage_adds_up_ones_own_alone(acme: httpx.Client, other: httpx.Client, worker: FakeWorker, by: str) -> None:
    def used(client: httpx.Client) -> Any:
        query = {"by": by} if by else {}
        table = client.get("/v1/usage", params=query | {"format": "csv"}).text
        return client.get("/v1/usage", params=query).json()["data"], table

    before = used(other)
    worker.serve(posted(acme, "/v1/tasks", json=TASK)["id"])
    assert used(other) == before
    worker.serve(posted(other, "/v1/tasks", json=TASK)["id"])
    ((mine,), table), ((theirs,), _) = used(other), used(acme)
    assert mine["tasks"] == theirs["tasks"] == 1
    assert "acme" not in table
