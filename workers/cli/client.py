"""Client of the gateway's HTTP API for the commands. It uses only the standard library."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import quote, urlencode, urlsplit

from workers.cli.exits import Exit, Failure
from workers.gateway_http import API_KEY, Event, EventStream, authorization

if TYPE_CHECKING:
    from http.client import HTTPResponse

#: Silence (s) after which a gateway counts as gone. On an open stream it sends something every 10 s.
SILENCE_S: Final = 30.0
#: Time (s) for which a broken stream is retried.
PATIENCE_S: Final = 30.0
#: Longest wait (s) for a task's end in one request, well below SILENCE_S; and pause where a gateway does not wait.
WAIT_S, PAUSE_S = 20, 0.5

#: Statuses of a task that has ended.
FINAL: Final = frozenset({"completed", "failed", "cancelled", "incomplete"})
#: Statuses of a batch that has ended.
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: What a comment in a stream begins with that says what the stream waits for.
WAITS_FOR: Final = "waits for: "
#: Bytes of a file sent or received at a time.
PIECE: Final = 1 << 18


def ignore(text: str) -> None:
    """Does nothing with what a stream waits for."""


class Unreachable(Failure):
    """No gateway answers, or the gateway cannot reach its store or broker."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(
            f"no answer from {url} ({reason}); start it with `penstock up`, or name another with --url or PENSTOCK_URL",
            Exit.UNREACHABLE,
        )


class Refused(Failure):
    """The gateway refused the request. `error` is its `{"message", "type", "param", "code"}`."""

    def __init__(self, http_status: int, error: Mapping[str, Any]) -> None:
        hint = f" `penstock keys create --tenant NAME` makes a key; set {API_KEY} to it." if http_status == 401 else ""
        super().__init__(f"{error['message']}{hint}", Exit.UNREACHABLE if http_status >= 500 else Exit.REFUSED)
        self.http_status = http_status
        self.error = error


class Gateway:
    """A gateway, by its URL. Thread-safe: every call has its own connection.

    `with_key`: requests carry this process's API key, if it has one. Raises workers.errors.Refused for a bad URL or
    key. The methods raise Unreachable and Refused.
    """

    def __init__(self, url: str, *, with_key: bool = True) -> None:
        self._auth_headers = authorization() if with_key else {}
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(url)
        except ValueError:
            raise Failure(f"{url!r} is not a gateway's URL; it must look like http://127.0.0.1:8000") from None
        self.url = parts.geturl().rstrip("/")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        self._base = parts.path.rstrip("/")

    def submit(self, task: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
        """Submit a task, once for each `key`. Returns the gateway's answer, with the task's `id`."""
        return self.json("POST", "/v1/tasks", task, {} if key is None else {"idempotency-key": key})

    def tasks(self, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """All tasks that match a list's parameters, as many of them in a call as `limit` says."""
        return self.listed("/v1/tasks", query)

    def retry(self, task_id: str) -> dict[str, Any]:
        """Submit a final task again. Returns the new task."""
        return self.json("POST", path_of("tasks", task_id, "/retry"))

    def task(self, task_id: str) -> dict[str, Any]:
        return self.json("GET", path_of("tasks", task_id))

    def waited(self, task_id: str, seconds: float) -> dict[str, Any]:
        """The task at its end, or after `seconds`, some WAIT_S at most; earlier with `waits_for`, if it has not begun.

        Waits here where the gateway has no room for one more caller who waits there, and for less than a second.
        """
        began = time.monotonic()
        if seconds >= 1:
            prefer = {"prefer": f"wait={int(min(WAIT_S, seconds))}, explain"}
            try:
                task = self.json("GET", path_of("tasks", task_id), headers=prefer)
            except Refused as refused:
                if refused.error["code"] not in ("too_many_streams", "gateway_full"):
                    raise
            else:
                if task["status"] in FINAL or time.monotonic() - began >= PAUSE_S:
                    return task  # else it came at once, since the store is away: do not ask in a circle
        time.sleep(min(PAUSE_S, seconds))
        return self.task(task_id)

    def cancel(self, task_id: str) -> dict[str, Any]:
        return self.json("POST", path_of("tasks", task_id, "/cancel"))

    def delete(self, task_id: str) -> dict[str, Any]:
        return self.json("DELETE", path_of("tasks", task_id))

    def explain(self, task_id: str) -> dict[str, Any]:
        """The explanation of where a task is, as `GET /v1/tasks/{id}/explain` gives it."""
        return self.json("GET", path_of("tasks", task_id, "/explain"))

    def models(self) -> list[dict[str, Any]]:
        """The models that it serves. Raises Unreachable, too, where what answers is another server."""
        answer: Any = self.json("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(model, dict) and {"id", "capabilities"} <= model.keys() for model in models
        ):
            raise Unreachable(self.url, "what answers there is no gateway of Penstock")
        return models

    def chats(self, model: str) -> bool:
        """Whether a model has a chat template. False where the gateway does not say: its name is unknown, or the key
        may not read."""
        try:
            return "chat" in self.json("GET", f"/v1/models/{quote(model, errors='surrogateescape')}")["capabilities"]
        except Refused as refused:
            if refused.http_status in (403, 404):
                return False
            raise

    def ready(self) -> bool:
        """Whether the gateway answers and can take tasks."""
        try:
            self.json("GET", "/readyz")
        except Failure:
            return False
        return True

    def events(
        self, task_id: str, start: int = 0, patience: float = PATIENCE_S, waits: Callable[[str], None] = ignore
    ) -> Iterator[dict[str, Any]]:
        """Events from position `start` on, each with its kind as `event`; the last is `end`.

        A broken stream is resumed, until the gateway has been away for `patience` seconds. `waits`: gets what the task
        waits for, now and then while nothing comes.
        """
        away_since: float | None = None
        pause = 0.05
        while True:
            try:
                with self._request("GET", path_of("tasks", task_id, f"/events?from={start}")) as response:
                    if response.status == 204:  # the stream ended before `start`
                        return
                    for event in _events(response, waits):
                        data: dict[str, Any] = json.loads(event.data)
                        if event.kind == "error":
                            raise Refused(404 if data["error"]["code"] == "task_not_found" else 503, data["error"])
                        start, away_since, pause = data["position"] + 1, None, 0.05
                        yield {"event": event.kind, **data}
                        if event.kind == "end":
                            return
            except (Unreachable, Refused) as failure:
                if failure.status != Exit.UNREACHABLE:
                    raise
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > patience:
                    raise
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def chat(
        self, request: Mapping[str, Any], end: dict[str, Any] | None = None, waits: Callable[[str], None] = ignore
    ) -> Generator[str]:
        """The answer to `messages` as it comes, from /v1/chat/completions. Closing the generator cancels it.

        `end`: gets the answer's `usage` and `finish_reason`, once they are known. `waits`: as of `events`."""
        detail = {} if end is None else end
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", "/v1/chat/completions", body) as response:
            for event in _events(response, waits):
                if event.data == "[DONE]":
                    return
                chunk: dict[str, Any] = json.loads(event.data)
                if chunk.get("error"):
                    raise Refused(500, chunk["error"])
                detail |= {"usage": chunk["usage"]} if chunk.get("usage") else {}
                for choice in chunk["choices"]:
                    detail |= {"finish_reason": choice["finish_reason"]} if choice.get("finish_reason") else {}
                    yield choice["delta"].get("content") or ""
        raise Failure(f"the answer from {self.url} broke off", Exit.UNREACHABLE)

    def upload(self, name: str, size: int, pieces: Iterable[bytes]) -> dict[str, Any]:
        """Upload the `size` bytes of a batch's input. Returns the file's description."""
        boundary = secrets.token_hex(16)
        name = name.translate({ord(sign): quote(sign) for sign in '"\r\n'})
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode(errors="replace")
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + size + len(tail)),
        }
        with self.opened("POST", "/v1/files", chain([head], pieces, [tail]), headers) as response:
            description: dict[str, Any] = json.load(response)
            return description

    def create_batch(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self.json("POST", "/v1/batches", fields)

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("GET", path_of("batches", batch_id))

    def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("POST", path_of("batches", batch_id, "/cancel"))

    def batches(self, limit: int) -> Iterator[dict[str, Any]]:
        """Up to `limit` batches, the newest first."""
        return islice(self.listed("/v1/batches", {"limit": min(limit, 100)}), limit)

    def content(self, file_id: str, start: int) -> Iterator[bytes]:
        """A file's bytes from `start` on, a piece at a time."""
        headers = {"range": f"bytes={start}-"} if start else {}
        with self.opened("GET", path_of("files", file_id, "/content"), None, headers) as response:
            if response.status != 307:
                yield from _pieces(response)
                return
            parts = urlsplit(response.headers["location"])
        bucket = Gateway(f"{parts.scheme}://{parts.netloc}", with_key=False)  # the URL itself opens the file
        with bucket.opened("GET", f"{parts.path}?{parts.query}", None, headers) as response:
            yield from _pieces(response)

    def listed(self, path: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The items of a list, page by page."""
        page: dict[str, Any] = {"has_more": True, "last_id": None}
        while page["has_more"]:
            after = {"after": page["last_id"]} if page["last_id"] else {}
            page = self.json("GET", f"{path}?{urlencode({**query, **after})}")
            yield from page["data"]

    def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        with self._request(method, path, body, headers) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractContextManager[HTTPResponse]:
        """A request with a JSON body, or none."""
        content, kind = (None, {}) if body is None else (json.dumps(body), {"content-type": "application/json"})
        return self.opened(method, path, content, {**kind, **(headers or {})})

    @contextmanager
    def opened(
        self, method: str, path: str, body: str | Iterable[bytes] | None, headers: Mapping[str, str]
    ) -> Iterator[HTTPResponse]:
        """The answer to a request, to be read within the block."""
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        make = HTTPSConnection if self._tls else HTTPConnection
        connection = make(self._host, self._port, timeout=SILENCE_S)
        try:
            connection.request(method, self._base + path, body, {**self._auth_headers, **headers})
            response = connection.getresponse()
            if response.status not in (200, 202, 204, 206, 307):
                raise Refused(response.status, _error(response))
            yield response
        except (OSError, HTTPException, ValueError) as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _events(response: HTTPResponse, waits: Callable[[str], None]) -> Iterator[Event]:
    """The events of an answer as they come. `waits`: gets what it waits for, as its comments say it. Raises ValueError
    for a stream that ends within an event."""

    def comment(text: str) -> None:
        if text.startswith(WAITS_FOR):
            waits(text.removeprefix(WAITS_FOR))

    stream = EventStream(comment)
    while piece := response.read1():
        yield from stream.feed(piece)
    if stream.within:
        raise ValueError("the stream ended within an event")


def _pieces(response: HTTPResponse) -> Iterator[bytes]:
    while piece := response.read(PIECE):
        yield piece


def pieces_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """A file's next `size` bytes, or what it has of them."""
    while size and (piece := file.read(min(PIECE, size))):
        size -= len(piece)
        yield piece


def path_of(kind: str, name: str, suffix: str = "") -> str:
    """The path of a task, batch or file; its name is quoted."""
    return f"/v1/{kind}/{quote(name, safe='', errors='surrogateescape')}{suffix}"


def _error(response: HTTPResponse) -> dict[str, Any]:
    """The error in an answer, also in one from a proxy or another server."""
    text = response.read().decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return {"message": error["message"], "code": error["code"], "param": error["param"]}
    except (ValueError, KeyError, TypeError):
        shown = " ".join(text.split())[:200] or response.reason
        return {"message": f"HTTP {response.status}: {shown}", "code": None, "param": None}
