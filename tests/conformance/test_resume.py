"""A client's stream of a background response goes on after its gateway was killed, event by event."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conformance.conftest import System, gateway
from tests.conformance.javascript import start
from tests.exhaustive import few
from tests.processes import free_port
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Read = Callable[[str], Iterator[list[Any]]]
ENDS = ("response.completed", "response.incomplete", "response.failed")


def in_javascript(url: str) -> Iterator[list[Any]]:
    process = start("resume.mjs", url)
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)
    assert process.wait(PATIENCE_S) == 0, process.stderr and process.stderr.read()


def in_python(url: str) -> Iterator[list[Any]]:
    """As `js/resume.mjs` does it."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20)
    last, ended = -1, False
    stream: Any = client.responses.create(
        model="tiny",
        input="Write a long program.",
        max_output_tokens=900,
        background=True,
        stream=True,
        extra_body={"seed": 1, "ignore_eos": True},
    )
    response_id = ""
    while not ended:
        try:
            for event in stream:
                response_id = response_id or event.response.id
                last, ended = event.sequence_number, event.type in ENDS
                yield [event.type, last, getattr(event, "delta", "")]
        except (openai.APIError, OSError) as error:
            yield ["broken", last, type(error).__name__]
        if not ended:
            stream = client.responses.retrieve(response_id, stream=True, starting_after=last)
    yield ["id", last, response_id]


def read_through_a_kill(system: System, read: Read) -> list[list[Any]]:
    """All that a client sees, of which it had seen 20 events when its gateway was killed."""
    seen: list[list[Any]] = []
    port = free_port()  # no connection may take it while nobody listens
    with gateway(system.store_url, port) as (url, process):
        events = read(url)
        with system.steps.held(60):
            while len(seen) < 20:
                seen.append(next(events))
            process.kill()
            process.join()
    with gateway(system.store_url, port):
        return seen + list(events)


@pytest.mark.parametrize("read", few([in_python, in_javascript], in_python))
def test_a_stream_goes_on_from_any_gateway(system: System, read: Read) -> None:
    *seen, (_, last, response_id) = read_through_a_kill(system, read)
    assert "broken" in [kind for kind, _, _ in seen]
    seen = [event for event in seen if event[0] != "broken"]
    assert [number for _, number, _ in seen] == list(range(last + 1))
    text = "".join(delta for kind, _, delta in seen if kind == "response.output_text.delta")
    with OpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
        assert client.responses.retrieve(response_id).output_text == text
