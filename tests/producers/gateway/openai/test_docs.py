"""docs/use/http.md and docs/use/responses.md say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.contract.task import Task
from producers.gateway import GatewaySettings, create_app
from producers.gateway.openai import parameters
from producers.gateway.openai.chat import PARAMETERS as CHAT
from producers.gateway.openai.completions import PARAMETERS as COMPLETIONS
from producers.gateway.openai.responses import request

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "use" / "http.md").read_text()
RESPONSES = (DOCS / "use" / "responses.md").read_text()
TAKEN = request.PARAMETERS


@pytest.mark.parametrize("name", parameters.SAME)
def test_limits_are_those_of_a_task(name: str) -> None:
    assert f"| `{name}` | {Task.model_fields[name].description} |" in PAGE


NAMED = [
    *(name for one in (CHAT, COMPLETIONS) for name in (*one.endpoint_schemas, *one.renamed)),
    *(*parameters.HINTS, *parameters.NOT_OFFERED, *parameters.SERVICE_TIERS, "seed"),
    *(f"stream_options.{name}" for name in parameters.STREAM_OPTIONS if name != "include_obfuscation"),
]


@pytest.mark.parametrize("name", NAMED)
def test_every_parameter_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [*TAKEN.endpoint_schemas, *TAKEN.renamed, *TAKEN.not_offered])
def test_every_parameter_of_responses_is_named(name: str) -> None:
    assert f"`{name}`" in RESPONSES


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_openapi_has_the_parameters_of_the_page(path: str) -> None:
    pages = PAGE + RESPONSES if path.endswith("responses") else PAGE
    app = create_app(GatewaySettings("redis://127.0.0.1:1", "redis://127.0.0.1:1"))
    schema = app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", *TAKEN.same} < schema["properties"].keys()
    for name, about in schema["properties"].items():
        assert f"`{name}" in pages
        assert about
