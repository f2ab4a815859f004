"""Pages for people with a browser: `/` says what the gateway is, `/docs` shows its OpenAPI document, to be tried.

Neither needs another server. `Documented` makes the document: FastAPI's, with examples, without the answer that FastAPI
adds to every route by itself.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import fastapi_offline
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response

from producers.gateway.http.edge import DOCS_ASSETS
from producers.release import release

#: FastAPI's schemas for bad parameters. Our answer to those is a 400 of our own form (`errors`).
_AUTOMATIC: Final = ("HTTPValidationError", "ValidationError")
_ERROR: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorView"}}}
#: The answers to a key that does not work, or lacks what the operation needs.
_REFUSALS: Final = {
    "401": {"description": "There is no key, or it does not work.", "content": _ERROR},
    "403": {"description": "The key is not for this.", "content": _ERROR},
}
_MESSAGES: Final = [{"role": "user", "content": "Write the function add(a, b)."}]
_RANKED: Final[dict[str, Any]] = {
    "model": "reranker",
    "query": "What feeds a turbine?",
    "documents": ["A penstock feeds a turbine.", "rain"],
}
_EVENTS: Final = ["response.completed", "response.failed"]
#: Bodies to begin with, for those who try an operation: path -> JSON. Made up from the schemas, they would be refused.
EXAMPLES: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/tasks": {"model": "tiny", "prompt": "def main():", "max_tokens": 40},
    "/v1/chat/completions": {"model": "tiny", "messages": _MESSAGES, "max_completion_tokens": 40},
    "/v1/completions": {"model": "tiny", "prompt": "def main():", "max_tokens": 40},
    "/v1/responses": {"model": "tiny", "input": "Write the function add(a, b).", "background": True},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Write the function add(a, b)."},
    "/v1/messages": {"model": "tiny", "max_tokens": 40, "messages": _MESSAGES},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": _MESSAGES},
    "/v1/embeddings": {"model": "minilm", "input": ["A penstock feeds a turbine.", "rain"]},
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/v1/score": {"model": "reranker", "text_1": "What feeds a turbine?", "text_2": _RANKED["documents"]},
    "/v1/classify": {"model": "classifier", "input": ["A fine day."]},
    "/v1/token_classify": {"model": "tagger", "input": ["Marie Curie was born in Warsaw."]},
    "/tokenize": {"model": "tiny", "messages": _MESSAGES},
    "/detokenize": {"model": "tiny", "tokens": [262, 276]},
    "/api/chat": {"model": "tiny", "messages": _MESSAGES, "options": {"num_predict": 40}},
    "/api/generate": {"model": "tiny", "prompt": "Write the function add(a, b).", "options": {"num_predict": 40}},
    "/api/embed": {"model": "minilm", "input": ["A penstock feeds a turbine.", "rain"]},
    "/api/embeddings": {"model": "minilm", "prompt": "A penstock feeds a turbine."},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/v1/batches": {"input_file_id": "file-...", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/webhook_endpoints": {"url": "https://example.com/hook", "event_types": _EVENTS},
    "/v1/webhook_endpoints/{endpoint_id}": {"event_types": _EVENTS, "name": "billing"},
    "/v1/webhook_endpoints/{endpoint_id}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
    "/v1/webhook_endpoints/{endpoint_id}/test": {"event_type": _EVENTS[0]},
    "/v1/keys": {"tenant": "acme", "name": "billing", "scopes": ["submit", "read"], "rpm": 600},
    "/v1/keys/{key_id}": {"rpm": 1200, "models": None},
    "/v1/keys/{key_id}/rotate": {"overlap": 3600},
    "/v1/feedback": {"id": "chatcmpl-...", "score": 1},
    "/v1/routing/{model}": {"generation": 0, "aliases": {"stable": "default"}},
    "/v1/rollouts/{model}/start": {"to": "candidate", "steps": [5, 25, 100], "hold_s": 600},
    "/v1/scaling/{pool}/pin": {"workers": 2, "for_s": 3600},
    "/v1/tenants/{tenant}/limits": {"rpm": 6000, "budget_tokens": 1_000_000},
}
router = APIRouter(tags=["health"])
#: All URLs are relative to /docs, so that the page also works below a proxy's prefix.
DOCS: Final = get_swagger_ui_html(
    openapi_url="openapi.json",
    title="Penstock",
    swagger_js_url="docs/assets/swagger-ui-bundle.js",
    swagger_css_url="docs/assets/swagger-ui.css",
    swagger_favicon_url="docs/assets/favicon.png",
    # Without a validator: it is another server, to which Swagger UI would send the document's URL.
    swagger_ui_parameters={"validatorUrl": None, "docExpansion": "list", "defaultModelsExpandDepth": 0},
)
#: Swagger UI's files, and what they are.
FILES: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
#: The front page; it loads nothing from other servers.
FRONT: Final = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Penstock</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}</style>
<h1>Penstock {release()}</h1>
<p>Language models behind a queue. This is its gateway: it takes tasks over HTTP, and workers run them.</p>
<ul>
<li><a href="/console">/console</a>: what waits, runs and fails; a playground
<li><a href="/v1/models">/v1/models</a>: the models that there are
<li><code>POST /v1/chat/completions</code>, <code>POST /v1/completions</code>: as OpenAI's
<li><code>POST /v1/messages</code>: as Anthropic's
<li><code>POST /v1/tasks</code>: submit, leave, come back
<li><a href="/docs">/docs</a>: all of it, to read and to try; <a href="/openapi.json">/openapi.json</a>: for tools
<li><a href="/readyz">/readyz</a>, <a href="/livez">/livez</a>, <a href="/metrics">/metrics</a>: for machines
</ul>
</html>
"""


class Documented(FastAPI):
    """A FastAPI application whose document says what is answered."""

    @cached_property
    def document(self) -> bytes:
        """The document as JSON, made once: whoever asks for it needs no key."""
        return json.dumps(self.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for operation in (item for methods in document["paths"].values() for item in methods.values()):
                if "description" in operation:  # FastAPI's own summary is the function's name
                    operation["summary"] = _first_sentence(operation["description"])
                if "security" in operation:
                    operation["security"].append({})  # a gateway that asks for no keys takes requests without
                    operation["responses"] = dict(sorted((_REFUSALS | operation["responses"]).items()))
                if _AUTOMATIC[0] in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
            for path, example in EXAMPLES.items():
                document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"] = example
            for name in _AUTOMATIC:
                document["components"]["schemas"].pop(name, None)
        return super().openapi()


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")


def _headers(page: str) -> dict[str, str]:
    """Headers with which a browser runs only what stands in this page or comes from this server, and shows the page in
    no frame. What stands in it is named by its hash (Content Security Policy 3, 2.3.1)."""
    hashes = {
        tag: "".join(
            f" 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    policy = (
        "default-src 'self'",
        f"script-src 'self'{hashes['script']}",
        f"style-src 'self'{hashes['style']}",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {"content-security-policy": "; ".join(policy), "referrer-policy": "no-referrer"}


FRONT_HEADERS: Final = _headers(FRONT)

DOCS_HEADERS: Final = _headers(bytes(DOCS.body).decode())


@router.get("/", response_class=HTMLResponse)
async def front() -> HTMLResponse:
    """A page that says what this server is and links to its endpoints."""
    return HTMLResponse(FRONT, headers=FRONT_HEADERS)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return Response(request.app.document, media_type="application/json")


@router.get(f"{DOCS_ASSETS}{{name}}", include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    """A file that /docs loads. It is answered in one piece, which is in memory once: so who does not take it holds no
    open file, and its connection is an idle one, which makes room for others."""
    if name not in FILES:
        raise HTTPException(404)
    content, tag = _file(name)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=FILES[name], headers={"etag": tag})


@cache
def _file(name: str) -> tuple[bytes, str]:
    """One of FILES, from the package that ships it, and its entity tag."""
    content = (Path(fastapi_offline.__file__).parent / "static" / name).read_bytes()
    return content, f'"{sha256(content).hexdigest()[:32]}"'


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """The OpenAPI document by Swagger UI."""
    return HTMLResponse(DOCS.body, headers=DOCS_HEADERS)
