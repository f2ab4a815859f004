"""HTTP requests as no client sends them: valid ones for every route, changed in JSON, headers, URL and framing.

A `Visit` is one connection: pieces of bytes with pauses between them, and how it is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from producers.contract.task import Task
from producers.gateway.openai.parameters import HINTS, NOT_OFFERED
from tests.fuzz.messages import tasks
from tests.fuzz.trees import VALUES, json_bytes, spoiled, spoiled_bytes

#: Routes that are asked for with nothing in them but a URL.
METHODS = (
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "G\x00T",
    "BREW",
)
HEADERS = (
    *(
        b"last-event-id",
        b"x-request-id",
        b"authorization",
        b"accept",
        b"accept-encoding",
        b"expect",
        b"upgrade",
        b"range",
    ),
    *(b"connection", b"transfer-encoding", b"content-length", b"content-type", b"content-encoding", b"cookie", b"te"),
    *(
        b"host",
        b"idempotency-key",
        b"openai-organization",
        b"x-forwarded-for",
        b"origin",
        b"http2-settings",
        b"trailer",
    ),
)
HEADER_VALUES = (
    *(b"", b"0", b"-1", b"5", b"99999999999999999999", b"x", b"\xff\xfe", b"chunked", b"gzip", b"identity", b"close"),
    *(b"keep-alive", b"upgrade", b"websocket", b"h2c", b"100-continue", b"bytes=0-5", b"text/event-stream", b"*/*"),
    *(b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data", b"a" * 4000),
    *(b"a\x00b", b"a\tb", b"\x7f", b"{{7*7}}", b"Bearer x", b"null", b"1.5", b"0x10", "１２".encode(), b" 7 "),
)
QUERIES = (
    *(b"", b"", b"?", b"?from=0", b"?from=3", b"?from=-1", b"?from=x", b"?from=", b"?from=9223372036854775807"),
    *(
        b"?from=" + b"9" * 400,
        b"?from=0&from=x",
        b"?stream=true",
        b"?%ff=%00",
        b"?a" * 900,
        b"?x=[]",
        b"?from=%31",
        b"?limit=-1",
    ),
)
IDS = (
    *(
        b"none",
        b"%00",
        b"%ff",
        b"..%2f..%2fetc",
        b"*",
        b"%20",
        b"a" * 3000,
        b"penstock:task:x",
        b"%F0%9F%92%A5",
        b"%",
        b"%zz",
    ),
    *(b"{{7*7}}", b"0", b"-", b"events", b"x/y", b"%0d%0aset-cookie:a=b"),
)


@dataclass(frozen=True, slots=True)
class Visit:
    """`pieces` are sent one after another, `pause` seconds apart. `leaves`: closes without waiting for an answer.

    `broken`: its framing is none, so that it may be answered by 400, by silence and a closed connection, or at all.
    """

    kind: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    leaves: bool = False
    broken: bool = False


def _chat(model: str) -> st.SearchStrategy[dict[str, Any]]:
    message = st.fixed_dictionaries(
        {
            "role": st.sampled_from(("user", "assistant", "system", "developer", "tool")),
            "content": st.sampled_from(("def f(", "", "x\u2028y", "a" * 2000))
            | st.just([{"type": "text", "text": "hi"}]),
        }
    )
    return _openai(model, {"messages": st.lists(message, min_size=1, max_size=3), "max_tokens": st.integers(0, 6)})


def _completions(model: str) -> st.SearchStrategy[dict[str, Any]]:
    prompts = st.sampled_from(("def f(", "", ["a", "b"], [1, 2, 3], [[1], [2]], "x" * 3000, [], [[]]))
    return _openai(model, {"prompt": prompts, "max_tokens": st.integers(0, 6)})


def _openai(model: str, own: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(
        (*Task.model_fields, *HINTS, *NOT_OFFERED, "logprobs", "top_logprobs", "echo", "service_tier")
    )
    optional = {
        "stream": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
        "n": st.integers(1, 3),
        "best_of": st.integers(1, 3),
        "logprobs": st.integers(0, 3) | st.booleans(),
        "echo": st.booleans(),
        "seed": st.integers(-1, 2**63 - 1),
        "stop": st.just(["\n"]),
        "temperature": st.sampled_from((0, 1, 0.5)),
        "timeout": st.sampled_from((0.001, 5)),
        "chat_template_kwargs": st.just({"x": 1}),
    }
    good = st.fixed_dictionaries({"model": st.just(model), **own}, optional=optional)
    return good | st.builds(lambda body, name, value: {**body, name: value}, good, names, VALUES)


def body_for(path: str, model: str) -> st.SearchStrategy[Any]:
    """JSON that a route might take; something of the kind where it is not known."""
    if path.endswith(("chat/completions", "/messages", "/count_tokens")):
        return _chat(model)
    if path.endswith("completions"):
        return _completions(model)
    if path.endswith("tasks"):
        return tasks(model)
    return tasks(model) | st.just({}) | VALUES


@dataclass(frozen=True, slots=True)
class Route:
    """`path` as OpenAPI writes it, with names in braces."""

    method: str
    path: str


def routes(openapi: Mapping[str, Any]) -> tuple[Route, ...]:
    """All that an OpenAPI document tells of, and where it is found; but for what answers until its caller leaves."""
    found = [
        Route(method.upper(), path)
        for path, known in openapi["paths"].items()
        if path != "/v1/overview/events"
        for method in known
    ]
    return (*sorted(found, key=lambda route: (route.path, route.method)), Route("GET", "/openapi.json"))


@st.composite
def _request(draw: Any, known: Sequence[Route], model: str, ids: Sequence[bytes]) -> tuple[str, bytes, bool]:
    """One request: what it is, its bytes, and whether it may break the connection's framing."""
    route = draw(st.sampled_from(known))
    path = b"/".join(
        draw(st.sampled_from((*ids, *ids, *IDS))) if part.startswith("{") else part.encode()
        for part in route.path.split("/")
    )
    path += draw(st.sampled_from(QUERIES))
    if draw(st.integers(0, 19)) == 0:
        path = draw(
            st.sampled_from(
                (b"*", b"//", b"http://x/v1/models", b"/v1/tasks/", b"/V1/MODELS", b"/" + b"a" * 30_000, b"/..")
            )
        )
    method = route.method
    if draw(st.integers(0, 5)) == 0:
        method = draw(st.sampled_from(METHODS))
    body, broken = b"", False
    headers: list[tuple[bytes, bytes]] = [(b"host", b"x")]
    if route.method in ("POST", "PUT", "PATCH") or draw(st.integers(0, 14)) == 0:
        body = draw(spoiled_bytes(draw(json_bytes(draw(spoiled(draw(body_for(route.path, model))))))))
        headers.append((b"content-type", b"application/json"))
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
        name = draw(st.sampled_from(HEADERS))
        broken |= name in (b"transfer-encoding", b"content-length", b"expect", b"upgrade", b"connection")
        headers.append((name, draw(st.sampled_from(HEADER_VALUES) | st.binary(max_size=12))))
    if draw(st.integers(0, 60)) == 0:
        headers += [(b"x-%d" % k, b"y" * 500) for k in range(draw(st.sampled_from((10, 200, 2000))))]
        broken = True
    carried = _chunked(body, draw(st.integers(1, 5))) if body and draw(st.integers(0, 5)) == 0 else None
    if carried is not None:
        headers.append((b"transfer-encoding", b"chunked"))
    elif body or route.method == "POST":
        headers.append((b"content-length", b"%d" % len(body)))
    version = draw(
        st.sampled_from((b"HTTP/1.1",) * 20 + (b"HTTP/1.0", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1", b""))
    )
    head = method.encode("latin-1", "replace") + b" " + path + b" " + version + b"\r\n"
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    data = head + lines + b"\r\n" + (body if carried is None else carried)
    clean = version in (b"HTTP/1.1", b"HTTP/1.0") and method in METHODS[:7] and not broken
    return f"{route.method} {route.path}", data, not clean or _unfit(path + lines)


def _unfit(head: bytes) -> bool:
    """Servers may refuse such bytes at once, and need not wait for what comes behind them."""
    return re.search(rb"[^\t\r\n -~]", head) is not None


def _chunked(body: bytes, pieces: int) -> bytes:
    size = -(-len(body) // pieces)
    parts = [body[k : k + size] for k in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@st.composite
def visits(draw: Any, known: Sequence[Route], model: str, ids: Sequence[bytes]) -> Visit:
    """One connection. `ids` are tasks that there are."""
    how = draw(
        st.sampled_from(("one",) * 12 + ("pipelined", "pieces", "pieces", "left", "left", "half", "broken", "noise"))
    )
    if how == "noise":
        data = draw(st.binary(max_size=300) | st.sampled_from(NOISE))
        return Visit("noise", (data,), broken=True)
    one = _request(known, model, ids)
    kind, data, broken = draw(one)
    match how:
        case "pipelined":
            more = [draw(one) for _ in range(draw(st.integers(1, 3)))]
            return Visit("pipelined", ((data + b"".join(m[1] for m in more)).replace(b"HEAD ", b"GET "),), broken=True)
        case "pieces":
            cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
            parts = tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
            return Visit(kind, parts, pause=0.002, broken=broken)
        case "left":
            cut = draw(st.integers(0, len(data)))
            return Visit(f"{kind}, left", (data[:cut] if draw(st.booleans()) else data,), leaves=True, broken=True)
        case "half":
            return Visit(f"{kind}, half", (data[: draw(st.integers(0, len(data)))],), broken=True)
        case "broken":
            return Visit(f"{kind}, broken", (draw(_torn(data)),), broken=True)
        case _:
            return Visit(kind, (data,), broken=broken)


@st.composite
def _torn(draw: Any, data: bytes) -> bytes:
    """A request with something put in, anywhere."""
    place = draw(st.integers(0, len(data)))
    return data[:place] + draw(st.sampled_from(NOISE) | st.binary(max_size=8)) + data[place:]


NOISE = (
    *(
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET",
        b"\x00" * 50,
    ),
    *(
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n x: folded\r\n\r\n",
        b"POST /v1/tasks HTTP/1.1\r\ncontent-length: 5\r\n",
    ),
    *(
        b"transfer-encoding: chunked\r\n",
        b"content-length: 3\r\ncontent-length: 4\r\n",
        b"ffffffffffffffffff\r\n",
        b"\n",
        b" ",
        b":",
    ),
    *(b"*1\r\n$4\r\nPING\r\n", b"A" * 70_000, b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 200_000),
)
