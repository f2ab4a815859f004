"""Reads a request's JSON body, with limits on its size before and after unpacking, and checks its fields by a schema.

bytes ─▶ unpacked ─▶ small: parsed here │ large, in turns of tenants: a thread counts its parts, then parses it

A body of more parts than any request needs is refused without being parsed (`producers.contract.json_parts`).

The parameters in a URL's query are checked here, too.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from producers.connection.turns import OWNER
from producers.contract.fields import MAX_PROMPT_TOKENS, read_json
from producers.contract.json_parts import MAX_PARTS, count_parts, count_values
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.executor import ExecutorBusy, ExecutorClosed, ExecutorFull
from producers.gateway.http.errors import (
    RETRY_AFTER,
    Problem,
    invalid_value,
    media_type,
    unavailable,
    unknown_parameter,
)
from producers.gateway.http.idempotency import note_body
from producers.gateway.http.request_state import Work, sticky_in, work_of

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
#: A too large body is read and discarded up to this many times the limit: a client that is cut off while it sends sees
#: a broken connection instead of the error.
COURTESY = 4
#: Larger bodies (bytes) are parsed off the event loop.
INLINE = 64 * 1024
#: Larger bodies (bytes) are checked off the event loop if their outputs are to have a form: a schema says much in few
#: characters.
INLINE_FORM: Final = 2 * 1024
#: Parameters that give outputs a form, or may.
FORM_PARAMETERS: Final = frozenset(
    {"json_schema", "response_format", "text", "tools", "output_config", "guided_json", "structured_outputs", "format"}
)
#: Most values of a body, numbers included: as many as the longest prompt has token ids, and all else.
MAX_VALUES: Final = MAX_PROMPT_TOKENS + MAX_PARTS
#: Most bytes of a body that makes no task: such requests do not count in a minute's, so none may take long.
SETTINGS: Final = 256 * 1024
#: Most files in one gzip (RFC 1952, 2.2), of which clients send one; and zlib's number for gzip.
MEMBERS: Final = 128
_GZIP: Final = 16 + zlib.MAX_WBITS
#: Most bodies that wait for a thread, and the longest wait (s) of one.
WAITING, PATIENCE_S = 64, 10.0
#: JSON schema's types of single values -> Python's, and the words for them. Users check the bounds of numbers.
KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "boolean": (bool, "true or false"),
    "number": ((int, float), "a number"),
    "integer": (int, "an integer"),
    "string": (str, "text"),
}


class BodyRoom:
    """The bytes of large bodies that come in or are parsed, and of results that go out, bounded in all and by owner
    (`OWNER`): a caller with many connections may be slow on all of them. Use it from one event loop."""

    def __init__(self, in_all: int, each: int) -> None:
        self._free, self._each = in_all, each
        self._reserved: Counter[Hashable] = Counter()

    def take(self, owner: Hashable, size: int) -> None:
        """Raises Problem where there is no room."""
        if size > self._free or self._reserved[owner] + size > self._each:
            raise _busy("As many large bodies and results are under way as this gateway holds for you, or for all")
        self._free -= size
        self._reserved[owner] += size

    def give(self, owner: Hashable, size: int) -> None:
        self._free += size
        self._reserved[owner] -= size
        if not self._reserved[owner]:
            del self._reserved[owner]


class _Reservation:
    """The part of the room that one body has reserved, beyond INLINE."""

    __slots__ = ("_owner", "_room", "_size")

    def __init__(self, room: BodyRoom) -> None:
        self._room, self._owner, self._size = room, OWNER.get(), 0

    def grow(self, size: int) -> None:
        """Reserve so many bytes. Raises Problem."""
        if size > INLINE:
            self._room.take(self._owner, size - self._size)
            self._size = size

    def give_up(self) -> None:
        if self._size:
            self._room.give(self._owner, self._size)


async def read_task(request: Request, limit: int) -> Task:
    """The task in a request's body. Raises InvalidTask, and Problem for a body that is too large or not JSON."""
    value = await _parsed(request, limit, read_json)
    return await checked(request, lambda: Task.parse(value).formed())


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in a request's body. Raises as `read_task` does."""
    value = await _parsed(request, limit, read_json)
    if not isinstance(value, dict):
        raise InvalidTask(f"the body is a JSON object, not {shown(value)}", code="invalid_type")
    return value


async def _parsed(request: Request, limit: int, parse: Callable[[bytes], T]) -> T:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"it has {shown(kind)}" if kind else "it has none"
        raise media_type(f"The request must have the content type application/json; {text}.", accept="application/json")
    unpack = _unpacking(request)
    room = _Reservation(request.app.state.gateway.body_room)
    try:
        body = await _read(request, limit, room)
        work = work_of(request)
        if unpack is not None:
            body = await on_thread(request, work, partial(unpack, body, limit))
        note_body(request, body)
        work.size = len(body)
        small = len(body) <= INLINE
        value = parse(body) if small else await on_thread(request, work, partial(_parse_large, body, parse))
        if isinstance(value, dict):
            request.scope["state"]["sticky"] = sticky_in(value)
        work.form = isinstance(value, dict) and not FORM_PARAMETERS.isdisjoint(value)
        return value
    finally:
        room.give_up()


async def on_thread(request: Request, work: Work, do: Callable[[], T]) -> T:
    """Run `do` on a thread, since a large body makes it slow. Returns or raises what it does. Raises Problem if too
    many bodies wait."""
    try:
        result: T = await request.app.state.gateway.bodies.run(
            do, tenant=work.tenant, max_jobs=WAITING, patience=PATIENCE_S
        )
    except (ExecutorFull, ExecutorBusy):
        raise _busy("Too many large bodies wait to be read here") from None
    except ExecutorClosed:
        raise unavailable("This gateway is stopping; send the request again.", code="stopping") from None
    except BaseException:
        work.done = True
        raise
    work.done = True
    return result


async def checked(request: Request, check: Callable[[], T]) -> T:
    """What `check` makes of a body that was read: of a large one on a thread, since that takes as long as to parse it,
    or longer where a form is to be read. Returns or raises what it does, and raises Problem as `on_thread`."""
    work = work_of(request)
    large = work.size is not None and work.size > (INLINE_FORM if work.form else INLINE)
    return await on_thread(request, work, check) if large else check()


def _parse_large(body: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse a large body. Raises Problem for one of too many parts."""
    if (parts := count_parts(body, MAX_PARTS)) > MAX_PARTS:
        raise _too_many(f"{parts} lists, objects and strings", MAX_PARTS)
    if (values := count_values(body, MAX_VALUES)) > MAX_VALUES:
        raise _too_many(f"{values} values", MAX_VALUES)
    return parse(body)


def _too_many(counted: str, limit: int) -> Problem:
    return Problem(
        400, f"The body has {counted}; at most {limit} are taken: send less at a time.", code="too_many_parts"
    )


def _unpacking(request: Request) -> Callable[[bytes, int], bytes] | None:
    """The function that unpacks the body's Content-Encoding, or None. Raises Problem for an unknown one."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in CODINGS:
        message = f"The body has the content encoding {shown(coding)}; gzip is taken, or none."
        raise media_type(message, accept_encoding="gzip")
    return CODINGS[coding]


def _gunzip(body: bytes, limit: int) -> bytes:
    """Unpack gzip. Raises Problem for bad data, for more than `limit` bytes, without unpacking more, and for more than
    MEMBERS files in one: to begin one takes as long as to unpack some kilobytes."""
    plain, remaining = bytearray(), body
    for _ in range(MEMBERS):
        unpacker = zlib.decompressobj(wbits=_GZIP)
        try:
            plain += unpacker.decompress(remaining, limit + 1 - len(plain))
        except zlib.error as error:
            raise _no_gzip(str(error)) from None
        if len(plain) > limit:
            raise _too_large(limit)
        if not unpacker.eof:
            raise _no_gzip("it ends early")
        remaining = unpacker.unused_data.lstrip(b"\0")  # padding
        if not remaining:
            return bytes(plain)
    raise _no_gzip(f"it has more than {MEMBERS} members")


def _no_gzip(why: str) -> Problem:
    return Problem(400, f"The body is not gzip: {why}.", code="invalid_gzip")


#: Supported content encodings -> their unpackers.
CODINGS: Final[dict[str, Callable[[bytes, int], bytes] | None]] = {"identity": None, "gzip": _gunzip, "x-gzip": _gunzip}


def _busy(why: str) -> Problem:
    return Problem(429, f"{why}; try again in a moment.", code="body_busy", headers=RETRY_AFTER)


async def _read(request: Request, limit: int, room: _Reservation) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            try:
                room.grow(size)
            except Problem as busy:
                busy.headers["connection"] = "close"  # the rest of it is not read
                raise
            body += chunk
        elif size > COURTESY * limit:
            break
    if size > limit:
        problem = _too_large(limit)
        problem.headers["connection"] = "close"
        raise problem
    return bytes(body)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"The body is too large; at most {limit} bytes are taken.", code="body_too_large")


def documented(schema: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    """A JSON body for OpenAPI (`openapi_extra` of an endpoint)."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema without references: in OpenAPI's document they would lead elsewhere."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {name: inlined(value) for name, value in node.items()}

    result: dict[str, Any] = inlined(schema)
    return result


async def read_as(request: Request, kind: type[B], limit: int) -> B:
    """A small body as a pydantic model. `limit`: the most bytes, where it is below SETTINGS.

    Raises as `read_object`, and Problem, which names a bad field.
    """
    body = await read_object(request, min(limit, SETTINGS))
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise Problem(400, f"{path}: {first['msg']}.", code="invalid_value", param=path[:100]) from None


async def fields_of(
    request: Request,
    limit: int,
    schema: Mapping[str, Any],
    checks: Mapping[str, Callable[[Any, str], Any]] | None = None,
    *,
    optional: bool = False,
) -> dict[str, Any]:
    """The body's fields that are not null, checked by name and type.

    `limit`: the most bytes. `checks`: field -> what checks its value, given its name, in place of the schema.
    `optional`: there may be no body. Raises InvalidTask, and Problem for a body that is too large or no JSON.
    """
    if optional and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    return checked_fields(await read_object(request, limit), schema, checks)


def checked_fields(
    body: Mapping[str, Any],
    schema: Mapping[str, Any],
    checks: Mapping[str, Callable[[Any, str], Any]] | None = None,
) -> dict[str, Any]:
    """The fields of a body that is read, as of `fields_of`. Raises InvalidTask."""
    properties = schema["properties"]
    for name in body:
        if name not in properties:
            raise InvalidTask(
                f"unknown field {shown(name)}; there are {', '.join(properties)}", param=name, code="unknown_parameter"
            )
    values = {name: value for name, value in body.items() if value is not None}
    for name in schema.get("required", ()):
        if name not in values:
            raise InvalidTask(f"{name} is missing", param=name, code="missing_parameter")
    own_checks = checks or {}
    return {
        name: own_checks[name](value, name) if name in own_checks else _checked(name, value, properties[name])
        for name, value in values.items()
    }


def _checked(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    kind, expected = KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise InvalidTask(f"{name} is {shown(value)}; it must be {expected}", param=name, code="invalid_type")
    if isinstance(value, str):
        _check_text(name, value, schema)
    return value


def _check_text(name: str, value: str, schema: Mapping[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidTask(f"{name} is {shown(value)}; there are {', '.join(schema['enum'])}", param=name)
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", len(value))
    if not shortest <= len(value) <= longest:
        raise InvalidTask(f"{name} has {len(value)} characters; it must have {shortest} to {longest}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidTask(f"{name} is not valid Unicode: {shown(value)} has a lone surrogate", param=name) from None


def query_parameters(request: Request, names: Collection[str], pairs: str = "") -> dict[str, str]:
    """Read the parameters of a URL's query: of these names, or `pairs[...]`, each once. Raises Problem for others."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names and not (pairs and re.fullmatch(rf"{pairs}\[.+\]", name, re.DOTALL)):
            expected = ", ".join(names) + (f" and {pairs}[name]" if pairs else "")
            raise unknown_parameter(name, f"there are {expected}")
        if name in values:
            raise invalid_value(name, f"{shown(name)} is given twice.")
        values[name] = value
    return values


def query_schema(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A query's parameter for OpenAPI (`parameters` of an operation)."""
    return {"name": name, "in": "query", "description": description, "schema": schema}
