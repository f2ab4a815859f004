"""instructor against the gateway that the first argument names, in the modes that the second lists. A script for
`.venv/clients`: what came is printed as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Who wrote it."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class City(BaseModel):
    """Where it was written."""

    city: str = Field(max_length=20)


def main(url: str, mode: instructor.Mode) -> dict[str, Any]:
    """What the mode gives in one piece, and in pieces."""
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=180)
    client = instructor.from_openai(openai, mode=mode)
    limit = "max_output_tokens" if mode.value.startswith("responses") else "max_tokens"
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who wrote it?"}],
        "temperature": 0,
        "max_retries": 0,
        limit: 200,
    }
    if mode is instructor.Mode.PARALLEL_TOOLS:
        several = client.create(response_model=Iterable[Person | City], **asked)
        return {"several": [[type(one).__name__, one.model_dump()] for one in several]}
    told = {"whole": client.create(response_model=Person, **asked).model_dump()}
    pieces = [one.model_dump() for one in client.create_partial(response_model=Person, **asked)]
    return told | {"pieces": len(pieces), "last": pieces[-1]}


if __name__ == "__main__":
    url, names = sys.argv[1:]
    print(json.dumps({name: main(url, instructor.Mode[name]) for name in names.split(",")}))
