"""Limits of a key over HTTP: what callers are told, and that all gateways together let no more than that through."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.gateway.admission.limits import Admission
from producers.store.fleet.adapters import StoredAdapter
from tests.exhaustive import few
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Make, Open, until
from tests.producers.gateway.test_keys import as_caller, door, make
from tests.waiting import PATIENCE_S

__all__ = ["door", "make"]

T = TypeVar("T")
CALLERS, EACH = 32, 5


def minute(valkey: Redis) -> int:
    """The server's, by which requests and tokens are counted."""
    return int(valkey.time()[0]) // 60  # type: ignore[index]


def within_a_minute(valkey: Redis, ask: Callable[[], T]) -> T:
    """The answer to `ask`, begun and ended within one minute of the store: the next minute counts from 0."""
    while True:
        begun, found = minute(valkey), ask()
        if minute(valkey) == begun:
            return found


@pytest.mark.parametrize(
    ("limit", "most", "fits", "whose"),
    few(
        [
            (*limit, whose)
            for limit in (("rpm", 50, 50), ("tpm", 500, 71), ("max_in_flight", 50, 50), ("budget_tokens", 500, 71))
            for whose in ("key", "tenant")
        ],
        ("tpm", 500, 71, "key"),
        ("budget_tokens", 500, 71, "tenant"),
    ),
)
def test_two_gateways_and_32_clients_get_all_of_a_limit_and_no_more(
    open_door: Open, model: str, make: Make, valkey: Redis, limit: str, most: int, fits: int, whose: str
) -> None:
    doors = [open_door(auth="keys") for _ in range(2)]
    shared = whose == "tenant"  # by two keys
    if shared:
        valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({limit: most}))
    held = [as_caller(make(**({} if shared else {limit: most}))) for _ in range(1 + shared)]
    task = {"model": model, "prompt": [1, 2], "max_tokens": 5}

    def hammer(number: int) -> Counter[int]:
        headers = held[number // 2 % len(held)]
        with httpx.Client(base_url=doors[number % 2].url, timeout=PATIENCE_S, headers=headers) as client:
            return Counter(client.post("/v1/tasks", json=task).status_code for _ in range(EACH))

    begun = minute(valkey)
    with ThreadPoolExecutor(CALLERS) as pool:
        found = sum(pool.map(hammer, range(CALLERS)), Counter[int]())
    assert found.keys() == {202, 429}
    minutes = minute(valkey) - begun + 1 if limit in ("rpm", "tpm") else 1
    assert fits <= found[202] <= fits * minutes
    (account,) = valkey.keys(keys.account("*"))
    assert int(valkey.hget(account, "open") or 0) == found[202] == valkey.zcard(keys.TASKS)


def test_a_tenants_limits_hold_beside_those_of_its_keys(open_door: Open, make: Make, model: str, valkey: Redis) -> None:
    door = open_door(auth="keys")
    admin, path = as_caller(make("ops", ("admin",))), f"{door.url}/v1/tenants/acme/limits"

    def limit(**fields: Any) -> httpx.Response:
        return httpx.post(path, json=fields, headers=admin)

    def submit(headers: dict[str, str], url: str = door.url, **fields: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/tasks", json={"model": model, "prompt": [1], **fields}, headers=headers)

    assert limit(max_in_flight=3, max_output=20, rpm=100, tpm=10**6).json()["max_in_flight"] == 3
    assert httpx.get(path, headers=admin).json() == limit().json()
    assert limit(max_prompt=5, tpm=4).json()["error"]["param"] == "max_prompt"
    one, two, other = as_caller(make(rpm=50)), as_caller(make(max_in_flight=1)), as_caller(make("other"))
    until(lambda: submit(one, max_tokens=21).json().get("error", {}).get("code") == "output_too_long")
    first = submit(one, max_tokens=1)
    assert first.headers["x-ratelimit-limit-requests"] == "50", "the one of which less is left"
    assert submit(two).status_code == 202
    assert json.loads(valkey.hget(keys.task(valkey.zrange(keys.TASKS, -1, -1)[0].decode()), "task"))["max_tokens"] == 20
    assert "This key may have 1 tasks" in submit(two).json()["error"]["message"]
    assert submit(one).status_code == 202
    refused = submit(one)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_in_flight")
    assert refused.json()["error"]["message"].startswith("This tenant may have 3 tasks")
    assert submit(other).status_code == 202
    nobody = open_door()
    assert submit({}, nobody.url, tenant="acme").status_code == 429, "whoever names it without a key is limited, too"
    assert submit({}, nobody.url).status_code == 202
    assert set(limit(**dict.fromkeys(("rpm", "tpm", "max_in_flight", "max_output"))).json().values()) == {
        *("tenant_limits", "acme"),
        None,
    }
    assert not valkey.exists(keys.TENANT_LIMITS)
    until(lambda: submit(one).status_code == 202)
    did = [one["did"] for one in httpx.get(f"{door.url}/v1/audit", headers=admin).json()["data"]]
    assert did == ["tenant.limit", *["key.create"] * 3, "tenant.limit", "key.create"]


def test_answers_say_what_is_left(http: httpx.Client, make: Make, model: str, valkey: Redis) -> None:
    task = {"model": model, "prompt": [1, 2], "max_tokens": 5}
    chat = {"model": model, "prompt": "x", "max_tokens": 1, "stream": True}

    def ask() -> tuple[httpx.Response, ...]:
        headers = as_caller(make(rpm=2, tpm=1000))
        first = http.post("/v1/tasks", json=task, headers=headers)
        with http.stream("POST", "/v1/completions", json=chat, headers=headers) as second:
            return first, second, http.post("/v1/chat/completions", json=_chat(model), headers=headers)

    def said(answer: httpx.Response) -> dict[str, str]:
        begins = "x-ratelimit-"
        found = {name.removeprefix(begins): value for name, value in answer.headers.items() if name.startswith(begins)}
        resets = {found.pop("reset-requests"), found.pop("reset-tokens")}
        assert all(0 < float(reset.removesuffix("s")) <= 60 for reset in resets)
        return found

    first, second, refused = within_a_minute(valkey, ask)
    assert said(first) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "limit-tokens": "1000",
        "remaining-tokens": "993",
    }
    assert said(second)["remaining-requests"] == "0"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert said(refused)["remaining-requests"] == "0"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-should-retry"] == "true"
    unlimited = http.get("/v1/models", headers=as_caller(make(rpm=2))).headers
    assert not [name for name in unlimited if name.startswith("x-ratelimit")]


def _chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def test_a_budget_counts_what_was_used_and_ends_for_the_month(
    http: httpx.Client, make: Make, model: str, worker: FakeWorker
) -> None:
    headers, task = as_caller(make(budget_tokens=20)), {"model": model, "prompt": [1, 2, 3], "max_tokens": 15}

    def submit() -> httpx.Response:
        return http.post("/v1/tasks", json=task, headers=headers)

    made = submit().json()["id"]
    waits = submit()  # it may fit once the first has ended
    assert (waits.status_code, waits.json()["error"]["code"]) == (429, "budget_reserved")
    assert (waits.headers["x-should-retry"], waits.headers["retry-after"]) == ("true", "1")
    worker.serve(made, ["a"])  # 1 token of 15: 16 are left
    refused = submit()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    task["max_tokens"] = 13
    assert submit().status_code == 202


@pytest.mark.parametrize("more", [{}, {"max_output": 500}])
def test_what_names_no_output_is_shortened_so_that_no_budget_is_overrun(
    open_door: Open, model: str, make: Make, valkey: Redis, worker: FakeWorker, more: dict[str, int]
) -> None:
    doors = [open_door(auth="keys") for _ in range(2)]
    headers, budget = as_caller(make(budget_tokens=700, **more)), 700

    def hammer(number: int) -> int:
        """Submits and runs tasks, which make all that they may."""
        made = 0
        with httpx.Client(base_url=doors[number % 2].url, timeout=PATIENCE_S, headers=headers) as client:
            while (answer := client.post("/v1/tasks", json={"model": model, "prompt": [1, 2, 3]})).is_success:
                made += 1
                record = valkey.hgetall(keys.task(answer.json()["id"]))
                most = int(record.get(b"max_output") or json.loads(record[b"task"]).get("max_tokens") or 10**6)
                worker.serve(answer.json()["id"], ["a"] * min(most, 100))
            assert answer.json()["error"]["code"] in ("budget_reserved", "insufficient_quota")
        return made

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(hammer, range(8))) > 1
    (account,) = valkey.keys(keys.account("*"))
    assert int(valkey.hget(account, "reserved") or 0) == 0
    assert hammer(0) or budget - int(valkey.hget(account, "spent") or 0) < 19, "what is left is of use"
    assert int(valkey.hget(account, "spent") or 0) <= budget


PRICES = """currency = "EUR"
["tiny"."default"]
prompt = 1000
cached = 100
output = 2000
"""


@pytest.mark.parametrize("whose", ["key", "tenant"])
def test_a_budget_in_money_counts_what_tasks_cost(
    open_door: Open,
    make: Make,
    model: str,
    valkey: Redis,
    worker: FakeWorker,
    tmp_path: Path,
    whose: str,
) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    door = open_door(auth="keys", prices=str(tmp_path / "prices.toml"))
    of_key = {"budget_money": "0.05"} if whose == "key" else {}
    if not of_key:
        valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({"budget_money": "0.05"}))
    headers = as_caller(make(**of_key))

    def submit(url: str = door.url, **fields: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/tasks", json={"model": model, "prompt": [1, 2, 3], **fields}, headers=headers)

    first = submit(max_tokens=20)  # 0.003 for the prompt, 0.04 for the output
    assert submit(max_tokens=4).json()["error"]["code"] == "budget_reserved"
    worker.serve(first.json()["id"], ["a"])  # 0.005: 0.045 is left
    refused = submit(max_tokens=22)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert f"This {whose} may have tasks for 0.05 EUR in this month" in refused.json()["error"]["message"]
    assert valkey.hget(keys.task(submit().json()["id"]), "max_output") == b"21"
    account = valkey.hgetall(*valkey.keys(keys.account("*")))
    assert (account[b"paid"], account[b"pledged"]) == (b"5000000", b"45000000")
    for refused in (submit(tier="flex"), submit(open_door(auth="keys").url)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_priced")


def test_an_adapter_has_the_price_of_its_own_name_by_whichever_it_is_asked_for(
    open_door: Open, make: Make, model: str, valkey: Redis, tmp_path: Path
) -> None:
    prices = PRICES + '["*"."*"]\nprompt = 1\noutput = 1\n["mine"."default"]\nprompt = 5000\noutput = 5000\n'
    (tmp_path / "prices.toml").write_text(prices)
    adapter = StoredAdapter("mine", model, "0123456789ab", 8, 1, 1)
    valkey.hset(keys.ADAPTERS, "mine", json.dumps(asdict(adapter)))
    door, headers = open_door(auth="keys", prices=str(tmp_path / "prices.toml")), as_caller(make(budget_money="1"))
    for name in ("mine", f"{model}:mine"):
        body = {"model": name, "prompt": [1], "max_tokens": 1}
        assert httpx.post(f"{door.url}/v1/tasks", json=body, headers=headers).status_code == 202
    account = valkey.hgetall(*valkey.keys(keys.account("*")))
    assert account[b"pledged"] == b"20000000"


def test_several_prompts_of_a_request_are_tasks_each_or_none_stays(
    http: httpx.Client, make: Make, model: str, valkey: Redis
) -> None:
    headers = as_caller(make(max_in_flight=3))
    body = {"model": model, "prompt": ["a", "b", "c"], "max_tokens": 1}
    http.post("/v1/tasks", json={**body, "prompt": [1]}, headers=headers)
    refused = http.post("/v1/completions", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_in_flight")
    (account,) = valkey.keys(keys.account("*"))
    assert [int(valkey.hget(account, name) or 0) for name in ("open", "reserved")] == [1, 2]
    never = http.post("/v1/completions", json={**body, "prompt": ["a"] * 4}, headers=headers)
    assert (never.status_code, never.json()["error"]["code"]) == (400, "array_above_max_length")


@pytest.mark.parametrize("limit", ["tpm", "budget_tokens"])
def test_prompts_that_together_never_fit_are_the_callers_fault(
    http: httpx.Client, make: Make, model: str, valkey: Redis, limit: str
) -> None:
    def submit(headers: dict[str, str], **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": [[1, 2]] * 3, "max_tokens": 40, **fields}
        return http.post("/v1/completions", json=body, headers=headers)

    headers = as_caller(make(**{limit: 100}))
    together = submit(headers)
    assert (together.status_code, together.json()["error"]["code"]) == (400, "array_above_max_length")
    alone = submit(headers, max_tokens=101)
    assert (alone.status_code, alone.headers["x-should-retry"]) == (429, "false")
    assert not valkey.keys(keys.account("*"))


def test_prompts_for_which_the_month_has_too_little_left_are_not_to_be_tried_again(
    http: httpx.Client, make: Make, model: str, valkey: Redis, worker: FakeWorker
) -> None:
    """Each fits into what is left, and all together into an empty budget."""
    headers = as_caller(make(budget_tokens=100))
    spent = http.post("/v1/tasks", json={"model": model, "prompt": [1, 2, 3], "max_tokens": 50}, headers=headers)
    worker.serve(spent.json()["id"], ["a"] * 47)  # 50 are left
    body = {"model": model, "prompt": [[1, 2]] * 3, "max_tokens": 15}
    refused = http.post("/v1/completions", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert (refused.headers["x-should-retry"], "retry-after" in refused.headers) == ("false", False)
    assert "the next month's budget begins on 20" in refused.json()["error"]["message"]
    (account,) = valkey.keys(keys.account("*"))
    assert valkey.hget(account, "open") == b"0"


def test_what_one_of_several_prompts_has_used_is_not_needed_again(
    http: httpx.Client, make: Make, model: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends before the next one is submitted."""
    admit, turn = Admission.admit, asyncio.Lock()

    async def by_turns(*asked: Any) -> str:
        async with turn:
            made = await admit(*asked)
            await asyncio.to_thread(worker.serve, made, ["a"] * 15)
        return made

    monkeypatch.setattr(Admission, "admit", by_turns)
    body = {"model": model, "prompt": [[1, 2]] * 3, "max_tokens": 15}  # 17 tokens each
    answer = http.post("/v1/completions", json=body, headers=as_caller(make(budget_tokens=60)))
    assert answer.status_code == 200, answer.text


def test_one_task_may_be_too_large(http: httpx.Client, make: Make, model: str, valkey: Redis) -> None:
    headers = as_caller(make(max_prompt=3, max_output=10))

    def submit(**fields: Any) -> tuple[int, str]:
        answer = http.post("/v1/tasks", json={"model": model, "prompt": [1], **fields}, headers=headers)
        return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]

    assert submit(prompt=[1, 2, 3, 4]) == (400, "prompt_too_long")
    assert submit(max_tokens=11) == (400, "output_too_long")
    assert submit(min_tokens=11) == (400, "output_too_long")
    assert submit(prompt=[1, 2, 3], max_tokens=10)[0] == 202
    assert valkey.zcard(keys.TASKS) == 1
    assert submit()[0] == 202
    tasks = [valkey.hget(keys.task(name.decode()), "task") or b"" for name in valkey.zrange(keys.TASKS, 0, -1)]
    assert all(b'"max_tokens":10' in one.replace(b" ", b"") for one in tasks), "the key's own is the bound"


def test_texts_that_a_worker_counts_are_bounded_by_their_size(http: httpx.Client, make: Make, valkey: Redis) -> None:
    card = {**CARD, "name": "vectors", "capabilities": ["embed"], "pooling": {"dimensions": 8}}
    valkey.hset(keys.MODELS, "vectors", json.dumps(card))
    headers = as_caller(make(max_prompt=100))

    def submit(*texts: str) -> dict[str, Any]:
        body = {"kind": "embed", "model": "vectors", "input": texts}
        answer: dict[str, Any] = http.post("/v1/tasks", json=body, headers=headers).json()
        return answer

    error = submit(*["a few words of a text"] * 12)["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "input")
    assert "error" not in submit("a few words of a text")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tasks", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
    ],
)
@pytest.mark.parametrize("most", [5, 10**6])
def test_the_largest_output_bounds_what_names_none_and_refuses_nothing(
    http: httpx.Client, make: Make, model: str, valkey: Redis, path: str, body: dict[str, Any], most: int
) -> None:
    with http.stream("POST", path, json={"model": model, **body}, headers=as_caller(make(max_output=most))) as answer:
        assert answer.is_success, answer.read()
        (record,) = valkey.keys(keys.task("*"))
        task = json.loads(valkey.hget(record, "task") or "{}")
    assert 1 <= task["max_tokens"] <= most
