"""Checks a gateway's answers: well-formed HTTP/1.1, and every error one that docs/use/http.md declares.

Reads bytes strictly, with a parser that shares nothing with the server's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "use" / "http.md"
#: Of the server errors, those that a caller may bring about while all is well: a `timeout` that he asked for, and turns
#: that he did not wait for.
FAIR = frozenset({(504, "expired"), (503, "too_many_large_results"), (503, "too_many_connections"), (503, "stopping")})
#: The types of Anthropic's errors by status, where they are not the usual ones.
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
SERVERS = ("overloaded_error", "timeout_error")
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [ -~]*")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t -~\x80-\xff]*)")


class Malformed(Exception):
    """These bytes are no HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@cache
def declared() -> frozenset[tuple[int, str]]:
    """(status, code) of every error, as the table of docs/use/http.md has them."""
    rows = re.findall(r"^\| ([0-9, ]+) \| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return frozenset(
        (int(status), code)
        for numbers, codes in rows
        for status in numbers.split(",")
        for code in re.findall("`(.+?)`", codes)
    )


def take(data: bytes, *, head: bool = False, closed: bool = False) -> tuple[Answer | None, bytes]:
    """The first answer in it and what follows; none while it is not whole. `head`: it has no body. Raises Malformed."""
    top, mark, rest = data.partition(b"\r\n\r\n")
    if not mark:
        if closed and data:
            raise Malformed(f"the headers break off: {data[:200]!r}")
        return None, data
    first, *lines = top.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise Malformed(f"no status line: {first[:200]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Malformed(f"no header: {line[:200]!r}")
        name = field[1].decode().lower()
        if name in headers and name != "vary":
            raise Malformed(f"the header {name} comes twice")
        headers[name] = field[2].decode("latin-1").strip()
    answer = Answer(int(status[1]), headers, b"")
    if answer.status < 200:
        return take(rest, head=head, closed=closed)
    if head or answer.status in (204, 304):
        return answer, rest
    body, left = _body(headers, rest, closed)
    return (None, data) if body is None else (Answer(answer.status, headers, body), left)


def _body(headers: dict[str, str], rest: bytes, closed: bool) -> tuple[bytes | None, bytes]:
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(rest, closed)
    if "content-length" in headers:
        size = int(headers["content-length"])
        if len(rest) < size and closed:
            raise Malformed(f"a body of {size} bytes breaks off after {len(rest)}")
        return (rest[:size], rest[size:]) if len(rest) >= size else (None, rest)
    if headers.get("connection") != "close":
        raise Malformed(f"where the body ends is not said: {headers}")
    return (rest, b"") if closed else (None, rest)


def _chunks(rest: bytes, closed: bool) -> tuple[bytes | None, bytes]:
    body = b""
    while True:
        size, mark, after = rest.partition(b"\r\n")
        if mark and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", size):
            raise Malformed(f"no size of a chunk: {size[:100]!r}")
        length = int(size, 16) if mark else 0
        if not mark or len(after) < length + 2:
            if closed:
                raise Malformed("chunks break off")
            return None, rest
        if after[length : length + 2] != b"\r\n":
            raise Malformed("a chunk is longer than it says")
        body, rest = body + after[:length], after[length + 2 :]
        if length == 0:
            return body, rest


def faults(answer: Answer, *, head: bool = False) -> list[str]:
    """What is wrong with it, in words."""
    kind = answer.headers.get("content-type", "")
    found = [f"the header {name} is nobody's" for name in ("set-cookie", "location ") if name in answer.headers]
    if 300 <= answer.status < 400:
        found.append(f"a redirect: {answer.status}")
    if head or answer.status == 204:
        return found
    if answer.status >= 400:
        return found + _error_faults(answer.status, answer.body)
    if kind.startswith("text/event-stream"):
        return found + _event_faults(answer.body)
    if kind.startswith("application/json"):
        try:
            json.loads(answer.body)
        except ValueError as error:
            found.append(f"no JSON: {error}")
    elif kind == "application/x-ndjson":
        return found + _line_faults(answer.body)
    elif not kind.startswith(("text/plain", "text/html")):
        found.append(f"an answer of the type {kind!r}")
    return found


def _error_faults(status: int, body: bytes) -> list[str]:
    try:
        parsed: Any = json.loads(body)
    except ValueError as error:
        return [f"{status} is no JSON ({error}): {body[:300]!r}"]
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, str) and parsed.keys() == {"error", "code"}:  # Ollama's form
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": error, "type": kind, "param": None, "code": parsed["code"]}
    if isinstance(error, dict) and parsed.keys() == {"type", "error", "request_id"}:
        error = _of_anthropic(error, status)
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return [f"{status} is not of the form that errors have: {body[:300]!r}"]
    found = []
    if not (isinstance(error["message"], str) and error["message"] and isinstance(error["code"], str)):
        found.append(f"{status} has no message or code: {error}")
    if not (error["param"] is None or isinstance(error["param"], str)):
        found.append(f"{status} has a param that is none: {error}")
    if error["type"] != ("invalid_request_error" if status < 500 else "server_error"):
        found.append(f"{status} has the type {error['type']!r}")
    if (status, error["code"]) not in declared():
        found.append(f"{status} {error['code']!r} is not declared: {error}")
    if status >= 500 and (status, error["code"]) not in FAIR:
        found.append(f"{status} {error['code']!r}: {error}")
    return found


def _of_anthropic(error: dict[str, Any], status: int | None = None) -> dict[str, Any]:
    """An error of Anthropic's form as OpenAI's; any other as it is. `status`: None in a stream."""
    details = error.get("details")
    if error.keys() != {"type", "message", "details"} or not isinstance(details, dict):
        return error
    theirs = "server_error" if error["type"] in ("api_error", *SERVERS) else "invalid_request_error"
    if status is not None:
        usual = "invalid_request_error" if status < 500 else "api_error"
        theirs = theirs if error["type"] == ANTHROPIC.get(status, usual) else "another status's"
    return {"message": error["message"], "type": theirs, "param": details.get("param"), "code": details["error_code"]}


def _line_faults(body: bytes) -> list[str]:
    """Lines of JSON; an error is the last one."""
    found = []
    for line in body.decode("utf-8", "strict").splitlines():
        try:
            code = json.loads(line).get("code")
        except ValueError as error:
            return [*found, f"a line that is no JSON ({error}): {line[:200]!r}"]
        if code is not None and code not in {known for _, known in declared()}:
            found.append(f"in a stream, an error that is not declared: {line[:200]!r}")
    return found


def _event_faults(body: bytes) -> list[str]:
    """Server-sent events: each line a field or a comment, data JSON or the word that ends OpenAI's streams."""
    found = []
    for line in body.decode("utf-8", "strict").split("\n"):
        name, _, value = line.partition(":")
        if line and name not in ("", "data", "event", "id", "retry"):
            found.append(f"a line that is no field: {line[:200]!r}")
        if name != "data" or value.strip() == "[DONE]":
            continue
        try:
            data = json.loads(value)
        except ValueError as error:
            found.append(f"data that is no JSON ({error}): {value[:200]!r}")
            continue
        error = data.get("error") if isinstance(data, dict) else None
        if isinstance(error, dict) and "type" in error:
            known, error = {code for _, code in declared()}, _of_anthropic(error)
            if error.get("code") not in known:
                found.append(f"in a stream, an error that is not declared: {error}")
            elif error["code"] not in ("expired", "cancelled") and error["type"] == "server_error":
                found.append(f"in a stream: {error}")
    return found
