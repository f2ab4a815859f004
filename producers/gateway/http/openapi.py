"""The OpenAPI document: FastAPI's, without the answer that FastAPI adds to every route and that none here gives."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

#: FastAPI's schemas for bad parameters. Our answer to those is a 400 of our own form (`errors`).
_AUTOMATIC: Final = ("HTTPValidationError", "ValidationError")


class Documented(FastAPI):
    """A FastAPI application whose document says what is answered."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            made = super().openapi()
            for operation in (one for methods in made["paths"].values() for one in methods.values()):
                if "description" in operation:  # FastAPI's own summary is the function's name
                    operation["summary"] = _first_sentence(operation["description"])
                if _AUTOMATIC[0] in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
            for name in _AUTOMATIC:
                made["components"]["schemas"].pop(name, None)
        return super().openapi()


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")
