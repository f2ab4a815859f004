"""A tenant fills what is kept for it: files, batches, endpoints, tasks. It is refused, and the others are not."""

from __future__ import annotations

import select
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from producers.contract import keys
from tests.chaos.hostile.stage import Stage, stage, status_of

BOUNDS = ("--max-files", "12", "--max-file-bytes", "50000", "--max-batches", "8", "--max-task-bytes", "300000")


@pytest.fixture(scope="module")
def hostile() -> Iterator[Stage]:
    with stage(*BOUNDS, "--webhook-allow", "127.0.0.0/8") as made:
        yield made


@pytest.fixture(autouse=True)
def _all_still_works(hostile: Stage) -> Iterator[None]:
    """After each attack the victim's own uploads, batches, endpoints and tasks are taken, and the gateway is ready."""
    yield
    made = upload(hostile, "victim", 1000)
    assert batch(hostile, "victim", made[1])[0] == 200
    assert endpoint(hostile, "victim")[0] == 200
    assert task(hostile, "victim")[0] == 202
    assert hostile.http(None, "GET", "/readyz").status_code == 200


def said(answer: object) -> tuple[int, str]:
    body = answer.json()  # type: ignore[attr-defined]
    return answer.status_code, body["id"] if "id" in body else body["error"]["code"]  # type: ignore[attr-defined]


def upload(hostile: Stage, caller: str, size: int) -> tuple[int, str]:
    form = {"data": {"purpose": "batch"}, "files": {"file": b"x" * size}}
    return said(hostile.http(caller, "POST", "/v1/files", **form))


def batch(hostile: Stage, caller: str, file: str) -> tuple[int, str]:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return said(hostile.http(caller, "POST", "/v1/batches", json=body))


def endpoint(hostile: Stage, caller: str) -> tuple[int, str]:
    body = {"url": "http://127.0.0.1:9/", "event_types": ["response.failed"]}
    return said(hostile.http(caller, "POST", "/v1/webhook_endpoints", json=body))


def task(hostile: Stage, caller: str, **fields: object) -> tuple[int, str]:
    return said(hostile.http(caller, "POST", "/v1/tasks", json={"model": "tiny", "prompt": "a", **fields}))


def counted(times: int, attack: Callable[[], tuple[int, str]]) -> Counter[int | tuple[int, str]]:
    """How often the attack was taken, and refused with what."""
    answers = [attack() for _ in range(times)]
    return Counter(status if status < 300 else (status, code) for status, code in answers)


def test_files_by_their_bytes_and_their_number(hostile: Stage) -> None:
    hostile.key("by bytes")
    hostile.key("by number")
    large = counted(8, lambda: upload(hostile, "by bytes", 10_000))
    assert large == {200: 5, (413, "too_many_file_bytes"): 3}
    small = counted(20, lambda: upload(hostile, "by number", 0))
    assert small == {200: 12, (400, "too_many_files"): 8}


def test_uploads_that_are_begun_and_never_sent(hostile: Stage) -> None:
    """Each reserves what it declares, and is refused before its body once the tenant has no more room."""
    hostile.key("idle")
    form = {"content-type": "multipart/form-data; boundary=b", "content-length": str((1 << 16) + 20_000)}
    links = [hostile.connect() for _ in range(5)]
    for link in links:
        link.sendall(hostile.request("idle", "POST", "/v1/files", headers=form))
    waiting, answers = set(links), list[int]()
    while len(answers) < 3:
        answered, _, _ = select.select(waiting, [], [], 60)
        assert answered
        answers += map(status_of, answered)
        waiting -= {*answered}
    assert answers == [413] * 3
    assert hostile.redis.hlen(keys.uploads("idle")) == 2


def test_batches_that_never_end(hostile: Stage) -> None:
    hostile.key("many batches")
    file = upload(hostile, "many batches", 100)[1]
    assert counted(12, lambda: batch(hostile, "many batches", file)) == {200: 8, (429, "too_many_batches"): 4}
    assert hostile.redis.scard(keys.open_batches("many batches")) == 8


def test_webhook_endpoints(hostile: Stage) -> None:
    """Ten tenants of a kind, by the gateway's own default."""
    for number in range(10):
        hostile.key(f"hooks {number}")
        made = counted(21, lambda caller=f"hooks {number}": endpoint(hostile, caller))  # type: ignore[misc]
        assert made == {200: 20, (400, "too_many_endpoints"): 1}


def test_large_tasks_that_are_cancelled_at_once(hostile: Stage) -> None:
    """They wait for nothing, so no bound on what waits counts them; their records stay for their ttl."""
    hostile.key("cancels")

    def attack() -> tuple[int, str]:
        made = task(hostile, "cancels", prompt=[5] * 20, metadata={str(k): "x" * 500 for k in range(16)}, ttl=2592000)
        if made[0] == 202:
            assert hostile.http("cancels", "POST", f"/v1/tasks/{made[1]}/cancel").status_code == 200
        return made

    answers = counted(40, attack)
    refused = answers.pop((429, "too_many_task_bytes"))
    assert set(answers) == {202}
    assert refused >= 20
    kept = int(hostile.redis.hget(keys.kept("cancels"), "total") or 0)
    assert 300_000 <= kept < 330_000
    assert hostile.redis.hget(keys.WAITING_TENANTS, "cancels") is None
