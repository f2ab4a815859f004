"""`/v1/files` with content in a bucket: through the gateway, or by URLs that it signs."""

from __future__ import annotations

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.gateway.app import create_app
from producers.gateway.settings import GatewaySettings
from producers.store.blobs import open_blobs
from tests.aws import Aws
from tests.processes import free_port
from tests.producers.gateway.conftest import Open
from tests.producers.gateway.test_files import DATA, FILE, PURPOSE, form
from tests.producers.store.test_s3 import bucket_of
from tests.waiting import PATIENCE_S
from workers.cli.client import Gateway


@pytest.fixture
def place(aws: Aws) -> str:
    return bucket_of(aws)


@pytest.mark.parametrize("redirect", [False, True])
def test_openais_client_uploads_reads_and_deletes(open_door: Open, model: str, place: str, redirect: bool) -> None:
    client = open_door(files_dir=place, files_redirect=redirect).openai
    data = DATA * 10  # more than a part
    made = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert client.files.content(made.id).content == data
    with client.files.with_streaming_response.content(made.id, extra_headers={"range": "bytes=5-9"}) as answer:
        assert (answer.status_code, answer.read()) == (206, data[5:10])
    client.files.delete(made.id)
    assert open_blobs(place).clean(-60) == 0


def test_a_download_goes_to_the_bucket_by_a_url_of_its_own(open_door: Open, model: str, place: str, aws: Aws) -> None:
    door = open_door(files_dir=place, files_redirect=True)
    http = door.http
    file_id = http.post("/v1/files", **form(PURPOSE, FILE)).json()["id"]
    path = f"/v1/files/{file_id}/content"
    answer = http.get(path)
    assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
    assert answer.headers["location"].startswith(f"{aws.url}/files/pen/stock/{file_id}?")
    assert http.head(path).headers["content-length"] == "2", "a URL that is signed for GET opens no HEAD"
    assert b"".join(Gateway(door.url).content(file_id, 1)) == b"}"
    open_blobs(place).delete(file_id)
    assert http.get(path).json()["error"]["code"] == "file_unavailable"


def test_a_retry_with_its_key_keeps_one_blob(open_door: Open, model: str, place: str, valkey: Redis, aws: Aws) -> None:
    """The first try died before FILE_MADE: the second one's bytes get the first one's id."""
    door = open_door(files_dir=place)
    body = form(PURPOSE, FILE[:-2] + DATA * 10)
    key = {"headers": {**body.get("headers", {}), "idempotency-key": "k"}}
    first = httpx.post(f"{door.url}/v1/files", timeout=PATIENCE_S, **body | key).json()["id"]
    (entry,) = valkey.keys("penstock:idempotency:*")
    valkey.hdel(entry, "made")
    valkey.delete(keys.file(first))
    again = httpx.post(f"{door.url}/v1/files", timeout=PATIENCE_S, **body | key).json()["id"]
    assert again == first
    found = aws.client("s3").list_objects_v2(Bucket="files")["Contents"]
    assert [one["Key"] for one in found] == [f"pen/stock/{first}"]


def test_a_bucket_that_is_away_or_missing_is_said(open_door: Open, model: str, place: str, aws: Aws) -> None:
    missing, away = (
        "s3://none" + place.removeprefix("s3://files"),
        f"s3://files?endpoint_url=http://127.0.0.1:{free_port()}",
    )
    for files_dir, ready in ((missing, 503), (away + "&region=r", 200)):
        http = open_door(files_dir=files_dir).http
        answer = http.post("/v1/files", **form(PURPOSE, FILE))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_unavailable")
        answer = http.get("/readyz")
        assert answer.status_code == ready, answer.text
        assert "s3://" in answer.json()["checks"]["files"]


def test_a_redirect_without_a_bucket_is_refused(valkey_url: str) -> None:
    with pytest.raises(ValueError, match="needs a bucket"):
        create_app(GatewaySettings(valkey_url, valkey_url, files_redirect=True))
