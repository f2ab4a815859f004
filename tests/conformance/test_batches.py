"""Files and batches through OpenAI's client on a real system, with a sweeper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.conformance.conftest import System, sweeping
from tests.conformance.test_tools import TOOLS
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with sweeping(system.store_url, system.files_dir, tmp_path_factory.mktemp("log")):
        yield OpenAI(base_url=f"{system.url}/v1", api_key="none", timeout=60, max_retries=0)


def request(custom_id: str, url: str = CHAT, **body: Any) -> str:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": f"Write {custom_id}."}], "max_tokens": 4}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": chat | body})


def batch_of(client: OpenAI, lines: list[str], **fields: Any) -> str:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, **asked).id


def ended(client: OpenAI, batch_id: str) -> Any:
    batch = client.batches.retrieve(batch_id)
    return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None


def test_a_batch_is_run_to_its_end(client: OpenAI) -> None:
    lines = [request(f"r{k}") for k in range(40)]
    lines[7] = request("r7", temperature="hot")
    called = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    lines[8] = request("r8", **called)
    batch_id = batch_of(client, lines, output_expires_after={"anchor": "created_at", "seconds": 3600})
    batch = until(lambda: ended(client, batch_id), 200)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 40, 39, 1)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"r{k}" for k in range(40) if k != 7)
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert {one["response"]["body"]["object"] for one in answers} == {"chat.completion"}
    (choice,) = next(one for one in answers if one["custom_id"] == "r8")["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    (failed,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("r7", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch_id}_output.jsonl")
    assert output.expires_at is not None
    assert output.expires_at <= batch.completed_at + 3600


def test_an_input_with_a_bad_line_fails_as_a_whole(system: System, client: OpenAI) -> None:
    tasks = len(system.store.keys("penstock:task:*"))
    lines = [request("a"), "{", request("a"), request("b", "/v1/completions"), request("c", model="no-such")]
    batch_id = batch_of(client, lines)
    batch = until(lambda: ended(client, batch_id))
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "url_mismatch"),
        (5, "model_not_found"),
    ]
    assert (batch.output_file_id, batch.error_file_id, batch.request_counts.completed) == (None, None, 0)
    assert len(system.store.keys("penstock:task:*")) <= tasks, "nothing was made"
