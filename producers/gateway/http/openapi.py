"""The OpenAPI document: FastAPI's, with examples, without the answer that FastAPI adds to every route by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from fastapi import FastAPI

#: FastAPI's schemas for bad parameters. Our answer to those is a 400 of our own form (`errors`).
_AUTOMATIC: Final = ("HTTPValidationError", "ValidationError")
_ERROR: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorView"}}}
#: The answers to a key that does not work, or lacks what the operation needs.
_REFUSALS: Final = {
    "401": {"description": "There is no key, or it does not work.", "content": _ERROR},
    "403": {"description": "The key is not for this.", "content": _ERROR},
}
_MESSAGES: Final = [{"role": "user", "content": "Write the function add(a, b)."}]
_EVENTS: Final = ["response.completed", "response.failed"]
#: Bodies to begin with, for those who try an operation: path -> JSON. Made up from the schemas, they would be refused.
EXAMPLES: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/tasks": {"model": "tiny", "prompt": "def main():", "max_tokens": 40},
    "/v1/chat/completions": {"model": "tiny", "messages": _MESSAGES, "max_completion_tokens": 40},
    "/v1/completions": {"model": "tiny", "prompt": "def main():", "max_tokens": 40},
    "/v1/responses": {"model": "tiny", "input": "Write the function add(a, b).", "background": True},
    "/v1/batches": {"input_file_id": "file-...", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/webhook_endpoints": {"url": "https://example.com/hook", "event_types": _EVENTS},
    "/v1/webhook_endpoints/{endpoint_id}": {"event_types": _EVENTS, "name": "billing"},
    "/v1/webhook_endpoints/{endpoint_id}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
    "/v1/webhook_endpoints/{endpoint_id}/test": {"event_type": _EVENTS[0]},
    "/v1/keys": {"tenant": "acme", "name": "billing", "scopes": ["submit", "read"], "rpm": 600},
    "/v1/keys/{key_id}": {"rpm": 1200, "models": None},
    "/v1/keys/{key_id}/rotate": {"overlap": 3600},
    "/v1/tenants/{tenant}/limits": {"rpm": 6000, "budget_tokens": 1_000_000},
}


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
                    operation["responses"] = dict(sorted((operation["responses"] | _REFUSALS).items()))
                if _AUTOMATIC[0] in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
            for path, example in EXAMPLES.items():
                document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"] = example
            for name in _AUTOMATIC:
                document["components"]["schemas"].pop(name, None)
        return super().openapi()


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")
