"""What HTTP lets callers do besides: HEAD, HTTP/1.0, packed bodies, calls from web pages; and the page at `/`."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from typing import Any

import httpx
import pytest

from producers.gateway.http.errors import ELSEWHERE
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Open, Submit, until
from tests.waiting import PATIENCE_S

PAGE = "https://chat.example.org"
#: What a browser asks before a page's request.
ASKED = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
PACKED = gzip.compress(b"{}", mtime=0)


def old_answer(door: Door, request: str) -> tuple[str, bytes]:
    """Head and body of what comes until the connection ends, to a request in HTTP/1.0."""
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(request.encode())
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode().lower(), body


class TestHttp10:
    def test_a_stream_ends_with_its_connection_and_has_no_chunks(
        self, door: Door, submit: Submit, worker: FakeWorker
    ) -> None:
        task_id = submit()
        worker.claim(task_id)
        worker.append(task_id, 0, [" a", " b"])
        worker.finish(task_id, [2])
        head, body = old_answer(door, f"GET /v1/tasks/{task_id}/events HTTP/1.0\r\n\r\n")
        assert "transfer-encoding" not in head
        assert body.startswith(b"retry: 1000\n\nid: 0\nevent: token\n")
        assert body.endswith(b"}\n\n")
        assert body.count(b"event: end\n") == 1

    def test_what_has_a_length_says_it(self, door: Door) -> None:
        head, body = old_answer(door, "GET /livez HTTP/1.0\r\n\r\n")
        assert f"content-length: {len(body)}" in head
        assert json.loads(body) == {"status": "ok"}

    def test_an_error_is_told(self, door: Door) -> None:
        head, body = old_answer(door, "GET /nowhere HTTP/1.0\r\n\r\n")
        assert head.startswith("http/1.1 404")
        assert json.loads(body)["error"]["code"] == "not_found"


class TestHead:
    @pytest.mark.parametrize(
        "path", ["/", "/livez", "/readyz", "/metrics", "/openapi.json", "/v1/models", "/v1/models/tiny", "/v1/tasks/x"]
    )
    def test_it_is_answered_as_get_is_without_a_body(self, http: httpx.Client, path: str) -> None:
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path != "/metrics":  # they count
            assert head.headers["content-length"] == whole.headers["content-length"]

    def test_that_of_a_stream_does_not_wait_for_it(self, door: Door, http: httpx.Client, submit: Submit) -> None:
        answer = http.head(f"/v1/tasks/{submit()}/events")
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        until(lambda: not len(door.app.state.streams))
        assert http.get("/livez").status_code == 200, "the connection is of use for the next request"

    def test_where_get_is_not_taken_it_is_refused(self, http: httpx.Client) -> None:
        answer = http.head("/v1/completions")
        assert (answer.status_code, answer.headers["allow"], answer.content) == (405, "POST", b"")

    def test_it_is_counted_as_what_it_is(self, open_door: Open) -> None:
        http = open_door().http
        http.head("/livez")
        counted = 'penstock_gateway_requests_total{method="HEAD",route="/livez",status="200"} 1.0'
        assert counted in http.get("/metrics").text


class TestPacked:
    @pytest.fixture
    def door(self, open_door: Open, model: str) -> Door:
        return open_door(max_body=1000)

    @staticmethod
    def send(http: httpx.Client, body: bytes, coding: str = "gzip") -> httpx.Response:
        return http.post(
            "/v1/tasks", content=body, headers={"content-type": "application/json", "content-encoding": coding}
        )

    @staticmethod
    def task(model: str, prompt: str = "def f") -> bytes:
        return json.dumps({"model": model, "prompt": prompt}).encode()

    @pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "identity"])
    def test_a_packed_task_is_taken(self, http: httpx.Client, model: str, coding: str) -> None:
        body = self.task(model)
        answer = self.send(http, body if coding == "identity" else gzip.compress(body), coding)
        assert answer.status_code == 202, answer.text

    @pytest.mark.parametrize("unpacked", [2000, 50_000_000])
    def test_what_unpacks_to_too_much_is_refused(self, http: httpx.Client, model: str, unpacked: int) -> None:
        packed = b"".join((pack := zlib.compressobj(9, wbits=31), pack.compress(b" " * unpacked), pack.flush())[1:])
        answer = self.send(http, packed)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    @pytest.mark.parametrize(
        "broken", [b"{}", PACKED[:-3], PACKED[:-8] + b"\0" * 8, PACKED + b"more", PACKED[:10] + b"\xff" * 20]
    )
    def test_what_is_not_gzip_is_said_to_be_none(self, http: httpx.Client, broken: bytes) -> None:
        answer = self.send(http, broken)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_gzip")

    @pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", ""])
    def test_other_codings_are_refused(self, http: httpx.Client, model: str, coding: str) -> None:
        answer = self.send(http, self.task(model), coding)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert answer.headers["accept-encoding"] == "gzip"


class TestWebPages:
    def test_no_page_may_call_unless_it_is_said(self, http: httpx.Client) -> None:
        assert http.options("/v1/models", headers=ASKED).status_code == 405
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": PAGE}).headers

    @pytest.mark.parametrize("origins", [(PAGE,), ("http://localhost:3000", PAGE)])
    def test_a_page_of_a_known_origin_may_call_and_read_errors(
        self, open_door: Open, model: str, origins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        door = open_door(cors_origins=origins)

        def broken() -> None:
            raise RuntimeError

        http = door.http
        before = http.options("/v1/chat/completions", headers=ASKED)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in before.headers["access-control-allow-headers"]
        monkeypatch.setattr(door.app.state.gateway.client, "models", broken)
        for path, status in (("/v1/models/tiny", 200), ("/v1/tasks/x", 404), ("/v1/models", 500)):
            answer = http.get(path, headers={"origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]

    def test_a_page_may_delete_send_a_key_and_read_what_tells_of_retries(self, open_door: Open, model: str) -> None:
        asked = {"access-control-request-method": "DELETE", "access-control-request-headers": "idempotency-key"}
        http = open_door(cors_origins=(PAGE,)).http
        before = http.options("/v1/tasks/x", headers=ASKED | asked)
        assert "DELETE" in before.headers["access-control-allow-methods"]
        assert "idempotency-key" in before.headers["access-control-allow-headers"]
        exposed = http.get("/livez", headers={"origin": PAGE}).headers["access-control-expose-headers"]
        assert {"retry-after-ms", "x-should-retry", "idempotent-replayed", "location"} <= set(exposed.split(", "))

    def test_others_may_not(self, open_door: Open, model: str) -> None:
        http = open_door(cors_origins=(PAGE,)).http
        other = {"origin": "https://evil.example"}
        assert http.options("/v1/models", headers=ASKED | other).status_code == 400
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=other).headers


class TestProxies:
    @pytest.mark.parametrize(
        ("trusted", "said", "named"),
        [
            ((), "203.0.113.7", "127.0.0.1"),
            (("10.0.0.0/8",), "203.0.113.7", "127.0.0.1"),
            (("127.0.0.1",), "203.0.113.7", "203.0.113.7"),
            (("10.0.0.0/8", "127.0.0.0/8"), "1.1.1.1, 2001:db8::7, 10.1.1.1", "2001:db8::7"),
            (("*",), "for=x y", "unknown"),
        ],
    )
    def test_a_caller_is_who_a_trusted_proxy_says_it_is(
        self,
        open_door: Open,
        model: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        trusted: tuple[str, ...],
        said: str,
        named: str,
    ) -> None:
        door = open_door(proxy_headers=trusted)
        monkeypatch.setattr(door.app.state.gateway.client, "models", lambda: 1 / 0)
        assert httpx.get(f"{door.url}/v1/models", headers={"x-forwarded-for": said}).status_code == 500
        assert f"(GET /v1/models of {named}) failed" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/pooling", "POST /v1/embeddings takes texts"),
        ("POST", "/rerank", "it is /v1/rerank"),
        ("POST", "/v3/rerank", "nothing at this URL"),
        ("POST", "/v1/moderations", "Moderation is not offered"),
        ("GET", "/version", "GET /openapi.json"),
        ("POST", "/chat/completions", "it is /v1/chat/completions"),
        ("GET", "/models", "it is /v1/models"),
        ("GET", "/apis", "nothing at this URL"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "POST /v1/responses keeps its answers"),
        ("POST", "/v1/responses/compact", "truncation auto"),
        ("GET", "/v1/evals", "Evals are not offered"),
        ("POST", "/openai/deployments/tiny/chat/completions", "here it begins with /v1"),
        ("POST", "/v1/chat/completions/", "it is /v1/chat/completions"),
        ("POST", "/v1//chat/completions", "it is /v1/chat/completions"),
        ("GET", "/v1/v1/models", "it is /v1/models"),
        ("GET", "/v1/files//file-1", "a slash or a /v1 too many."),
        ("POST", "/v1/api/chat", "Ollama's clients ends without /v1"),
    ],
)
def test_a_path_of_another_server_says_what_there_is(http: httpx.Client, method: str, path: str, said: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert said in answer.json()["error"]["message"]


def test_an_error_on_a_path_of_ollamas_has_its_form(http: httpx.Client) -> None:
    answer = http.get("/api/nothing")
    assert (answer.status_code, answer.json().keys()) == (404, {"error", "code"})
    assert "Of Ollama's API there are" in answer.json()["error"]


def test_a_path_that_takes_another_method_is_not_called_missing(http: httpx.Client) -> None:
    for path in ("/api/chat", "/v1/messages", "/v1/chat/completions"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_what_is_named_in_place_of_another_path_is_there(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"].keys() | {"/openapi.json", "/v1"}
    named = {path for text in ELSEWHERE.values() for path in re.findall(r"(?:GET|POST) (/[\w/.]+\w)", text)}
    assert named <= paths
    assert not ELSEWHERE.keys() & paths


def test_the_page_at_the_root_leads_on(http: httpx.Client) -> None:
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    links = re.findall('href="(.+?)"', answer.text)
    assert {"/v1/models", "/metrics", "/readyz", "/openapi.json"} <= set(links)
    assert {http.get(link).status_code for link in links} == {200}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "true"),
        ("a\nb", r'"a\nb"'),
        (["é", None, False], '["é", null, false]'),
        ({"a": None}, '{"a": null}'),
        ("\u202e", r'"\u202e"'),
        ("\ud800", r'"\ud800"'),
    ],
)
def test_errors_show_values_as_the_caller_wrote_them(http: httpx.Client, model: str, value: Any, said: str) -> None:
    answer = http.post(
        "/v1/completions",
        content=json.dumps({"model": model, "prompt": "x", "temperature": value}),
        headers={"content-type": "application/json"},
    )
    assert answer.json()["error"]["message"].startswith(f"temperature is {said}; ")
