"""`penstock batch` against a real gateway: what it prints and writes, and its exit status. The test is the sweeper."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import batches, files
from producers.store.blobs import FolderBlobs
from tests.producers.gateway.conftest import Door, until
from tests.workers.cli.conftest import Answer, Run, Scripted, send
from tests.workers.cli.test_client import broken

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / 'é "requests".jsonl'
    path.write_text(json.dumps(LINE) + "\n")
    return path


def submitted(penstock: Run, requests: Path, *args: str) -> str:
    ran = penstock("batch", "submit", str(requests), *args)
    assert (ran.status, ran.err) == (0, "")
    return ran.out.strip()


def end(valkey: Redis, folder: Path, batch_id: str, status: str, **contents: bytes) -> None:
    """As the sweeper does. `contents`: of the files `output` and `error`."""
    blobs, ms = FolderBlobs(folder), int(time.time() * 1000)
    run(valkey, batches.begin(batch_id, 2))
    fields: dict[str, Any] = {"status": status, "completed": 1, "failed": 1, f"{status}_at": ms}
    for kind, content in contents.items():
        file = files.File(files.new_id(ms, kind), len(content), f"{kind}.jsonl", files.BATCH_OUTPUT, ms // 1000)
        valkey.zadd(keys.FILE_NOTES, {file.id: ms // 1000})
        with blobs.writer(file.id) as writer:
            writer.write(content)
            writer.commit()
        assert run(valkey, files.file_made(file)) == b"made"
        fields[f"{kind}_file"] = file.id
    valkey.hset(keys.batch(batch_id), mapping=fields)


@pytest.fixture
def folder(tmp_path: Path, door: Door) -> Path:
    """The gateway's folder for files."""
    return tmp_path / "files"


class TestSubmit:
    def test_uploads_the_file_and_makes_a_batch_of_it(self, penstock: Run, requests: Path, valkey: Redis) -> None:
        batch_id = submitted(penstock, requests, "--window", "2h", "--metadata", "k=v")
        shown = json.loads(penstock("batch", "show", batch_id).out)
        assert (shown["endpoint"], shown["completion_window"], shown["metadata"]) == (
            "/v1/completions",
            "2h",
            {"k": "v"},
        )
        stored = valkey.hgetall(keys.file(shown["input_file_id"]))
        assert stored[b"filename"].decode() == requests.name.replace('"', "%22")
        assert int(stored[b"size"]) == requests.stat().st_size

    def test_refuses_what_cannot_be_a_batch(self, penstock: Run, requests: Path, tmp_path: Path) -> None:
        requests.write_text("no JSON")
        without_url = tmp_path / "without_url.jsonl"
        without_url.write_text("{}")
        for args, says in (
            ((str(requests),), "is not JSON: Expecting value"),
            ((str(without_url),), "has no url; name the endpoint with --endpoint"),
            ((str(requests), "--endpoint", "/v1/images/generations"), "endpoint is"),
            ((str(tmp_path / "none"),), "cannot read"),
            ((str(requests), "--output", "x"), "--output needs --wait"),
        ):
            ran = penstock("batch", "submit", *args)
            assert (ran.status, says in ran.err) == (2, True), ran.err

    def test_waits_for_its_answers(
        self, penstock: Run, requests: Path, valkey: Redis, folder: Path, tmp_path: Path
    ) -> None:
        def sweep() -> None:
            (batch_id,) = until(lambda: valkey.zrange(keys.BATCHES, 0, -1))
            end(valkey, folder, batch_id.decode(), "completed", output=b"answers\n")

        sweeping = threading.Thread(target=sweep, daemon=True)
        sweeping.start()
        output = tmp_path / "answers.jsonl"
        ran = penstock("batch", "submit", str(requests), "--wait", "--output", str(output))
        sweeping.join()
        assert (ran.status, ran.out, output.read_bytes()) == (1, "", b"answers\n")
        assert "1 of 2 requests completed" in ran.err
        assert "1 of 2 requests failed; penstock batch wait batch_" in ran.err


class TestWait:
    def test_writes_both_files(
        self, penstock: Run, requests: Path, valkey: Redis, folder: Path, tmp_path: Path
    ) -> None:
        batch_id = submitted(penstock, requests)
        failed = {"custom_id": "b", "response": None, "error": {"code": "expired", "message": "It was too late."}}
        error = json.dumps(failed).encode() + b"\n{}\n"
        end(valkey, folder, batch_id, "completed", output=b"answers\n", error=error)
        errors = tmp_path / "errors"
        ran = penstock("batch", "wait", batch_id, "--errors", str(errors))
        assert (ran.status, ran.out, errors.read_bytes()) == (1, "answers\n", error)
        assert f"the first of them 'b': It was too late.; {errors} has all of them" in " ".join(ran.err.split())

    def test_a_batch_without_failed_requests_ends_with_0(
        self, penstock: Run, requests: Path, valkey: Redis, folder: Path, progress_texts: list[str]
    ) -> None:
        batch_id = submitted(penstock, requests)
        end(valkey, folder, batch_id, "completed", output=b"answers\n")
        valkey.hset(keys.batch(batch_id), mapping={"completed": 2, "failed": 0})
        ran = penstock("batch", "wait", batch_id)
        assert progress_texts == ["[########################] 100%  2 of 2 requests  completed"]
        assert (ran.status, ran.out, ran.err) == (0, "answers\n", "2 of 2 requests completed\n")

    def test_says_why_a_batch_failed(self, penstock: Run, requests: Path, valkey: Redis) -> None:
        batch_id = submitted(penstock, requests)
        reason = {"code": "invalid_json_line", "message": "the line is not JSON", "param": None}
        run(valkey, batches.fail(batch_id, [reason | {"line": 7}, *([reason | {"line": None}] * 30)]))
        ran = penstock("batch", "wait", batch_id)
        assert (ran.status, ran.out) == (1, "")
        assert "line 7: the line is not JSON (invalid_json_line)\nthe line is not JSON" in ran.err
        assert "... and 11 more" in ran.err
        assert f"batch {batch_id} failed" in ran.err

    def test_an_expired_batch_has_its_answers_written(
        self, penstock: Run, requests: Path, valkey: Redis, folder: Path
    ) -> None:
        batch_id = submitted(penstock, requests)
        end(valkey, folder, batch_id, "expired", output=b"some\n")
        ran = penstock("batch", "wait", batch_id)
        assert (ran.status, ran.out) == (1, "some\n")
        assert "has expired, with 1 of 2 requests completed" in ran.err

    def test_waits_for_a_gateway_that_goes_away_and_not_for_one_that_never_was(
        self, run: Run, scripted: Scripted, progress_texts: list[str]
    ) -> None:
        counts = {"completed": 0, "failed": 0, "total": 0}
        batch = {"id": "b", "request_counts": counts, "output_file_id": None, "error_file_id": None}

        def answer(status: str) -> Answer:
            return send(200, json.dumps({**batch, "status": status}).encode())

        scripted.answers = [answer("validating"), broken, answer("completed")]
        ran = run("batch", "wait", "b", "--url", scripted.url)
        assert (ran.status, ran.err) == (0, "0 of 0 requests completed\n")
        assert progress_texts == ["validating", "the gateway does not answer: trying again", "completed"]
        assert run("batch", "wait", "b", "--url", "http://127.0.0.1:1").status == 3

    def test_gives_up_in_time(self, penstock: Run, requests: Path) -> None:
        ran = penstock("batch", "wait", submitted(penstock, requests), "--timeout", "0")
        assert (ran.status, "is still validating after 0 s" in ran.err) == (4, True)


def test_batches_are_listed_and_cancelled(penstock: Run, requests: Path, valkey: Redis) -> None:
    ids = [submitted(penstock, requests) for _ in range(3)]
    assert [row.split()[0] for row in penstock("batch", "ls").out.splitlines()] == ids[::-1]
    listed = penstock("batch", "ls", "--limit", "2", "--json").out.splitlines()
    assert [json.loads(row)["id"] for row in listed] == ids[:0:-1]
    assert penstock("batch", "cancel", ids[0]).out == f"{ids[0]} is cancelling\n"
    run(valkey, batches.fail(ids[1], []))
    assert penstock("batch", "cancel", ids[1]).status == 1
    assert penstock("batch", "cancel", "batch_x").status == 2
