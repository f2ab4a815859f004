"""A plain Celery message as the fields of a record."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from producers.contract.keys import Pool
from producers.contract.sealing import KEY_FILE, new_key, unseal
from producers.contract.webhook import new_secret
from workers.flow.celery_side import plain_fields
from workers.settings import WorkerSettings
from workers.state.served import Served

NOW_MS = 1_800_000_000_000
CARD: dict[str, Any] = {
    "name": "stub",
    "version": "v1",
    "context_length": 512,
    "vocab_size": 1000,
    "capabilities": ["generate"],
    "defaults": {"temperature": 0.5},
}
SERVED = Served(WorkerSettings("", "", "stub"), None, CARD, {}, Pool("stub", "v1", "x"))


def fields(headers: dict[str, Any] | None = None, args: Sequence[Any] = (), **kwargs: Any) -> dict[str, Any]:
    plain = plain_fields(SERVED, NOW_MS, headers or {}, {"args": args, "kwargs": kwargs})
    assert plain.error is None, plain.error
    return plain.fields


def error(arguments: dict[str, Any]) -> dict[str, Any]:
    plain = plain_fields(SERVED, NOW_MS, {}, arguments)
    assert plain.error is not None
    found: dict[str, Any] = json.loads(plain.error)
    return found


def test_a_task_is_resolved_as_a_client_would() -> None:
    found = fields(prompt="x", max_tokens=3, n=2, ttl=90)
    assert found | {"task": None} == {
        "model": "stub",
        "queue": "penstock:queue:stub@v1",
        "tier": "default",
        "n": 2,
        "nonce": "",
        "ttl": 90,
        "task": None,
    }
    task = json.loads(found["task"])
    assert task["temperature"] == 0.5, "the card's default"
    assert isinstance(task["seed"], int), "stamped, so that a resumed task samples the same"
    assert (task["model"], task["prompt"], task["max_tokens"]) == ("stub", "x", 3)


@pytest.mark.parametrize(
    ("priority", "tier"),
    [(None, "default"), (0, "default"), (2, "default"), (3, "priority"), (5, "priority"), (6, "flex"), (255, "batch")],
)
def test_the_tier_is_that_of_kombu_s_list(priority: int | None, tier: str) -> None:
    assert fields({"delivery_info": {"priority": priority}}, prompt="x")["tier"] == tier


def test_a_tier_that_is_named_wins() -> None:
    assert fields({"delivery_info": {"priority": 9}}, prompt="x", tier="priority")["tier"] == "priority"


def test_a_version_that_it_names_is_that_of_its_retries_too() -> None:
    named = fields(prompt="x", version="candidate")
    assert (named["alias"], named["named"]) == ("candidate", "candidate")


def test_a_timeout_counts_from_the_claim() -> None:
    assert fields(prompt="x", timeout=1.5)["deadline"] == NOW_MS + 1500


@pytest.mark.parametrize("written", ["2027-01-15T08:00:00+00:00", "2027-01-15T09:00:00+01:00", "2027-01-15T08:00:00"])
def test_celery_s_expiry_is_a_deadline(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a zone is in UTC, as Celery takes it, wherever the worker is."""
    expected = int(datetime(2027, 1, 15, 8, tzinfo=UTC).timestamp() * 1000)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "America/New_York")
        time.tzset()
        found = fields({"expires": written}, prompt="x")["deadline"]
    time.tzset()
    assert found == expected


def test_the_first_of_two_deadlines_counts() -> None:
    soon = datetime.fromtimestamp(NOW_MS / 1000 + 5, UTC).isoformat()
    assert fields({"expires": soon}, prompt="x", timeout=60.0)["deadline"] == NOW_MS + 5000
    assert fields({"expires": soon}, prompt="x", timeout=1.0)["deadline"] == NOW_MS + 1000


@pytest.mark.parametrize(
    ("argument", "prompt"),
    [
        ("said", "said"),
        ([5, 6], [5, 6]),
        ({"id": "a", "text": "said", "token_ids": [1]}, "said"),
        ([{"text": "one"}, "two"], "one\n\ntwo"),
    ],
)
def test_a_parent_s_result_is_the_prompt(argument: Any, prompt: Any) -> None:
    assert json.loads(fields(args=[argument], max_tokens=3)["task"])["prompt"] == prompt


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([{"no": "text"}], "prompt is null"),
        ([{"text": ""}], "prompt is empty"),
        ([[{"text": "one"}, None]], "a token id is an integer"),
        ([[]], "prompt is empty"),
        ([7], "prompt is 7"),
        (["x", "y"], "has 2 positional arguments"),
    ],
)
def test_a_parent_s_result_that_is_no_prompt_is_refused(args: list[Any], said: str) -> None:
    assert said in error({"args": args, "kwargs": {}})["message"]
    assert error({"args": ["x"], "kwargs": {"prompt": "y"}})["message"].startswith("prompt is given twice")


def test_a_parent_s_result_is_the_last_message_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARD, "capabilities", ["generate", "chat"])
    system = {"role": "system", "content": "Translate."}
    task = json.loads(fields(args=[{"text": "said"}], messages=[system])["task"])
    assert task["messages"] == [system, {"role": "user", "content": "said"}]


@pytest.mark.parametrize(
    ("argument", "texts"),
    [
        ("said", ["said"]),
        (["a", [5, 6]], ["a", [5, 6]]),
        ({"text": "said"}, ["said"]),
        ([{"text": "one"}, {"text": "two"}], ["one", "two"]),
    ],
)
def test_a_parent_s_result_is_the_texts_of_a_kind(argument: Any, texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARD, "capabilities", ["embed"])
    task = json.loads(fields({"task": "penstock.embed"}, args=[argument], truncate=True)["task"])
    assert (task["kind"], task["input"], task["truncate"]) == ("embed", texts, True)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (["a"], {"kind": "classify"}, 'kind is "classify"; a task that is sent as penstock.embed is of kind embed'),
        (["a", "b"], {}, "penstock.embed has 2 positional arguments"),
        (["a"], {"input": "b"}, "input is given twice"),
        ([{"rows": [[0.5]]}], {}, "input is missing"),
        ([[{"rows": [[0.5]]}]], {}, "input[0] is null"),
        ([], {"prompt": "a"}, "prompt does not go with kind embed"),
        ([], {}, "input is missing"),
        ([["a"] * 257], {}, "at most 256"),
    ],
)
def test_what_does_not_go_with_a_kind_is_refused(
    args: list[Any], kwargs: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CARD, "capabilities", ["embed"])
    plain = plain_fields(SERVED, NOW_MS, {"task": "penstock.embed"}, {"args": args, "kwargs": kwargs})
    assert said in json.loads(plain.error or "")["message"]


def test_what_is_no_task_keeps_its_arguments_and_says_why() -> None:
    plain = plain_fields(SERVED, NOW_MS, {}, {"args": [], "kwargs": {"prompt": "x", "seed": -1}})
    assert plain.fields["task"] == '{"prompt": "x", "seed": -1}'
    assert error({"args": [], "kwargs": {"prompt": "x", "seed": -1}})["param"] == "seed"
    assert "serves model 'stub', not 'other'" in error({"kwargs": {"prompt": "x", "model": "other"}})["message"]
    assert error({"kwargs": {"prompt": [1] * 600}})["code"] == "context_length_exceeded"


def test_a_message_that_must_not_be_decoded_has_a_record_all_the_same() -> None:
    plain = plain_fields(SERVED, NOW_MS, {}, None)
    assert plain.error is None
    assert plain.fields == {
        "model": "stub",
        "queue": "penstock:queue:stub@v1",
        "tier": "default",
        "n": 1,
        "task": "{}",
        "nonce": "",
    }


def test_its_webhooks_secret_is_encrypted_where_the_worker_has_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = {"url": "https://own.example/", "secret": new_secret()}
    assert fields(prompt="x", webhook=hook)["webhook_secret"] == hook["secret"]
    file = tmp_path / "secrets.key"
    file.write_text(new_key())
    monkeypatch.setenv(KEY_FILE, str(file))
    found = fields(prompt="x", webhook=hook)
    assert hook["secret"] not in str(found)
    assert unseal(found["webhook_secret"]) == hook["secret"]
    file.unlink()
    refused = plain_fields(SERVED, NOW_MS, {}, {"args": [], "kwargs": {"prompt": "x", "webhook": hook}})
    assert json.loads(refused.error or "")["code"] == "secret_unreadable"
    assert hook["secret"] not in str(refused)
