"""Errors as JSON, as OpenAI's API has them, or in the form of a path's own API."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from producers.connection.aws import AwsError
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import CODES, Trouble, trouble
from producers.connection.turns import Busy
from producers.contract.fields import label
from producers.errors import (
    BrokenRecord,
    InvalidQuery,
    InvalidTask,
    LimitReached,
    PenstockError,
    ResultUnavailable,
    SecretUnreadable,
    SubmitFailed,
    TaskErased,
    TaskInBatch,
    TaskNotFinal,
    TaskNotFound,
    TokenizerChanged,
    UnknownModel,
    shown,
)
from producers.gateway.fair_share import MOST_WAITING
from producers.gateway.metrics import UNKNOWN
from producers.store.access.api_keys import LOCAL, Principal

logger = logging.getLogger(__name__)

AWAY = "The store or the broker does not answer; try again in a moment."
REFUSES = "The store or the broker answers, but refuses; nothing was done."
BUSY = "This gateway has as much under way for this caller as it does at once; try again in a moment."
FULL = "The memory or disk of the store or the broker is full: nothing new is taken for now; try again later."
#: The name in a request's state of its id, which the edge sets.
REQUEST_ID: Final = "request_id"
#: Headers of errors that a retry after a second may cure, and of those that none does: OpenAI's clients try again after
#: 409 and 5xx.
RETRY_AFTER = {"retry-after": "1"}
ONCE = {"x-should-retry": "false"}
_OPENAI: Final = "POST /v1/chat/completions takes messages, POST /v1/completions a text; GET /v1/models lists models"
_GENERATES: Final = f"the models here read and generate text. {_OPENAI}"
#: Paths here, below /v1.
_PATHS: Final = (
    "chat/completions",
    "completions",
    "responses",
    "models",
    "embeddings",
    "rerank",
    "classify",
    "token_classify",
    "score",
    "batches",
    "files",
    "tasks",
)
#: Paths of other servers, or beginnings of such -> what is not offered, and what to use. One that ends with a slash
#: stands for those below it alone.
ELSEWHERE: Final = {
    "/v1/moderations": f"Moderation is not offered: {_GENERATES}",
    "/v1/audio": f"Audio is not offered: {_GENERATES}",
    "/v1/images": f"Images are not offered: {_GENERATES}",
    "/v1/realtime": f"Realtime sessions are not offered: {_GENERATES}, and both stream",
    "/v1/fine_tuning": f"Fine-tuning is not offered: {_GENERATES}",
    "/v1/assistants": "Assistants are not offered: POST /v1/responses keeps conversations",
    "/v1/threads": "Threads are not offered: POST /v1/responses keeps conversations",
    "/v1/conversations": "Conversations are not offered: previous_response_id of POST /v1/responses goes on with one",
    "/v1/chat/completions/": "Stored chat completions are not offered: POST /v1/responses keeps its answers",
    "/v1/responses/compact": "Compaction is not offered: truncation auto of POST /v1/responses drops what is oldest",
    "/v1/uploads": "Uploads in parts are not offered: POST /v1/files takes a file as a whole",
    "/v1/vector_stores": "Vector stores are not offered: POST /v1/files takes input of batches",
    **{
        f"/v1/{name}": f"{name.capitalize()} are not offered: {_GENERATES}"
        for name in ("containers", "evals", "skills", "videos", "chatkit")
    },
    "/v1/v1/messages": "The path has a /v1 too many. The base URL of Anthropic's clients ends without /v1",
    "/v1/api": "The path has a /v1 too many. The base URL of Ollama's clients ends without /v1",
    "/v1/messages/batches": "Anthropic's Message Batches are not offered: POST /v1/batches takes OpenAI's",
    **dict.fromkeys(
        ("/api/create", "/api/copy", "/api/push", "/api/delete", "/api/blobs"),
        "Models are not made, copied or deleted over HTTP: `penstock models publish` and `penstock models rm` do that",
    ),
    "/api": "There is no such path. Of Ollama's API there are POST /api/chat, POST /api/generate, POST /api/embed, "
    "POST /api/show, POST /api/pull, GET /api/tags, GET /api/ps and GET /api/version",
    "/version": "There is no /version: the release is info.version of GET /openapi.json",
    "/pooling": "Pooling by token is not offered: POST /v1/embeddings takes texts, and gives a vector for each",
    "/openai": "The path begins with /openai, as Azure's: here it begins with /v1. A client's base URL ends with /v1",
    **{f"/{name}": f"The path lacks /v1: it is /v1/{name}. A client's base URL ends with /v1" for name in _PATHS},
}
#: The beginning of the paths of Anthropic's API, and the header by which its clients are known on others.
MESSAGES, ANTHROPIC = "/v1/messages", b"anthropic-version"
#: HTTP status of an error -> its type with Anthropic. Others of 5xx are api_error, of 4xx invalid_request_error.
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Codes of an error that a shorter prompt cures; and how Anthropic's messages of it begin, by which its clients know.
TOO_LONG: Final = ("context_length_exceeded", "kv_capacity_exceeded", "prompt_too_long")
PROMPT_TOO_LONG: Final = "prompt is too long: "
#: HTTP status of a request whose client left before the answer; it is only counted.
CLIENT_LEFT = 499


class Problem(Exception):
    """An error that the gateway found. `param`: the field or parameter at fault. `code`: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def invalid_value(param: str, message: str) -> Problem:
    """The error for a parameter's value."""
    return Problem(400, message, code="invalid_value", param=param)


def wrong(param: str, value: object, expected: str) -> Problem:
    """The error for a parameter's value, where others are taken."""
    return invalid_value(param, f"{param} is {shown(value)}; it must be {expected}")


def unknown_parameter(param: str, hint: str) -> Problem:
    """The error for a parameter that there is not. `hint`: what there is."""
    return Problem(400, f"unknown parameter {shown(param)}; {hint}", code="unknown_parameter", param=param)


def check_given(values: Container[str], *needed: str) -> None:
    """Raise Problem unless all parameters are given that a request needs."""
    for name in needed:
        if name not in values:
            raise Problem(400, f"{name} is missing", code="missing_required_parameter", param=name)


def no_such_path(path: str, *, anthropic: bool = False) -> Problem | None:
    """The error for a path that clients of other servers know, or that a base URL spoiled; None for any other.
    `anthropic`: whether a client of Anthropic's asks, whose base URL ends otherwise."""
    if anthropic and path.startswith("/v1/v1/"):
        path = f"/v1{MESSAGES}"
    parts = [part for part in path.split("/") if part]
    while parts[:2] == ["v1", "v1"]:
        del parts[0]
    meant = "/".join(["", *parts])
    if meant != path and (name := next((name for name in _PATHS if f"{meant}/".startswith(f"/v1/{name}/")), None)):
        which = f": it is {meant}" if meant == f"/v1/{name}" else ""
        message = f"The path has a slash or a /v1 too many{which}. A client's base URL ends with /v1, without a slash."
        return Problem(404, message, code="not_found")
    known = next((name for name in ELSEWHERE if path == name or path.startswith(f"{name.rstrip('/')}/")), None)
    if known is not None and known.startswith("/api/"):  # with Ollama, a 404 says that the model is not there
        return Problem(501, f"{ELSEWHERE[known]}.", code="not_offered")
    return None if known is None else Problem(404, f"{ELSEWHERE[known]}.", code="not_found")


def media_type(message: str, **accept: str) -> Problem:
    """The error for a body of another type or coding than are taken, which a header names."""
    headers = {name.replace("_", "-"): value for name, value in accept.items()}
    return Problem(415, message, code="unsupported_media_type", headers=headers)


def unavailable(message: str, *, code: str, param: str | None = None) -> Problem:
    """The error for what is not there for now: a retry may find it."""
    return Problem(503, message, code=code, param=param, headers=RETRY_AFTER)


def too_many_waiting() -> Problem:
    """The error for a request whose caller's line (`FairShare`) is full."""
    message = f"This gateway has {MOST_WAITING} requests of yours that wait for their turn; try again in a moment."
    return Problem(429, message, code="too_many_waiting", headers={**RETRY_AFTER, "connection": "close"})


def too_many_open(limit: int) -> Problem:
    """The error for a request of a caller that has `limit` under way."""
    message = (
        f"This gateway has {limit} requests of yours under way, which is all that one caller may have: send them "
        "faster, take their answers faster, or send fewer at a time."
    )
    return Problem(429, message, code="too_many_open_requests", headers={**RETRY_AFTER, "connection": "close"})


def gone(message: str, *, code: str) -> Problem:
    """The error for an Idempotency-Key whose first request made what is not there any more."""
    return Problem(404, f"This Idempotency-Key made the {message}", code=code, param="Idempotency-Key")


def body_of(problem: Problem) -> dict[str, dict[str, str | None]]:
    """The JSON object of an error."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    if problem.status == 429:
        kind = "rate_limit_error"
    # Both may contain names from the caller, which may not be encodable text.
    message = problem.message.encode(errors="backslashreplace").decode()
    param = None if problem.param is None else label(problem.param)
    return {"error": {"message": message, "type": kind, "param": param, "code": problem.code}}


def _as_ollama(body: Mapping[str, str | None]) -> dict[str, Any]:
    return {"error": body["message"], "code": body["code"]}


#: Beginnings of the paths of other APIs -> the JSON object of an error there, made of the members of OpenAI's.
SHAPES: Final[Mapping[str, Callable[[Mapping[str, str | None]], dict[str, Any]]]] = {"/api/": _as_ollama}


def shaped(problem: Problem, path: str) -> dict[str, Any]:
    """The JSON object of an error, in the form of the API that a path belongs to."""
    body = body_of(problem)
    return next((shape(body["error"]) for start, shape in SHAPES.items() if path.startswith(start)), body)


def messages_body_of(problem: Problem, request_id: str) -> dict[str, Any]:
    """The JSON object of an error for Anthropic's clients, which show `error_code`."""
    kind = ANTHROPIC_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    error = body_of(problem)["error"]
    details = {"error_code": problem.code, "param": error["param"]}
    begin = PROMPT_TOO_LONG if problem.code in TOO_LONG and problem.param != "max_tokens" else ""
    return {
        "type": "error",
        "error": {"type": kind, "message": f"{begin}{error['message']}", "details": details},
        "request_id": request_id,
    }


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is of Anthropic's API: by its path, or by a header that its clients alone send."""
    path: str = scope["path"]
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    return any(name == ANTHROPIC for name, _ in scope["headers"])


def response_of(problem: Problem, scope: Scope) -> JSONResponse:
    """The answer to a request that failed. Its state has its id (`REQUEST_ID`)."""
    request_id = scope.get("state", {}).get(REQUEST_ID, "")
    body = messages_body_of(problem, request_id) if is_anthropic(scope) else shaped(problem, scope["path"])
    return JSONResponse(body, problem.status, problem.headers)


def problem_of(error: Exception, principal: Principal = LOCAL) -> Problem:
    """The Problem that a caller sees for an exception, without internals, and without models that it may not use."""
    match error:
        case Problem():
            return error
        case UnknownModel():
            text = str(error).partition("; ")[0] + "." if principal.models else str(error)
            return Problem(404, text, code="model_not_found", param="model")
        case InvalidTask():
            return Problem(400, str(error), code=error.code, param=error.param)
        case RequestValidationError():
            return _invalid(error)
        case InvalidQuery():
            return Problem(400, str(error), code="invalid_value", param=error.param)
        case LimitReached():
            return Problem(429, str(error), code=error.code, headers=_retry(error.wait_s))
        case TaskNotFinal():
            return Problem(409, str(error), code="task_not_final", headers=ONCE)
        case TokenizerChanged():
            return Problem(409, str(error), code="tokenizer_changed", headers=ONCE)
        case TaskInBatch():
            return Problem(409, str(error), code="task_in_batch", headers=ONCE)
        case TaskNotFound() | TaskErased():
            return Problem(404, str(error), code="task_not_found")
        case BrokenRecord():
            warn_throttled(logger, "%s", error)
            return Problem(500, f"{error}.", code="broken_record", param=error.field)
        case ResultUnavailable():
            warn_throttled(logger, "%s", error)
            message = "The result is in a file that this gateway cannot read now; its log says why."
            return unavailable(message, code="file_unavailable")
        case SecretUnreadable():
            warn_throttled(logger, "%s", error)
            message = "A webhook's secret cannot be encrypted, or read, by this gateway now; its log says why."
            return unavailable(message, code="secret_unreadable")
        case SubmitFailed():
            warn_throttled(logger, "submit failed: %s", error)
            return unavailable(str(error), code=error.code)
        case Busy():
            return unavailable(BUSY, code="busy")
        case RedisError() | OSError():
            warn_throttled(logger, "store or broker failed: %s: %s", type(error).__name__, error)
            kind = trouble(error)
            message = AWAY if kind is Trouble.AWAY else FULL if kind is Trouble.FULL else REFUSES
            return unavailable(message, code=CODES.get(kind, "service_unavailable"))
        case HTTPException(status_code=404):
            message = "There is nothing at this URL; see GET /openapi.json for what there is."
            return Problem(404, message, code="not_found")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "other methods")
            message = f"This URL does not take this method; it takes {allowed}."
            return Problem(405, message, code="method_not_allowed", headers=error.headers)
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            return Problem(error.status_code, str(error.detail), code=code, headers=error.headers)
        case _:
            message = "Something went wrong here; the x-request-id header finds it in our log."
            return Problem(500, message, code="internal")


def _retry(wait_s: float | None) -> dict[str, str]:
    """The headers that say when to try again; None: not at all."""
    if wait_s is None:
        return ONCE
    wait = {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(int(wait_s * 1000))}
    return wait | {"x-should-retry": "true"}


def _invalid(error: RequestValidationError) -> Problem:
    """The Problem for the first parameter of a path, query or header that its route does not take."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    text = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}; {first['msg']}"
    return Problem(400, f"{name} {text}", code="invalid_value", param=name)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    problem = problem_of(error, getattr(request.state, "principal", LOCAL))
    path = request.url.path
    # A path of another server may be like one here that takes an id, by other methods.
    missing = (404, 405) if path in ELSEWHERE else (404,)
    if isinstance(error, HTTPException) and error.status_code in missing:
        problem = no_such_path(path, anthropic=is_anthropic(request.scope)) or problem
    work = request.scope["state"].get("work") if "state" in request.scope else None
    if work is not None and work.done and 400 <= problem.status < 500:
        await request.app.state.gateway.accounts.charge_refused(request, work)
    if problem.status in (429, 503):
        request.app.state.metrics.refused(problem.code, getattr(request.state, "tier", UNKNOWN))
    return response_of(problem, request.scope)


def install(app: FastAPI) -> None:
    """Register handlers for exceptions that mean something to callers. The edge answers all others."""
    ours, servers = (Problem, PenstockError), (RedisError, AwsError, ConnectionError, TimeoutError)
    for kind in (*ours, *servers, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)
