"""OpenAI's JavaScript client, unmodified, against a real gateway, queue and worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.conftest import System
from tests.conformance.javascript import start
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def said(system: System) -> dict[str, Any]:
    """What the client was told, call by call."""
    process = start("calls.mjs", system.url)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    answers: dict[str, Any] = json.loads(out)
    return answers


def test_models(said: dict[str, Any]) -> None:
    assert said["models"] == ["tiny", "tiny"]


def test_a_chat_is_streamed_as_it_is_answered(said: dict[str, Any]) -> None:
    assert said["chat"]
    assert said["chat"] == said["chatStream"] == said["chatFinal"]


def test_a_completion_is_streamed_as_it_is_answered(said: dict[str, Any]) -> None:
    assert [tokens for _, tokens in said["completions"]] == [12, 12]
    assert said["completions"][0][0] == said["completionStream"]
    assert said["usage"]["completion_tokens"] == 12


def test_a_response_is_kept_streamed_and_deleted(said: dict[str, Any]) -> None:
    text = said["response"][0]
    assert said["response"] == [text, 12, "7"]
    assert text == said["retrieved"] == said["responseFinal"]
    kinds = [kind for kind, _, _ in said["responseStream"]]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    assert [number for _, number, _ in said["responseStream"]] == list(range(len(kinds)))
    assert "".join(d for kind, _, d in said["responseStream"] if kind == "response.output_text.delta") == text
    assert (said["items"], said["conversation"]) == (["Write the function add(a, b)."], 3)
    assert said["gone"] == {"kind": "NotFoundError", "status": 404, "code": "response_not_found", "param": None}


def test_a_background_response_runs_by_itself_and_is_cancelled(said: dict[str, Any]) -> None:
    assert said["background"] == ["queued", "incomplete", said["response"][0]]
    assert said["cancelled"] == "cancelled"


def test_files_batches_and_webhook_endpoints(said: dict[str, Any]) -> None:
    assert (said["file"], said["fileDeleted"]) == ([3, "{}\n", True], True)
    assert said["batch"] == ["validating", True, "cancelling"]
    assert said["hook"] == ["whsec_", "other"]
    assert (said["hooks"], said["rotated"], said["hookDeleted"]) == ([True], True, True)


def test_errors_are_the_clients_own(said: dict[str, Any]) -> None:
    assert said["unknownModel"] | {"param": None} == {
        "kind": "NotFoundError",
        "status": 404,
        "code": "model_not_found",
        "param": None,
    }
    assert (said["badValue"]["kind"], said["badValue"]["param"]) == ("BadRequestError", "temperature")
    assert (said["notOffered"]["kind"], said["notOffered"]["param"]) == ("BadRequestError", "tools[0].type")


def test_a_stream_that_is_left_cancels_its_task(said: dict[str, Any], system: System) -> None:
    until(lambda: system.status(said["left"]) == "cancelled")
