"""`/v1/files`, by OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import keys as admin
from producers.contract import keys
from producers.gateway import files
from producers.gateway.app import FILE_PIECES
from producers.gateway.uploads import MAX_PARTS, SLICE, Form
from producers.store.access.audit import Actor
from producers.store.blobs import FolderBlobs
from producers.store.blobs.folder import FolderWriter
from producers.store.files import LEASE_S
from tests.conformance.conftest import gateway
from tests.producers.gateway.conftest import Ask, Door, Open, until
from tests.waiting import PATIENCE_S

DATA = b'{"custom_id": "a"}\n' * 50_000
MINUTE = {"anchor": "created_at", "seconds": 3600}


@pytest.fixture
def folder(files_dir: Path) -> Path:
    """The gateway's, without what other tests left."""
    for name in there(files_dir):
        (files_dir / name).unlink()
    return files_dir


def there(folder: Path) -> list[str]:
    """All files in the folder, half ones too."""
    return [name for _, _, names in os.walk(folder) for name in names]


class TestOpenaisClient:
    def test_a_file_is_uploaded_read_and_deleted(self, client: openai.OpenAI, folder: Path) -> None:
        made = client.files.create(file=("in.jsonl", DATA), purpose="batch")
        assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(DATA), "in.jsonl", "batch")
        assert (made.status, made.expires_at) == ("processed", made.created_at + 30 * 24 * 3600)
        assert client.files.retrieve(made.id) == made
        assert client.files.content(made.id).content == DATA
        assert there(folder) == [made.id]
        deleted = client.files.delete(made.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
        assert there(folder) == []
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match=made.id):
                call(made.id)

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            ("a/b/../in.jsonl", "in.jsonl"),
            ("/etc/passwd", "passwd"),
            ("..\\..\\in.jsonl", "in.jsonl"),
            ("C:\\in.jsonl", "in.jsonl"),
            ("..", "upload"),
            ("a/", "upload"),
            ("in\x01\x7f\u202e\u2028.jsonl", "in.jsonl"),
            ('é "; x=é.jsonl', 'é "; x=é.jsonl'),
        ],
    )
    def test_of_a_files_name_only_what_it_shows_is_kept_without_folders(
        self, http: httpx.Client, given: str, kept: str
    ) -> None:
        """Whoever downloads it may write it under that name."""
        quoted = given.replace('"', "%22")
        part = f'name="file"; filename="{quoted}"\r\n\r\n{{}}'.encode()
        made = http.post("/v1/files", **form(part, PURPOSE)).json()
        assert made["filename"] == kept.replace('"', "%22")
        disposition = http.get(f"/v1/files/{made['id']}/content").headers["content-disposition"]
        assert disposition == f"attachment; filename*=UTF-8''{quote(made['filename'])}"

    def test_files_are_listed_in_pages(self, client: openai.OpenAI) -> None:
        made = [client.files.create(file=b"", purpose="batch").id for _ in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")] == made
        page = client.files.list(limit=2, after=made[3], extra_headers={})
        assert ([file.id for file in page.data], page.has_more) == ([made[2], made[1]], True)
        assert list(client.files.list(purpose="batch_output")) == []
        assert list(client.files.list(extra_headers={"penstock-tenant": "acme"})) == []

    def test_a_file_expires(self, client: openai.OpenAI, valkey: Redis) -> None:
        made = client.files.create(file=("é.jsonl", io.BytesIO(b"{}")), purpose="batch", expires_after=MINUTE)  # type: ignore[arg-type]
        assert made.filename == "é.jsonl"
        assert made.expires_at == made.created_at + 3600
        valkey.hset(keys.file(made.id), "expires_at", made.created_at)
        with pytest.raises(openai.NotFoundError, match="has expired"):
            client.files.retrieve(made.id)

    async def test_the_asyncio_client_does_the_same(self, door: Door) -> None:
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as client:
            made = await client.files.create(file=("in.jsonl", DATA), purpose="batch")
            assert (await client.files.content(made.id)).content == DATA
            async with client.files.with_streaming_response.content(made.id) as answer:
                assert sum([len(part) async for part in answer.iter_bytes()]) == len(DATA)
            assert [file.id async for file in client.files.list()] == [made.id]


@pytest.fixture
def send(http: httpx.Client) -> Ask:
    def send(data: dict[str, Any] | None = None, name: str | None = "in.jsonl", **more: Any) -> httpx.Response:
        fields = {"purpose": "batch"} if data is None else data
        return http.post("/v1/files", data=fields, files={"file": (name, DATA)} if name else None, **more)

    return send


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> dict[str, Any]:
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + end
    return {"content": body, "headers": {"content-type": "multipart/form-data; boundary=b"}}


FILE = b'name="file"; filename="x"\r\n\r\n{}'
PURPOSE = b'name="purpose"\r\n\r\nbatch'


class TestBadUploads:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "purpose"),
            ({"purpose": "fine-tune"}, "purpose"),
            ({"purpose": "batch", "colour": "red"}, "colour"),
            ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
            ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after"),
            ({"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
            *(
                (
                    {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": n},
                    "expires_after",
                )
                for n in ("3599", "2592001", "1e4", "²")
            ),
        ],
    )
    def test_a_bad_field_is_named_and_nothing_is_left(
        self, send: Ask, folder: Path, valkey: Redis, fields: dict[str, str], param: str
    ) -> None:
        answer = send(fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert there(folder) == valkey.keys("penstock:file*") == []

    @pytest.mark.parametrize(
        ("request_", "status", "says"),
        [
            (form(PURPOSE), 400, "file is missing"),
            (form(FILE, PURPOSE, FILE), 400, '"file" comes twice'),
            (form(PURPOSE, PURPOSE, FILE), 400, '"purpose" comes twice'),
            (form(FILE, PURPOSE, end=b"--b\r\n"), 400, "ends early"),
            (form(PURPOSE, FILE, end=b""), 400, "ends early"),
            (form(*[b'name="%d"\r\n\r\n' % n for n in range(MAX_PARTS + 1)]), 400, "parts"),
            (form(b'name="purpose"\r\n\r\n' + b"x" * 5000, FILE), 400, "more than 4096 bytes"),
            (form(b'nam="purpose"\r\n\r\n', FILE), 400, "a part has no name"),
            (form(b'name="purpose"\r\n\r\n\xff', FILE), 400, "not UTF-8"),
            (form(b'name="file"; filename="' + b"x" * 600 + b'"\r\n\r\n', PURPOSE), 400, "600 characters"),
            (form() | {"content": b"no form at all"}, 400, "no form"),
            (form() | {"content": b""}, 400, "ends early"),
            (form() | {"headers": {"content-type": "multipart/form-data"}}, 415, "with a boundary"),
            (form() | {"headers": {"content-type": "multipart/form-data; boundary=" + "x" * 999}}, 400, "no form"),
            (form() | {"headers": {"content-type": "application/json"}}, 415, "multipart/form-data"),
        ],
    )
    def test_what_is_no_form_is_refused(
        self, http: httpx.Client, folder: Path, request_: dict[str, Any], status: int, says: str
    ) -> None:
        answer = http.post("/v1/files", **request_)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
        assert there(folder) == []

    def test_a_packed_upload_is_refused(self, send: Ask) -> None:
        assert send(headers={"content-encoding": "gzip"}).status_code == 415

    @pytest.mark.parametrize("declared", [True, False])
    def test_a_file_that_is_too_large_is_refused(self, open_door: Open, folder: Path, declared: bool) -> None:
        door = open_door(max_file=len(DATA) - 1, files_dir=str(folder))
        http = door.http
        asked = http.build_request("POST", "/v1/files", data={"purpose": "batch"}, files={"file": DATA})
        body = asked.read()
        answer = http.post(
            "/v1/files",
            content=body if declared else iter([body[:1000], body[1000:]]),
            headers={"content-type": asked.headers["content-type"]},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
        assert there(folder) == []

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=user_data", "after=file-1", "after="]
    )
    def test_a_bad_query_is_named(self, http: httpx.Client, query: str) -> None:
        error = http.get(f"/v1/files?{query}").json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", query.partition("=")[0])

    @pytest.mark.parametrize("file_id", ["file-1", "file-" + "0" * 32, "..", "%2e%2e%2fx", "a" * 3000, "\u202e"])
    def test_an_unknown_file_is_not_found(self, http: httpx.Client, file_id: str) -> None:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert http.request(method, f"/v1/files/{file_id}{path}").status_code in (404, 405)

    def test_a_folder_that_cannot_be_written_to_is_a_503(self, open_door: Open, tmp_path: Path) -> None:
        (tmp_path / "files").write_text("a file, not a folder")
        http = open_door().http
        answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": DATA})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_unavailable")


def test_ranges_of_a_file_are_given(http: httpx.Client, send: Ask) -> None:
    file_id = send().json()["id"]

    def get(**headers: str) -> tuple[int, bytes, str | None]:
        answer = http.get(f"/v1/files/{file_id}/content", headers={n.replace("_", "-"): h for n, h in headers.items()})
        return answer.status_code, answer.content, answer.headers.get("content-range")

    size = len(DATA)
    assert get(range="bytes=5-9") == (206, DATA[5:10], f"bytes 5-9/{size}")
    assert get(range=f"bytes={size - 3}-") == (206, DATA[-3:], f"bytes {size - 3}-{size - 1}/{size}")
    assert get(range="bytes=-4") == (206, DATA[-4:], f"bytes {size - 4}-{size - 1}/{size}")
    assert get(range="bytes=10-99999999999", if_range=f'"{file_id}"')[:2] == (206, DATA[10:])
    for whole in ("lines=1-2", "bytes=1-2,5-6", "bytes=-"):
        assert get(range=whole)[:2] == (200, DATA)
    assert get(range="bytes=1-2", if_range='"another"')[:2] == (200, DATA)
    for beyond in (f"bytes={size}-", "bytes=7-6", "bytes=-0"):
        assert get(range=beyond)[::2] == (416, f"bytes */{size}")


def test_a_reader_whose_file_is_deleted_meanwhile_is_cut_off(door: Door, http: httpx.Client) -> None:
    large = b"x" * (32 << 20)
    file_id = http.post("/v1/files", data={"purpose": "batch"}, files={"file": large}).json()["id"]
    with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
        parts = answer.iter_raw()
        next(parts)
        assert http.delete(f"/v1/files/{file_id}").status_code == 200
        with pytest.raises(httpx.TransportError):
            for _ in parts:
                pass


def test_a_key_makes_one_file(send: Ask, folder: Path, valkey: Redis) -> None:
    key = {"headers": {"idempotency-key": "k"}}
    first, again = send(**key), send(**key)
    assert (first.status_code, again.json()) == (200, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert there(folder) == [first.json()["id"]]
    assert send(name="other.jsonl", **key).status_code == 422
    valkey.delete(keys.file(first.json()["id"]))
    assert send(**key).json()["error"]["param"] == "Idempotency-Key"


def test_a_form_of_what_looks_like_its_end_is_read_a_little_at_a_time(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser goes through that byte by byte: a quarter of a megabyte took it a tenth of a second."""
    sizes, feed = list[int](), Form.feed

    def noted(fed: Form, data: bytes) -> list[bytes]:
        sizes.append(len(data))
        return feed(fed, data)

    monkeypatch.setattr(Form, "feed", noted)
    content = b"\r\n--bX" * 150_000
    made = http.post("/v1/files", **form(PURPOSE, FILE + content))
    assert http.get(f"/v1/files/{made.json()['id']}/content").content == b"{}" + content
    assert max(sizes) <= SLICE
    assert sum(sizes) > len(content)


def test_an_upload_may_take_long_as_long_as_it_comes_in(door: Door, folder: Path) -> None:
    """The times at which the connection looks whether it is late are the test's."""
    begun = form(PURPOSE, FILE + b"x" * (2 << 20), end=b"")["content"]
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        connection.sendall(f"{head}content-length: {4 << 20}\r\n\r\n".encode() + begun)
        until(lambda: any(path.stat().st_size > 1.9e6 for path in (folder / ".incoming").glob("*")))
        for late in (False, True):
            door.run(door.look_whether_late())
            assert door.connections == (0 if late else 1)
    until(lambda: not there(folder))


def test_an_upload_whose_caller_leaves_leaves_nothing(door: Door, folder: Path, valkey: Redis) -> None:
    begun = form(PURPOSE, FILE + b"x" * (1 << 20), end=b"")["content"]
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        connection.sendall(f"{head}content-length: {2 << 20}\r\n\r\n".encode() + begun)
        until(lambda: there(folder))
    until(lambda: not there(folder))
    assert until(lambda: not valkey.keys("penstock:file*"))


def test_kill_9_in_the_middle_of_an_upload_leaves_no_half_of_a_file(
    valkey: Redis, valkey_url: str, folder: Path
) -> None:
    begun = form(PURPOSE, FILE + b"x" * (1 << 20), end=b"")["content"]

    def chunks() -> Iterator[bytes]:
        yield begun
        until(lambda: there(folder))
        process.kill()
        process.join()

    with gateway(valkey_url, sweep=False, files_dir=str(folder)) as (url, process):
        assert httpx.get(f"{url}/livez", timeout=PATIENCE_S).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/files", timeout=PATIENCE_S, **form() | {"content": chunks()})
    assert FolderBlobs(folder).clean(0) == 1
    assert (there(folder), valkey.keys("penstock:file*")) == ([], [keys.uploads("").encode()])
    assert 0 < valkey.ttl(keys.uploads("")) <= LEASE_S, "the room that it had reserved is free soon"


class TestRoom:
    """What a tenant may keep. Each gateway has a folder of its own."""

    def send(self, door: Door, size: int = 1000, tenant: str = "acme", **more: Any) -> tuple[int, str]:
        headers = ({"penstock-tenant": tenant} if tenant else {}) | more.pop("headers", {})
        files = {"file": ("in.jsonl", b"x" * size)}
        answer = door.http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers, **more)
        return answer.status_code, answer.json().get("id") or answer.json()["error"]["code"]

    def test_a_tenant_keeps_so_many_bytes_and_another_one_its_own(self, open_door: Open, tmp_path: Path) -> None:
        door = open_door(max_file_bytes=2500)
        made = [self.send(door) for _ in range(3)]
        assert [status for status, _ in made] == [200, 200, 413]
        assert made[2][1] == "too_many_file_bytes"
        assert self.send(door, tenant="other")[0] == 200
        assert len(there(tmp_path / "files")) == 3
        assert door.http.delete(f"/v1/files/{made[0][1]}").status_code == 200
        assert self.send(door, 1500)[0] == 200
        assert self.send(door, 1)[1] == "too_many_file_bytes"

    def test_a_tenant_keeps_so_many_files(self, open_door: Open) -> None:
        door = open_door(max_files=2)
        assert [self.send(door)[1][:5] for _ in range(2)] == ["file-"] * 2
        assert self.send(door) == (400, "too_many_files")
        assert self.send(door, tenant="other")[0] == 200

    def test_its_own_limit_goes_before_the_gateways(self, open_door: Open, valkey: Redis) -> None:
        valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({"max_files": 3, "max_file_bytes": 2000}))
        door = open_door(max_files=1, max_file_bytes=10**9)
        answers = [self.send(door, size)[1][:5] for size in (1000, 1001, 1000)]
        assert answers == ["file-", "too_m", "file-"]

    def test_what_is_declared_is_refused_before_it_is_sent(self, open_door: Open) -> None:
        """The answer comes though the body never does."""
        door = open_door(max_file_bytes=10**6)
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1100000\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as raw:
            raw.sendall(head.encode())
            assert raw.recv(4096).startswith(b"HTTP/1.1 413")

    def test_what_is_not_declared_is_refused_once_it_is_too_much(self, open_door: Open, tmp_path: Path) -> None:
        door = open_door(max_file_bytes=2 << 20)
        assert self.send(door, 1 << 20)[0] == 200
        head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        head += b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'

        def post(pieces: int) -> int:
            body = iter([head, *[b"x" * (1 << 18)] * pieces, b"\r\n--b--\r\n"])
            kind = {"content-type": "multipart/form-data; boundary=b", "penstock-tenant": "acme"}
            return door.http.post("/v1/files", content=body, headers=kind).status_code

        assert [post(5), post(4)] == [413, 200]
        assert len(there(tmp_path / "files")) == 2

    def test_an_upload_that_fails_keeps_no_room(self, open_door: Open, valkey: Redis) -> None:
        door = open_door(max_file_bytes=1000, max_files=1)
        for _ in range(3):
            answer = door.http.post("/v1/files", data={"purpose": "fine"}, files={"file": b"x" * 1000})
            assert answer.status_code == 400
        assert self.send(door, tenant="")[0] == 200
        assert valkey.keys("penstock:files:uploads:*") == []

    def test_an_equal_request_takes_no_more_room(self, open_door: Open) -> None:
        door = open_door(max_file_bytes=2000)
        once = {"headers": {"idempotency-key": "k"}}
        assert len({self.send(door, **once) for _ in range(3)}) == 1
        assert self.send(door)[0] == 200

    def test_a_page_is_bounded_whatever_is_asked_for(self, open_door: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "PAGE", 2)
        door = open_door()
        made = [self.send(door)[1] for _ in range(3)]
        page = door.http.get("/v1/files", headers={"penstock-tenant": "acme"}).json()
        assert ([file["id"] for file in page["data"]], page["has_more"]) == (made[:0:-1], True)


@pytest.mark.parametrize("slow", ["write", "commit"])
def test_uploads_of_one_tenant_keep_no_thread_that_others_need(
    open_door: Open, valkey_url: str, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    door, tokens = open_door(auth="keys"), {name: asyncio.run(key_of(valkey_url, name)) for name in ("many", "other")}
    over, lock, running = threading.Event(), threading.Lock(), [0]
    as_it_is = getattr(FolderWriter, slow)

    def slowly(writer: FolderWriter, *given: Any) -> None:
        if vars(writer).get("slow") or given == (b"slow",):
            with lock:
                running[0] += 1
            over.wait(PATIENCE_S)
        as_it_is(writer, *given)

    def marked(writer: FolderWriter, data: bytes) -> None:
        vars(writer)["slow"] = data == b"slow"
        write(writer, data)

    write = FolderWriter.write
    if slow == "commit":
        monkeypatch.setattr(FolderWriter, "write", marked)
    monkeypatch.setattr(FolderWriter, slow, slowly)

    def upload(tenant: str, data: bytes) -> int:
        headers = {"authorization": f"Bearer {tokens[tenant]}"}
        form = {"files": {"file": ("a", data)}, "data": {"purpose": "batch"}}
        return httpx.post(f"{door.url}/v1/files", headers=headers, timeout=PATIENCE_S, **form).status_code

    with ThreadPoolExecutor(40) as threads:
        many = [threads.submit(upload, "many", b"slow") for _ in range(40)]
        assert until(lambda: running[0] == FILE_PIECES[1])
        assert upload("other", b"quick") == 200
        assert running[0] == FILE_PIECES[1]
        over.set()
        assert {one.result() for one in many} == {200}


async def key_of(url: str, tenant: str) -> str:
    async with AsyncRedis.from_url(url) as store:
        _, token = await admin.create(store, {"tenant": tenant, "scopes": ("submit",)}, Actor("test"))
    return token


def test_what_threads_compute_for_a_file_counts_for_its_caller(
    open_door: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writing and reading took the processor from others, and counted for nobody."""
    door = open_door(files_dir=str(folder))
    share = door.app.state.fair_share.of("127.0.0.1")
    write, read = FolderWriter.write, FolderBlobs.read

    def compute() -> None:
        began = time.thread_time()
        while time.thread_time() < began + 1:
            pass

    def long_write(writer: FolderWriter, data: bytes | memoryview) -> None:
        compute()
        write(writer, data)

    def long_read(blobs: FolderBlobs, name: str, start: int, size: int) -> bytes:
        compute()
        return read(blobs, name, start, size)

    monkeypatch.setattr(FolderWriter, "write", long_write)
    made = door.http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
    assert made.status_code == 200
    before = share.used
    assert before > 1
    monkeypatch.setattr(FolderBlobs, "read", long_read)
    assert door.http.get(f"/v1/files/{made.json()['id']}/content").content == b"{}"
    assert share.used > before + 1
