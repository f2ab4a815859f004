"""Anthropic's client, and LangChain's on it, unmodified, on a real system; what it is answered in detail is in
`tests/producers/gateway/anthropic`."""

from __future__ import annotations

import pytest

from tests.conformance.clients import python
from tests.conformance.conftest import System
from tests.conformance.test_clients import check_person, check_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_anthropics_client_works_unmodified(system: System) -> None:
    told = python("anthropic_client.py", system.url)
    for answer in (told["text"], told["prefilled"], told["stopped"]):
        whole, streamed = answer["texts"]
        assert whole == streamed
        assert [prompt for _, prompt in answer["used"]] == [answer["counted"]] * 2
    text, stopped = told["text"], told["stopped"]
    assert text["ends"] == [["max_tokens", None]] * 2
    assert stopped["ends"] == [["stop_sequence", told["stop"]]] * 2
    assert stopped["texts"][0] == text["texts"][0].partition(told["stop"])[0]
    calls = told["calls"]
    assert [name for name, _ in calls["calls"]] == ["weather"] * 2
    for _, place in calls["calls"]:
        check_place(place)
    assert (calls["ends"], calls["answer"]) == (["tool_use"] * 2, ["text"])
    assert calls["kinds"].count("input_json") > 1, "arguments come in pieces"
    assert told["runner"] == ["tool_use"]
    assert told["refused"] == [
        ["NotFoundError", "not_found_error", "model_not_found", True],
        ["BadRequestError", "invalid_request_error", "invalid_value", True],
    ]
    assert told["models"] == ["tiny"]


@pytest.mark.exhaustive
def test_langchains_client_calls_tools_and_makes_objects(system: System) -> None:
    told = python("langchain_anthropic_client.py", system.url)
    assert len(told["calls"]) == 2
    for place in told["calls"]:
        check_place(place)
    for person in told["people"]:
        check_person(person)
    assert told["answer"]
    assert told["used"]["total_tokens"] == told["used"]["input_tokens"] + told["used"]["output_tokens"]
