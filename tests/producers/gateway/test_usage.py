"""`/v1/usage`: who used what, for its own tenant alone, with prices where there are some."""

from __future__ import annotations

import asyncio
import csv
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.gateway import usage
from producers.store.usage.ledger import COUNTS
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.test_keys import as_caller, make
from tests.waiting import PATIENCE_S, until

__all__ = ["make"]

PRICES = """
currency = "EUR"
[tiny.default]
prompt = 0.1
cached = 0.01
output = 0.3
[tiny."*"]
prompt = 0.2
output = 0.7
[devices.tiny]
hour = 3.6
watts = 100
"""
#: Tokens, as no float adds them up.
PROMPT, CACHED, OUTPUT = 1_000_003, 3, 7


@pytest.fixture
def door(open_door: Open, model: str, tmp_path: Path) -> Door:
    (tmp_path / "prices.toml").write_text(PRICES)
    return open_door(auth="keys", prices=str(tmp_path / "prices.toml"))


@pytest.fixture
def ledger(valkey: Redis) -> Iterator[None]:
    """Three tasks of acme's and one of another's, on two days of November."""
    for tenant, model, tier, day in (
        ("acme", "tiny", "default", 3),
        ("acme", "tiny", "flex", 3),
        ("acme", "free", "default", 4),
        ("other", "tiny", "default", 4),
    ):
        row = dict.fromkeys(COUNTS[4:], 0) | {"prompt": PROMPT, "cached": CACHED, "output": OUTPUT, "ms": 1500}
        row["engine"] = 250_000
        whose = {"key": "k", "tenant": tenant, "model": model, "version": "1", "tier": tier, "status": "completed"}
        valkey.xadd(keys.LEDGER, row | whose, id=f"{1_761_955_200_000 + day * 86_400_000}-*")  # 2025-11-01, 0:00
    return


ALL = {"since": "2025-11-01"}


@pytest.mark.usefixtures("ledger")
def test_a_tenant_sees_its_own_and_an_admin_all(http: httpx.Client, make: Make) -> None:
    def tasks(token: str, **asked: str) -> dict[str, int]:
        answer = http.get("/v1/usage", params=ALL | asked, headers=as_caller(token)).json()
        return {line["tenant"]: line["tasks"] for line in answer["data"]}

    assert tasks(make(), by="tenant") == {"acme": 3}
    assert tasks(make("none"), by="tenant") == {}
    assert tasks(make("ops", ("admin",)), by="tenant") == {"acme": 3, "other": 1}


@pytest.mark.usefixtures("ledger")
def test_lines_are_grouped_and_cost_what_the_table_says(http: httpx.Client, make: Make) -> None:
    headers = as_caller(make())

    def lines(**asked: str) -> list[dict[str, Any]]:
        found = http.get("/v1/usage", params=ALL | asked, headers=headers).json()["data"]
        return list(found)

    (whole,) = lines()
    assert (whole["tasks"], whole["completed"]) == (3, 3)
    assert (whole["seconds"], whole["engine_seconds"]) == (4.5, 0.75)
    assert (whole["prompt_tokens"], whole["cached_tokens"], whole["output_tokens"]) == (3_000_009, 9, 21)
    # 1,000,000 * 0.1 + 3 * 0.01 + 7 * 0.3 and 1,000,003 * 0.2 + 7 * 0.7, of a million
    assert (whole["cost"], whole["currency"], whole["unpriced_tasks"]) == ("0.30000763", "EUR", 1)
    assert [(line["day"], line["tier"], line["tasks"]) for line in lines(by="day,tier")] == [
        ("2025-11-04", "default", 1),
        ("2025-11-04", "flex", 1),
        ("2025-11-05", "default", 1),
    ]
    assert [line["model"] for line in lines(by="model", until="2025-11-04")] == ["tiny"]
    assert [line["tasks"] for until in ("2025-11-05", "20251105") for line in lines(until=until)] == [3, 3]
    assert lines(since="2025-11-06", by="key") == []


@pytest.mark.usefixtures("ledger")
def test_what_devices_cost_and_draw_is_shown_to_who_sees_all(http: httpx.Client, make: Make) -> None:
    (own,) = http.get("/v1/usage", params=ALL, headers=as_caller(make())).json()["data"]
    assert not {"device_cost", "joules", "overhead_cost", "idle_seconds"} & own.keys()
    admin = as_caller(make("ops", ("admin",)))
    lines = http.get("/v1/usage", params=ALL | {"by": "model"}, headers=admin).json()["data"]
    assert [(line["model"], line["device_cost"], line["joules"]) for line in lines] == [
        ("free", "0", 0.0),  # no device of its model has a price
        ("tiny", "0.00075", 75.0),  # 0.75 s
    ]


@pytest.mark.usefixtures("ledger")
def test_what_ended_while_the_clock_of_the_store_was_ahead_is_there(
    http: httpx.Client, make: Make, valkey: Redis
) -> None:
    row = dict.fromkeys(COUNTS[4:], 0) | {"key": "k", "tenant": "acme", "model": "tiny", "version": "1"}
    ahead = int((time.time() + 40 * 86_400) * 1000)
    valkey.xadd(keys.LEDGER, row | {"tier": "default", "status": "completed"}, id=f"{ahead}-*")
    (line,) = http.get("/v1/usage", params=ALL, headers=as_caller(make())).json()["data"]
    assert line["tasks"] == 4


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(("params", "headers"), [({"format": "csv"}, {}), ({}, {"accept": "text/csv"})])
def test_it_comes_as_csv(http: httpx.Client, make: Make, params: dict[str, str], headers: dict[str, str]) -> None:
    answer = http.get("/v1/usage", params=ALL | {"by": "tier"} | params, headers=as_caller(make()) | headers)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    found = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(line["tier"], line["tasks"], line["output_tokens"]) for line in found] == [
        ("default", "2", "14"),
        ("flex", "1", "7"),
    ]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"by": "colour"}, "by"),
        ({"since": "yesterday"}, "since"),
        ({"until": "2025-13-01"}, "until"),
        ({"since": "2025-11-02", "until": "2025-10-31"}, "since"),
        ({"until": "9999-12-31"}, "until"),
        ({"format": "xml"}, "format"),
        ({"tenant": "other"}, "tenant"),
    ],
)
def test_what_cannot_be_asked_is_refused(http: httpx.Client, make: Make, params: dict[str, str], param: str) -> None:
    answer = http.get("/v1/usage", params=params, headers=as_caller(make()))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_tenants_reports_are_made_one_after_another_and_few_wait(
    door: Door, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant's is made at once, whatever the first one asks for."""
    going, free, made = threading.Event(), threading.Event(), list[str | None]()
    real = usage.report

    async def slow(*arguments: Any, tenant: str | None, **more: Any) -> Any:
        made.append(tenant)
        going.set()
        if tenant == "acme":
            await asyncio.to_thread(free.wait, 60)
        return await real(*arguments, tenant=tenant, **more)

    monkeypatch.setattr(usage, "report", slow)
    acme, other = as_caller(make("acme")), as_caller(make("other"))

    def ask(headers: dict[str, str]) -> int:
        return httpx.get(f"{door.url}/v1/usage", headers=headers, timeout=PATIENCE_S).status_code

    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(ask, acme)
        assert going.wait(PATIENCE_S)
        asked = [threads.submit(ask, acme) for _ in range(7)]
        until(lambda: sum(one.done() for one in asked) == 3)
        assert ask(other) == 200
        assert made == ["acme", "other"]
        free.set()
        statuses = sorted(one.result() for one in [first, *asked])
    assert statuses == [200] * 5 + [429] * 3
    assert ask(acme) == 200


def test_a_task_that_has_ended_has_its_cost(http: httpx.Client, make: Make, worker: FakeWorker) -> None:
    """Of its tokens, at the price of its tier; as little as a millionth."""
    headers = as_caller(make())

    def task(tier: str) -> tuple[str, dict[str, Any]]:
        body = {"model": "tiny", "prompt": [1, 2, 3], "tier": tier, "max_tokens": 2}
        task_id = http.post("/v1/tasks", json=body, headers=headers).json()["id"]
        before = http.get(f"/v1/tasks/{task_id}", headers=headers).json()
        assert (before["cost"], before["currency"]) == (None, None)
        worker.claim(task_id)
        worker.append(task_id, 0, ["a", "b"], finish_reason="length")
        worker.finish(task_id, [2])
        return task_id, http.get(f"/v1/tasks/{task_id}", headers=headers).json()

    for tier, prompt, output in (("default", 0.1, 0.3), ("flex", 0.2, 0.7)):
        _, ended = task(tier)
        usage = ended["usage"]
        expected = (usage["prompt_tokens"] * prompt + usage["output_tokens"] * output) / 1e6
        assert float(ended["cost"]) == pytest.approx(expected)
        assert ended["currency"] == "EUR"
