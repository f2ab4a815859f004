"""The commands' HTTP client: every kind of answer, and streams that break."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.producers.gateway.conftest import Door
from tests.workers.cli.conftest import Answer, Run, Scripted, send
from workers.cli import client
from workers.cli.client import Gateway, Refused, Unreachable
from workers.cli.exits import Exit, Failure


def tokens(*positions: int, end: int | None = None, error: str | None = None) -> Answer:
    """A stream of these tokens, then its end, an error, or nothing more."""
    lines = "retry: 1000\n\n"
    for position in positions:
        data = {"position": position, "choice": 0, "index": position, "token_id": 1, "text": "x"}
        lines += f": hello\n\nid: {position}\nevent: token\ndata: {json.dumps(data)}\n\n"
    if end is not None:
        data = {"position": end, "status": "completed", "finish_reasons": ["stop"], "usage": {}, "error": None}
        lines += f"id: {end}\nevent: end\ndata: {json.dumps(data)}\n\n"
    if error is not None:
        lines += f"event: error\ndata: {json.dumps({'error': {'message': 'Oh.', 'code': error}})}\n\n"
    return send(200, lines.encode())


def positions(gateway: Gateway, start: int = 0, patience: float = 60.0) -> list[int]:
    return [event["position"] for event in gateway.events("t", start, patience)]


def broken(request: BaseHTTPRequestHandler) -> None:
    """The connection closes without an answer."""
    request.close_connection = True


#: The connection closes within an event, or within a chunk of the answer.
half = send(200, b'event: token\ndata: {"pos')


def cut(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99\r\nevent: token\n")
    request.close_connection = True


class TestStream:
    def test_ends_with_the_end(self, scripted: Scripted) -> None:
        scripted.answers = [tokens(0, 1, end=2)]
        assert positions(Gateway(scripted.url)) == [0, 1, 2]
        assert scripted.paths == ["/v1/tasks/t/events?from=0"]

    def test_says_what_it_waits_for_once_a_reason_and_not_with_json(self, run: Run, scripted: Scripted) -> None:
        comments = ["waits for: a worker\x1b[2J", "waits for: a worker\x1b[2J", "still here", "waits for: its turn"]
        end = {"position": 0, "status": "completed", "finish_reasons": ["stop"], "usage": {}, "error": None}
        lines = "".join(f": {comment}\n\n" for comment in comments) + f"event: end\ndata: {json.dumps(end)}\n\n"
        task = send(200, json.dumps({"id": "t", "n": 1}).encode())
        scripted.answers = [task, send(200, lines.encode())] * 2
        ran = run("tail", "t", "--url", scripted.url)
        assert ran.err.splitlines()[:2] == ["(waits for: a worker\u241b[2J)", "(waits for: its turn)"]
        assert run("tail", "t", "--url", scripted.url, "--json").err == ""

    def test_that_breaks_is_taken_up_where_it_broke(self, scripted: Scripted) -> None:
        away = send(503, b'{"error": {"message": "m", "code": "c", "param": null}}')
        scripted.answers = [
            tokens(3, 4),
            broken,
            away,
            half,
            cut,
            tokens(),
            tokens(5, error="service_unavailable"),
            tokens(6, end=7),
        ]
        assert positions(Gateway(scripted.url), 3) == [3, 4, 5, 6, 7]
        assert [path.rpartition("=")[2] for path in scripted.paths] == ["3", "5", "5", "5", "5", "5", "5", "6"]

    def test_that_ended_before_is_empty(self, scripted: Scripted) -> None:
        scripted.answers = [send(204, b"")]
        assert positions(Gateway(scripted.url), 9) == []

    @pytest.mark.parametrize(
        ("away", "says"),
        [(broken, "without response"), (half, "ended within an event"), (cut, r"IncompleteRead\(0 bytes read\)")],
    )
    def test_is_given_up_when_the_gateway_stays_away(self, scripted: Scripted, away: Answer, says: str) -> None:
        scripted.answers = [tokens(0), away, away]
        with pytest.raises(Unreachable, match=f"no answer from http.*{says}.*penstock up") as failure:
            positions(Gateway(scripted.url), patience=0.01)
        assert failure.value.status == Exit.UNREACHABLE

    @pytest.mark.parametrize(
        "answer",
        [
            tokens(1, error="task_not_found"),
            send(404, b'{"error": {"message": "No such task.", "code": "task_not_found", "param": null}}'),
        ],
    )
    def test_of_a_task_that_is_gone_is_not_tried_again(self, scripted: Scripted, answer: Answer) -> None:
        scripted.answers = [answer]
        with pytest.raises(Refused) as failure:
            positions(Gateway(scripted.url))
        assert (failure.value.http_status, failure.value.status) == (404, Exit.REFUSED)
        assert len(scripted.paths) == 1


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "body", "exit_status", "says"),
        [
            (400, b'{"error": {"message": "Too hot.", "code": "c", "param": "temperature"}}', Exit.REFUSED, "Too hot."),
            (503, b'{"error": {"message": "Away.", "code": "c", "param": null}}', Exit.UNREACHABLE, "Away."),
            (502, b"<h1>Bad Gateway</h1>", Exit.UNREACHABLE, "HTTP 502: <h1>Bad Gateway</h1>"),
            (404, b'{"detail": "elsewhere"}', Exit.REFUSED, "HTTP 404"),
            (301, b"", Exit.REFUSED, "HTTP 301"),
            (500, b"\xff" * 10_000, Exit.UNREACHABLE, "HTTP 500"),
        ],
    )
    def test_that_refuse_say_why(
        self, scripted: Scripted, status: int, body: bytes, exit_status: Exit, says: str
    ) -> None:
        scripted.answers = [send(status, body)]
        with pytest.raises(Refused) as failure:
            Gateway(scripted.url).task("t")
        assert failure.value.status == exit_status
        assert says in str(failure.value)
        assert len(str(failure.value)) < 500

    @pytest.mark.parametrize("answer", [send(200, b"<html>"), send(200, b"\xff\xff"), broken])
    def test_that_are_none_are_an_unreachable_gateway(self, scripted: Scripted, answer: Answer) -> None:
        scripted.answers = [answer]
        with pytest.raises(Unreachable, match="PENSTOCK_URL"):
            Gateway(scripted.url).task("t")

    def test_that_never_come_are_an_unreachable_gateway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "SILENCE_S", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="timed out"):
            Gateway(f"http://127.0.0.1:{silent.getsockname()[1]}").task("t")

    def test_an_id_that_is_no_text_is_asked_for_all_the_same(self, scripted: Scripted) -> None:
        scripted.answers = [send(404, b'{"error": {"message": "no such task", "code": "x", "param": null}}')]
        with pytest.raises(Refused, match="no such task"):
            Gateway(scripted.url).task("\udcff")

    def test_nothing_listening_is_an_unreachable_gateway(self) -> None:
        gateway = Gateway("http://127.0.0.1:1")
        assert not gateway.ready()
        with pytest.raises(Unreachable, match="penstock up"):
            gateway.submit({})

    @pytest.mark.parametrize("task_id", ["a/b", "..", "a?b", "é", "a b"])
    def test_an_id_is_one_part_of_the_path_whatever_is_in_it(self, scripted: Scripted, task_id: str) -> None:
        scripted.answers = [send(200, b"{}")]
        Gateway(scripted.url).cancel(task_id)
        (path,) = scripted.paths
        assert path.count("/") == 4
        assert not set(path) & set(" ?é")


class TestUrl:
    @pytest.mark.parametrize(
        "url", ["", "http://", "ftp://host", "http://host:port", "http://host:99999", "redis://h", "http://[::1"]
    )
    def test_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(Failure, match="is not a gateway's URL") as failure:
            Gateway(url)
        assert failure.value.status == Exit.REFUSED

    def test_may_lack_its_scheme_and_have_a_path(self, scripted: Scripted) -> None:
        scripted.answers = [send(200, b'{"data": []}')]
        assert Gateway(scripted.url.removeprefix("http://") + "/inner/").models() == []
        assert scripted.paths == ["/inner/v1/models"]


def test_a_task_is_sent_as_it_is(scripted: Scripted) -> None:
    got: list[Any] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        got.append(json.loads(request.rfile.read(int(request.headers["content-length"]))))
        assert request.headers["content-type"] == "application/json"
        send(202, b'{"id": "t"}')(request)

    scripted.answers = [answer]
    assert Gateway(scripted.url).submit({"prompt": "é\u2028", "n": 2}) == {"id": "t"}
    assert got == [{"prompt": "é\u2028", "n": 2}]


class TestTheKeyInTheEnvironment:
    @pytest.fixture
    def key(self, valkey_url: str, run: Run) -> str:
        made = run("keys", "create", "--tenant", "acme", "--store", valkey_url)
        return made.out.strip()

    def test_commands_send_it(
        self, run: Run, key: str, open_door: Callable[..., Door], model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PENSTOCK_URL", open_door(auth="keys").url)
        monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
        refused = run("submit", model, "def f")
        assert (refused.status, "penstock keys create" in refused.err) == (2, True)
        monkeypatch.setenv("PENSTOCK_API_KEY", f" {key}\n")  # as a file or a form gives it
        assert run("submit", model, "def f").status == 0
        assert run("batch", "ls").status == 0
        assert json.loads(run("tasks", "ls", "--json").out)["tenant"] == "acme"

    def test_one_that_no_header_may_hold_is_refused_and_not_shown(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("psk_hush\r\nx: y", "psk_hush\u00e9", "psk hush"):
            monkeypatch.setenv("PENSTOCK_API_KEY", key)
            refused = run("tasks", "ls", "--url", "http://127.0.0.1:1")
            assert (refused.status, "PENSTOCK_API_KEY" in refused.err, "hush" in refused.err) == (2, True, False)

    def test_a_bucket_does_not_get_it(self, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PENSTOCK_API_KEY", "psk_hush")
        sent: list[str | None] = []

        def there(request: BaseHTTPRequestHandler) -> None:
            sent.append(request.headers.get("authorization"))
            send(307, b"", location=f"{scripted.url}/bucket")(request)

        def here(request: BaseHTTPRequestHandler) -> None:
            sent.append(request.headers.get("authorization"))
            send(200, b"")(request)

        scripted.answers += [there, here]
        assert list(Gateway(scripted.url).content("file-1", 0)) == []
        assert sent == ["Bearer psk_hush", None]


@pytest.mark.parametrize(
    "answer", [{"detail": "no such page"}, [], {"data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}]
)
def test_another_server_at_the_port_is_no_gateway(scripted: Scripted, answer: Any) -> None:
    scripted.answers = [send(200, json.dumps(answer).encode())]
    with pytest.raises(Unreachable, match="no gateway of Penstock"):
        Gateway(scripted.url).models()
