"""docs/http.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.gateway.openai import parameters
from producers.gateway.openai.chat import OWN as CHAT
from producers.gateway.openai.chat import RENAMED as CHAT_RENAMED
from producers.gateway.openai.completions import OWN as COMPLETIONS
from producers.gateway.openai.completions import RENAMED as COMPLETIONS_RENAMED
from producers.task import Task

PAGE = (Path(__file__).parents[4] / "docs" / "http.md").read_text()


@pytest.mark.parametrize("name", parameters.SAME)
def test_limits_are_those_of_a_task(name: str) -> None:
    assert f"| `{name}` | {Task.model_fields[name].description} |" in PAGE


NAMED = [
    *(*CHAT, *CHAT_RENAMED, *COMPLETIONS, *COMPLETIONS_RENAMED),
    *(*parameters.HINTS, *parameters.NOT_OFFERED, *parameters.SERVICE_TIERS, "stream_options.include_usage"),
]


@pytest.mark.parametrize("name", NAMED)
def test_every_parameter_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE
